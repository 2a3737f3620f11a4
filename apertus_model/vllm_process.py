"""Runs vLLM in a process of its own, for `apertus_model.vllm_client`. vLLM needs other releases of FastAPI
and torch than this project, so it has a separate environment, whose interpreter runs this file: it imports
only the standard library, vLLM, and for tasks lm-evaluation-harness.

Standard input has a line of JSON with the arguments of the engine, then one line for each batch. Standard
output has `{}`, or `{"error": text}` if something cannot be imported, then an answer to each batch:

- to `{"prompts", "sampling": [arguments of SamplingParams, for each prompt]}`, the ids of the completions of
  each prompt, `[[[id]]]`;
- to `{"prompts", "tokens": [id]}`, for each prompt the logarithm of the probability of each of the tokens
  after it, `[[float]]`, or `{"error": text}` if this release of vLLM cannot return them;
- to `{"kind", "requests"}`, if the first line had the version of the harness as `lm_eval`, the answers of
  the harness's own model for vLLM to requests of one type, such as `loglikelihood`.

Prompts are lists of ids. Output of vLLM goes to standard error.

Invariant: the process ends with its standard input.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import IO, Any

MOST_TOKENS = 128  # the most tokens whose probabilities vLLM returns at once
Answer = Callable[[dict[str, Any]], Any]


def main(lines: IO[str], answers: IO[str]) -> None:
    """Answers the batches line by line."""

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    engine = json.loads(lines.readline())
    try:
        answer = harness_model(**engine) if "lm_eval" in engine else model_of_tokens(**engine)
    except ImportError as error:
        say({"error": str(error)})
        return
    say({})
    for line in lines:
        say(answer(json.loads(line)))


def model_of_tokens(**engine: Any) -> Answer:
    """A function that asks vLLM's model for completions or probabilities of tokens."""
    import vllm

    model = vllm.LLM(**engine)

    def answer(batch: dict[str, Any]) -> Any:
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        if "tokens" in batch:
            return log_probabilities(vllm, model, prompts, batch["tokens"])
        parameters = [vllm.SamplingParams(**settings) for settings in batch["sampling"]]
        outputs = model.generate(prompts, parameters, use_tqdm=False)
        return [[list(output.token_ids) for output in answer.outputs] for answer in outputs]

    return answer


def harness_model(lm_eval: str, **engine: Any) -> Answer:
    """A function that asks the harness's model for vLLM. `lm_eval`: the version that wrote the requests;
    ImportError for another version."""
    from lm_eval.api.instance import Instance
    from lm_eval.models import vllm_causallms

    if (installed := version("lm_eval")) != lm_eval:
        raise ImportError(f"lm_eval {installed} is there, and {lm_eval} here")
    model = vllm_causallms.VLLM(**engine)
    rolling = vllm_causallms.get_rolling_token_windows

    def windows(token_list: list[int], prefix_token: int, **kwargs: Any) -> Any:
        """The windows of a whole text without its BOS, since the harness puts one before it."""
        begun = token_list[:1] == [prefix_token]
        return rolling(token_list[1:] if begun else token_list, prefix_token, **kwargs)

    vllm_causallms.get_rolling_token_windows = windows

    def answer(batch: dict[str, Any]) -> Any:
        kind = batch["kind"]
        requests = [
            Instance(kind, {}, tuple(request), index) for index, request in enumerate(batch["requests"])
        ]
        return getattr(model, kind)(requests)

    return answer


def log_probabilities(vllm: Any, model: Any, prompts: list[Any], tokens: list[int]) -> Any:
    """For each prompt, log p of each of the tokens, before any temperature."""
    if not hasattr(vllm.SamplingParams, "logprob_token_ids"):
        return {"error": f"vLLM {vllm.__version__} does not tell the probabilities of chosen tokens"}
    of_prompts: list[list[float]] = [[] for _ in prompts]
    for begin in range(0, len(tokens), MOST_TOKENS):
        some = tokens[begin : begin + MOST_TOKENS]
        parameters = vllm.SamplingParams(max_tokens=1, logprob_token_ids=some, detokenize=False)
        for row, answer in zip(of_prompts, model.generate(prompts, parameters, use_tqdm=False), strict=True):
            (first,) = answer.outputs[0].logprobs
            row += [first[token].logprob for token in some]
    return of_prompts


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, own)
