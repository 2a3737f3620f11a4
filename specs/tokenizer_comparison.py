"""The comparison of tokenizers as it is stored: `evaluation.json` of an `evaluate_tokenizers` stage.

Invariant: every tokenizer has a Gini coefficient, and a parity of every language.
"""

from __future__ import annotations

from pydantic import BaseModel, model_validator


class Estimate(BaseModel):
    """A measure, and its 95% interval."""

    value: float
    low: float
    high: float

    def metrics(self, name: str) -> dict[str, float]:
        return {name: self.value, f"{name}/low": self.low, f"{name}/high": self.high}


class Language(BaseModel):
    """The results of a tokenizer for one language."""

    measures: dict[str, Estimate | None]  # None for measures of words where no spaces separate them
    difference: dict[str, Estimate | None]  # from the tokenizer of `against`; empty for that tokenizer itself
    unknown_tokens: int
    changed_lines: int


class TokenizerResult(BaseModel):
    """The results of a tokenizer for all languages."""

    vocabulary: dict[str, int | float]  # its size, and measures of it
    measures: dict[str, Estimate]
    difference: dict[str, Estimate]
    languages: dict[str, Language]


class Comparison(BaseModel):
    """The content of `evaluation.json`."""

    lines: int
    languages: list[str]
    without_words: list[str]  # languages that are written without spaces
    parity_to: str
    against: str
    tokenizers: dict[str, TokenizerResult]

    @model_validator(mode="after")
    def _complete(self) -> Comparison:
        """Checks that everything that a report draws is present."""
        for name, result in self.tokenizers.items():
            if "gini" not in result.measures:
                raise ValueError(f"tokenizer '{name}' has no Gini coefficient")
            for language in self.languages:
                measured = result.languages.get(language)
                if measured is None or measured.measures.get("parity") is None:
                    raise ValueError(f"tokenizer '{name}' has no parity of '{language}'")
        return self

    def metrics(self) -> dict[str, float]:
        """The metrics, by the names of `EvaluateTokenizersPart.metrics`."""
        values: dict[str, float] = {}
        for name, result in self.tokenizers.items():
            values |= {f"{name}/{measure}": value for measure, value in result.vocabulary.items()}
            for measure, estimate in result.measures.items():
                values |= estimate.metrics(f"{name}/{measure}")
            for measure, estimate in result.difference.items():
                values |= estimate.metrics(f"{name}/difference/{measure}")
            for language, of_language in result.languages.items():
                for measure, maybe in of_language.measures.items():
                    values |= {} if maybe is None else maybe.metrics(f"{name}/{measure}/{language}")
        return values
