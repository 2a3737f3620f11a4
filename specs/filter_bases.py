"""The base classes and common fields of the filters of a corpus.

Invariants:
- `files()` names the files that a filter reads besides the documents. The planner fingerprints their content,
  so their URLs are not identity fields.
- `columns()` names the columns of a row that a filter reads, `adds()` those that it makes for later filters.
- Each filter of single documents can be limited to documents with certain values in columns (`only`): a
  language, a licence, a source. Filters of whole sources cannot.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specs.base import Spec, option
from specs.sources import SourceSpec

Missing = Literal["error", "keep", "drop"]


class Filter(Spec):
    """Base of all filters."""

    of: Literal["conversation", "answer"] = option(
        "conversation",
        description="in conversations: the text that the filter reads. conversation: the texts of all"
        " messages in order, thoughts and outputs of tools among them and calls as JSON, with blank lines"
        " between them; answer: the responses of the last message or, where it has none, all of its texts",
    )

    def files(self) -> list[SourceSpec]:
        """The files that the filter reads from outside the store."""
        return []

    def columns(self) -> list[str]:
        """The columns of a row that the filter needs, besides the text."""
        return []

    def adds(self) -> list[str]:
        """The columns that the filter makes for later filters."""
        return []


class DocumentFilter(Filter):
    """Base of the filters of single documents."""

    COLUMNS: ClassVar[tuple[str, ...]] = ()  # the fields that name a column
    only: dict[str, Annotated[list[str], Field(min_length=1)]] = option(
        default_factory=dict,
        description="limits the filter to documents whose column has one of the values: `{language: [deu,"
        " fra]}`; several columns must all agree. Any other document passes, also one without a value",
    )

    def columns(self) -> list[str]:
        named = [getattr(self, field) for field in self.COLUMNS]
        return [*self.only, *(column for column in named if column is not None)]


class CutoffFilter(DocumentFilter):
    """Base of the filters that compare a number of a document with a cut-off, which may differ by column."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("by",)
    by: str | None = option(
        None, description="column whose value selects a cut-off, for instance the language"
    )
    cutoffs: dict[str, float] = option(
        default_factory=dict,
        description="cut-offs for values of `by`; any other value, or none, has the general cut-off",
    )

    def conflicts(self) -> Iterator[str]:
        if (self.by is None) != (not self.cutoffs):
            yield "`by` (a column) and `cutoffs` (its values) go together; set both or none"


def missing_value(default: Missing = "error") -> Missing:
    value: Missing = option(default, description="what to do with a document without a value in the column")
    return value


def outside(url: str) -> SourceSpec:
    return SourceSpec(url=url, format="text")
