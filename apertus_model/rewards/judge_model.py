"""Models that a judge asks (`judge.AskedModel`): how probable is each of a few answers as the first token?

Invariants: the probability of an answer is that of all tokens that read as the answer, including those with
white space around it or in full width; no file is fetched and no code of a folder is run.
"""

import copy
import inspect
import math
import unicodedata
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator

from apertus_model.pretrained import own_device, read_pretrained
from apertus_model.rewards.base import RewardError, TooLongError, check_vocabulary
from apertus_model.server_client import ServerClient
from apertus_model.tokenizer_files import open_folder
from apertus_model.vllm_client import Vllm
from specs.foreign import Foreign, shown
from specs.judge import Judge

Template = dict[str, bool | str]
BEST = 20  # tokens whose log-probabilities are asked of a server, the most that OpenAI's protocol allows


def reads_as(token: str) -> str:
    """The text that a token stands for: "７", " 7" and "7" are the same."""
    return unicodedata.normalize("NFKC", token).strip()


class ChatTokens:
    """Questions of at most `max_tokens`, and answers, as the token ids of a folder's model, by its tokenizer
    and chat template, which gets `arguments`. RewardError when there is no chat template, TokenizerError when
    transformers cannot open the folder. `name`: of the judge, for messages."""

    def __init__(self, folder: Path, name: str, max_tokens: int, arguments: Template) -> None:
        self._name, self._max_tokens, self._arguments = name, max_tokens, arguments
        self.tokenizer: Any = open_folder(folder, as_written=True, name=f"judge {name}")
        if not self.tokenizer.chat_template:
            raise RewardError(
                f"the judge {name} has no chat template, so it cannot be asked."
                " Fix: use an instruct model, or put its chat_template.jinja in the folder"
            )
        self._ids: dict[str, list[int]] = {}

    def question(self, text: str) -> list[int]:
        """The tokens that the model reads before its reply. TooLongError above `max_tokens`."""
        tokens = self._encoded(self._rendered(text))
        if len(tokens) > self._max_tokens:
            raise TooLongError(
                f"the judge would read {len(tokens):,} tokens, more than max_tokens {self._max_tokens:,} of"
                " the reward. Fix: raise it, as far as the model allows, or lower max_tokens of the stage"
            )
        return tokens

    def answer(self, answer: str) -> list[int]:
        """Ids of the tokens that read as an answer. RewardError when the answer itself is not among them."""
        if not self._ids:
            texts = self.tokenizer.batch_decode([[index] for index in range(len(self.tokenizer))])
            for index, text in enumerate(texts):
                self._ids.setdefault(reads_as(text), []).append(index)
        before = self._rendered("?")
        written = self._encoded(before + answer)[len(self._encoded(before)) :]
        if len(written) != 1 or written[0] not in self._ids.get(answer, []):
            pieces = self.tokenizer.convert_ids_to_tokens(written)
            raise RewardError(
                f"the judge {self._name} writes {answer!r} as {len(pieces)} tokens ({', '.join(pieces)}), so"
                " the first token does not say which answer it is. Fix: use a model whose tokenizer has every"
                " digit, and the letters A and B, as single tokens"
            )
        return self._ids[answer]

    def _rendered(self, question: str) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=False,
            **self._arguments,
        )

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class TransformersJudge:
    """A causal language model of a local folder, asked through transformers, each question alone, so that its
    answer does not depend on the others. `beginnings`: two questions whose common beginning is that of all;
    its tokens are computed once. RewardError when transformers cannot open the folder."""

    def __init__(self, folder: Path, name: str, chat: ChatTokens, beginnings: tuple[str, str]) -> None:
        from transformers import AutoModelForCausalLM

        self._chat = chat
        try:
            self._model: Any = read_pretrained(AutoModelForCausalLM, folder)
        # transformers raises errors of many kinds for a folder that it cannot open
        except Exception as error:
            raise RewardError(
                f"the judge {name} cannot be opened: {type(error).__name__}: {error}"
            ) from error
        check_vocabulary(f"judge {name}", chat.tokenizer, self._model)
        self._model.to(own_device())
        # only the logits of the last token, if the architecture can leave out the others
        keeps = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._last: dict[str, int] = {"logits_to_keep": 1} if keeps else {}
        first, second = map(chat.question, beginnings)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        self._shared = [token for token, _ in same]
        self._cache: Any = self._forward(self._shared, None).past_key_values if self._shared else None

    def ask(self, questions: Sequence[str], answers: Sequence[str]) -> list[list[float]]:
        ids = [self._chat.answer(answer) for answer in answers]
        return [self._probabilities(question, ids) for question in questions]

    @torch.inference_mode()
    def _probabilities(self, question: str, ids: list[list[int]]) -> list[float]:
        tokens, cache, shared = self._chat.question(question), None, len(self._shared)
        if shared and tokens[:shared] == self._shared and len(tokens) > shared:
            tokens, cache = tokens[shared:], copy.deepcopy(self._cache)
        logits = self._forward(tokens, cache).logits[0, -1].double()
        probabilities = torch.softmax(logits, dim=-1)
        return [float(probabilities[same].sum()) for same in ids]

    @torch.inference_mode()
    def _forward(self, tokens: list[int], cache: Any) -> Any:
        row = torch.tensor([tokens], device=self._model.device)
        return self._model(input_ids=row, past_key_values=cache, use_cache=True, **self._last)


class VllmJudge:
    """A model of a local Hugging Face folder, asked through vLLM. The last digits of a probability can depend
    on the questions that are computed together."""

    def __init__(self, vllm: Vllm, chat: ChatTokens) -> None:
        self._vllm, self._chat = vllm, chat

    def ask(self, questions: Sequence[str], answers: Sequence[str]) -> list[list[float]]:
        ids = [self._chat.answer(answer) for answer in answers]
        tokens = [self._chat.question(question) for question in questions]
        rows = self._vllm.log_probabilities(tokens, [token for same in ids for token in same])
        return [[sum(math.exp(next(row)) for _ in same) for same in ids] for row in map(iter, rows)]


class _Best(Foreign):
    token: str
    logprob: float = Field(le=1e-6)


class _Place(Foreign):
    top_logprobs: list[_Best] = Field(default_factory=list, max_length=BEST)

    @field_validator("top_logprobs")
    @classmethod
    def _are_probabilities(cls, best: list[_Best]) -> list[_Best]:
        if (total := sum(math.exp(token.logprob) for token in best)) > 1.001:
            raise ValueError(f"their probabilities sum to {total:.4g}")
        # U+FFFD stands for half a character
        whole = [token.token for token in best if "\ufffd" not in token.token]
        if twice := [token for token in whole if whole.count(token) > 1]:
            raise ValueError(f"the token {shown(twice[0])} is repeated")
        return best


class _LogProbabilities(Foreign):
    content: list[_Place] | None = Field(None, max_length=1)


class _Choice(Foreign):
    logprobs: _LogProbabilities | None = None


class _Reply(Foreign):
    choices: list[_Choice] = Field(min_length=1, max_length=1)


class ServerJudge:
    """A model on a server. An answer that is not among the `BEST` likeliest tokens has probability 0."""

    def __init__(self, judge: Judge) -> None:
        assert judge.server is not None, "checked by the caller"
        self._server, self._arguments = judge.server, judge.chat_template_kwargs
        self._client = ServerClient(judge.server, "chat/completions")

    def ask(self, questions: Sequence[str], answers: Sequence[str]) -> list[list[float]]:
        asked = {"max_tokens": 1, "temperature": 1.0, "n": 1, "logprobs": True, "top_logprobs": BEST}
        template = {"chat_template_kwargs": self._arguments} if self._arguments else {}
        requests = []
        for index, question in enumerate(questions):
            body = {"model": self._server.model, "messages": [{"role": "user", "content": question}]}
            requests.append((f"question {index + 1} of {len(questions)}", body | asked | template))
        return self._client.ask_all(requests, _Reply, lambda reply: self._probabilities(reply, answers))

    def _probabilities(self, reply: _Reply, answers: Sequence[str]) -> list[float]:
        logprobs = reply.choices[0].logprobs
        best = logprobs.content[0].top_logprobs if logprobs is not None and logprobs.content else []
        if not best:
            raise RewardError(
                f"{self._client.url} returns no log-probabilities for model {self._server.model!r}."
                " Fix: use a server that has them (vLLM does), or a judge from a folder"
            )
        probabilities = dict.fromkeys(answers, 0.0)
        for token in best:
            if (text := reads_as(token.token)) in probabilities:
                probabilities[text] += math.exp(token.logprob)
        if not any(probabilities.values()):
            likeliest = ", ".join(repr(token.token) for token in best[:5])
            raise RewardError(
                f"none of the {len(best)} best tokens of {self._client.url} is one of {', '.join(answers)};"
                f" they begin with {likeliest}. Fix: use a template that asks for nothing else,"
                " chat_template_kwargs that turn reasoning off, or a judge that writes every"
                " answer as a single token"
            )
        return list(probabilities.values())
