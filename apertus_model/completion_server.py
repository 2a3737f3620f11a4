"""Samples completions from a server that speaks OpenAI's protocol (`apertus_model.server_client`)."""

from collections.abc import Callable, Sequence

from pydantic import Field

from apertus_model.chat.usual import protocol_messages, usual_tools
from apertus_model.data.rows import Row
from apertus_model.prompt_format import Completion, GenerationError, TextFormat, TokenFormat
from apertus_model.server_client import Request, ServerClient
from specs.foreign import Foreign, ForeignError, shown
from specs.stages.preference_data import Sampling


class _Message(Foreign):
    content: str | None = None


class _Choice(Foreign):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None  # from vLLM, which is asked for them
    message: _Message | None = None
    finish_reason: str


class _Answer(Foreign):
    choices: list[_Choice] = Field(min_length=1)


class ServerGenerator:
    """A generator that samples from a server. `written`: the format of the model; with `api: chat` a
    `TextFormat` suffices. `seed_of`: gives the seed of the prompt with an index. `pause`: as in the client.
    GenerationError when the environment variable with the key is not set."""

    def __init__(
        self,
        sampling: Sampling,
        written: TextFormat,
        seed_of: Callable[[int], int],
        pause: Callable[[float], object] | None = None,
    ) -> None:
        assert sampling.server is not None, "checked with the spec"
        self._sampling, self._server = sampling, sampling.server
        self._format, self._seed_of = written, seed_of
        path = "chat/completions" if self._server.api == "chat" else "completions"
        self._client = ServerClient(self._server, path, pause)

    def complete(self, prompts: Sequence[Row], *, first: int) -> list[list[Completion]]:
        """See `Generator.complete`. ServerFailure when a prompt has no answer after all tries;
        GenerationError for an answer that asking again does not change."""
        bodies = (self._body(row, index) for index, row in enumerate(prompts, first))
        requests = [(f"prompt {row['id']}", body) for row, body in zip(prompts, bodies, strict=True)]
        return self._client.ask_all(requests, _Answer, self._read)

    def _body(self, prompt: Row, index: int) -> Request:
        sampling = self._sampling
        body: Request = {
            "model": self._server.model,
            "n": sampling.distinct,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": self._seed_of(index),
        }
        if self._server.api == "completions":
            assert isinstance(self._format, TokenFormat), "the plan gives the model"
            return body | {"prompt": self._format.tokens(prompt), "return_token_ids": True}
        tools = usual_tools(prompt.get("tools"))
        messages = protocol_messages(prompt["messages"])
        return body | {"messages": messages} | ({"tools": tools} if tools else {})

    def _read(self, answer: _Answer) -> list[Completion]:
        """The completions in an answer. ForeignError for one that no model can have given."""
        choices, count = answer.choices, self._sampling.distinct
        if len(choices) != count:
            raise GenerationError(
                f"{self._client.url} gives {len(choices)} completions where n: {count} are asked for. Fix:"
                " set n: 1, or use a server that has n"
            )
        ordered = sorted(choices, key=lambda choice: choice.index)
        if (indices := [choice.index for choice in ordered]) != [*range(count)]:
            raise ForeignError(f"the values of index in choices are {shown(indices)}, not 0 to {count - 1}")
        return [self._completion(choice) for choice in ordered] * (self._sampling.n // count)

    def _completion(self, choice: _Choice) -> Completion:
        """The completion by its sampled ids if the server gives them, else by its text, encoded again."""
        finished, most = choice.finish_reason == "stop", self._sampling.max_new_tokens
        if choice.token_ids is not None and isinstance(self._format, TokenFormat):
            if (number := len(choice.token_ids)) > most:
                raise ForeignError(f"token_ids of a choice has {number:,} tokens; max_tokens is {most:,}")
            if wrong := [id_ for id_ in choice.token_ids if not 0 <= id_ < self._format.vocab_size]:
                size = self._format.vocab_size
                raise ForeignError(f"token_ids of a choice has {shown(wrong[0])}, not one of {size:,} ids")
            ends = self._format.end_ids
            whole = not finished or any(token in ends for token in choice.token_ids)
            return self._format.completion(choice.token_ids if whole else [*choice.token_ids, ends[0]])
        chat = self._server.api == "chat"
        if chat and choice.message is None:
            raise ForeignError("a choice has no message")
        text = choice.text if choice.message is None else choice.message.content
        if text is None and (finished or not chat):
            raise ForeignError(f"a choice with finish_reason {shown(choice.finish_reason)} has no text")
        return self._format.written(text or "", finished)
