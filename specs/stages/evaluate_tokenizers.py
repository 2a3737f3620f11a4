"""The `evaluate_tokenizers` stage: tokenizers side by side on parallel text, language by language.

Invariant: a unit is a line of the parallel text. Every language has the same lines, so tokens per line can be
compared across languages, and all tokenizers read the same text.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, StringConstraints

from specs.base import Spec, execution, identity, location, reference
from specs.errors import FieldPath, Problem, did_you_mean
from specs.sources import TABLES, SourceSpec
from specs.stages.base import Part
from specs.stages.gates import Measuring
from specs.units import Reference

PARALLEL = ("text", *TABLES, "documents")
"""The formats of sources from which parallel text is read."""
COUNTS = "counts:"
"""The prefix of the role of the counts of a tokenizer among the inputs of an evaluation."""
OF_LANGUAGE = {
    "tokens_per_line": "tokens per line",
    "tokens_per_byte": "tokens per byte of UTF-8",
    "tokens_per_word": "tokens per word, between white space",
    "whole_words": "share of words that one token covers (STRR)",
    "parity": "parity: tokens relative to the language of parity_to",
}
"""Measured in each language, as a ratio of sums over all lines, and as the mean over languages."""
OVER_LANGUAGES = {
    "lines_per_token": "lines per token",
    "bytes_per_token": "bytes per token",
    "gini": "Gini coefficient of the tokens per line of the languages",
}
"""Measured over languages, each counting equally; the first two are means of the languages' ratios."""
OF_VOCABULARY = {
    "vocabulary_used": "share of the vocabulary that occurs in the text",
    "renyi_efficiency": "Rényi entropy of order 2.5 of the tokens, over that of a uniform vocabulary",
    "unknown_tokens": "unknown tokens",
    "changed_lines": "lines that decoding does not restore",
}
"""Measured once over all text, without an interval: it depends on the number of lines."""
ENDS = ("", "/low", "/high")
TokenizerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*$", max_length=100)]


class ComparedTokenizer(Spec):
    """One of the tokenizers: the name of a tokenizer stage, or `{path: FOLDER}`."""

    stage: Reference | None = reference(None, to="tokenizer")
    path: str | None = location(
        None, min_length=1, description="folder (any fsspec URL) with a tokenizer.json; nothing else is read"
    )

    def conflicts(self) -> Iterator[str]:
        if (self.stage is None) == (self.path is None):
            yield "name either a tokenizer stage, or the path of a folder with a tokenizer.json"


def _tokenizer(value: Any) -> Any:
    return {"stage": value} if isinstance(value, (str, Reference)) else value


ComparedField = Annotated[
    ComparedTokenizer, BeforeValidator(_tokenizer, json_schema_input_type=str | ComparedTokenizer)
]


class EvaluateTokenizersStage(Measuring):
    """Compares tokenizers on parallel text.

    Metrics are `<tokenizer>/<measure>` over all languages, `<tokenizer>/<measure>/<language>`, and
    `<tokenizer>/difference/<measure>`, the difference from `against`; each with `/low` and `/high`, a 95%
    interval of the bootstrap over lines, which draws the same lines for all languages and tokenizers. Special
    tokens are not counted. Measures are:

    - of a language, as ratios of sums, and as means over the languages: `tokens_per_line` (fertility; its
      reciprocal is the compression), `tokens_per_byte`, `tokens_per_word`, `whole_words` (share of the words
      that one token covers, STRR), `parity` (tokens relative to those of `parity_to`). Languages that are
      written without spaces have no words;
    - over languages, which count equally: `lines_per_token` and `bytes_per_token` (means of the languages'
      ratios), `gini` (of the tokens per line);
    - of the vocabulary, without intervals: `vocabulary_used` (share of its tokens that occur),
      `renyi_efficiency` (order 2.5), `unknown_tokens`, `changed_lines` (which decoding does not restore).

    Every figure depends on the languages and the number of lines: compare none across different sets.
    """

    VERSION: ClassVar[int] = 1
    kind: Literal["evaluate_tokenizers"] = identity()
    tokenizers: dict[TokenizerName, ComparedField] = reference(
        min_length=1,
        description="tokenizers by their names in metrics: each a tokenizer stage, or {path: FOLDER}",
    )
    sources: list[str] = reference(
        min_length=1,
        description="names of the pipeline's `sources:`. A row of jsonl, parquet, arrow and documents is a"
        " line, with its id (id_column) and its language (language_column), without which a file is a"
        " language and its rows are aligned. A file of text is a language, and its lines are aligned",
    )
    language_column: str = reference(
        "language",
        description="name in the source's `metadata`; a source without it has a file for each language,"
        " whose name up to the first dot is the language",
    )
    languages: list[str] = reference(
        default_factory=list, description="languages to compare; by default all of the sources"
    )
    lines: int | None = reference(
        None, ge=2, description="the first lines in the order of the sources; by default all"
    )
    incomplete: Literal["refuse", "leave_out"] = reference(
        "refuse", description="lines that some language lacks: an error, or left out for all languages"
    )
    parity_to: str = identity(description="language that the others are compared with")
    against: str | None = reference(
        None, description="name of the tokenizer that the others are compared with; by default the first"
    )
    seed: int = identity(0, ge=0, description="seed of the bootstrap")

    def conflicts(self) -> Iterator[str]:
        if self.against is not None and self.against not in self.tokenizers:
            meant = did_you_mean(self.against, self.tokenizers)
            yield f"against: there is no tokenizer '{self.against}'; {meant}"
        if twice := [language for language in self.languages if self.languages.count(language) > 1]:
            yield f"languages names '{twice[0]}' twice; list it once"
        if self.languages and self.parity_to not in self.languages:
            yield (
                f"parity_to '{self.parity_to}' is not among the languages;"
                f" {did_you_mean(self.parity_to, self.languages)}"
            )

    def source_fields(self) -> dict[str, FieldPath]:
        return {source: ("sources", index) for index, source in enumerate(self.sources)}

    def source_problems(self, name: str, source: SourceSpec, at: FieldPath) -> Iterator[Problem]:
        if source.format not in PARALLEL:
            message = f"source '{name}' has format {source.format}, which has no parallel lines"
            yield Problem(at, message, f"name a source of format {', '.join(PARALLEL)}.")
        if source.limit is not None:
            message = f"source '{name}' has a limit, which would cut languages at different lines"
            yield Problem(("sources", name, "limit"), message, "leave it out, and state lines: of the stage.")
        if self.language_column in source.metadata and source.id_column is None:
            message = f"rows of source '{name}' have languages and no id, so languages cannot be aligned"
            yield Problem(("sources", name), message, "set id_column: the column that translations share.")


class ParallelTextPart(Part):
    """The resolved parallel text. Inputs: `source:<i>` (documents) in order."""

    VERSION: ClassVar[int] = 2
    sources: list[SourceSpec] = identity()
    language_column: str = identity()
    languages: list[str] = identity(description="sorted; empty for all")
    lines: int | None = identity()
    incomplete: Literal["refuse", "leave_out"] = identity()


class TokenCountsPart(Part):
    """The resolved counts of one tokenizer. Inputs: `text`, and `tokenizer` or `folder`."""

    VERSION: ClassVar[int] = 1
    path: str | None = execution(None, description="path of the folder")


class EvaluateTokenizersPart(Part):
    """The resolved comparison. Inputs: `text`, and `counts:<name>` of each tokenizer."""

    parity_to: str = identity()
    against: str = identity()
    seed: int = identity()

    def metrics(self, tokenizers: Iterable[str], languages: Iterable[str]) -> Iterator[str]:
        """The names of all metrics. `tokens_per_word` and `whole_words` are left out for languages that are
        written without spaces."""
        measured, all_languages = [*OF_LANGUAGE, *OVER_LANGUAGES], list(languages)
        for name in tokenizers:
            yield from (f"{name}/{measure}" for measure in OF_VOCABULARY)
            of_languages = [f"{measure}/{language}" for measure in OF_LANGUAGE for language in all_languages]
            differences = [f"difference/{measure}" for measure in measured if name != self.against]
            for metric in (*measured, *of_languages, *differences):
                yield from (f"{name}/{metric}{end}" for end in ENDS)
