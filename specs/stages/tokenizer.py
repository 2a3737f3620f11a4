"""The `tokenizer` stage: byte-level BPE trained on text, an existing Hugging Face tokenizer folder, or the
tokenizer of a model."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from specs.base import execution, identity, location, option, reference
from specs.errors import FieldPath, Problem
from specs.sources import SourceSpec
from specs.stages.base import Part, Stage, only_text
from specs.units import Reference


class TokenizerStage(Stage):
    """Trains a tokenizer on `sources`, or imports the one of `path` or of the Hugging Face model of
    `from`."""

    VERSION: ClassVar[int] = 3
    kind: Literal["tokenizer"] = identity()
    sources: list[str] = reference(default_factory=list, description="names of the pipeline's `sources:`")
    path: str | None = location(
        None,
        description="folder (any fsspec URL) with the tokenizer.json of a Hugging Face tokenizer",
    )
    from_: Reference | None = reference(
        None,
        alias="from",
        to="checkpoint",
        description="`hf:<folder or id>`: the tokenizer of a Hugging Face model",
    )
    vocab_size: int = identity(
        131_072,
        gt=0,
        le=2**30,
        multiple_of=128,
        description="size of the vocabulary; with `from`, the model's by default",
    )
    reserved: int = option(
        100, ge=73, description="ids kept for special tokens at the start of the vocabulary"
    )
    bytes_per_source: int = identity(2_000_000, ge=1, description="text read from each source")

    def conflicts(self) -> Iterator[str]:
        if bool(self.sources) + (self.path is not None) + (self.from_ is not None) != 1:
            yield (
                "give either sources to train on, or the path of a tokenizer to import, or from: hf:... of a"
                " model"
            )
        if self.from_ is not None and self.from_.hugging_face is None:
            yield f"'{self.from_}' is not a Hugging Face model; write from: hf:<folder or id>"
        least = self.reserved + 256
        if self.sources and self.vocab_size < least:
            yield (
                f"vocab_size {self.vocab_size} has no room for {self.reserved} special tokens and 256 bytes;"
                f" take {least} or more"
            )

    def source_fields(self) -> dict[str, FieldPath]:
        return {source: ("sources", index) for index, source in enumerate(self.sources)}

    def source_problems(self, name: str, source: SourceSpec, at: FieldPath) -> Iterator[Problem]:
        return only_text(self, name, source, at)


class TokenizerPart(Part):
    """The resolved tokenizer. Inputs: `source:<i>` (documents) in order, or `folder`."""

    PLAN_DEPENDS: ClassVar[bool] = True
    sources: list[SourceSpec] = identity(default_factory=list)
    path: str | None = execution(None)
    vocab_size: int = identity()
    reserved: int = option(100)
    bytes_per_source: int = identity()
