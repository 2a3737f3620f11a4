"""The kinds of personal data that are replaced, and the documents in which they are."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from specs.base import Spec, identity

Pii = Literal["email", "ip", "iban", "phone"]


class LimitedPii(Spec):
    """Personal data that is replaced in some documents only."""

    kinds: list[Pii] = identity(min_length=1)
    only: dict[str, Annotated[list[str], Field(min_length=1)]] = identity(
        min_length=1,
        description="replaces only in documents whose column has one of the values: `{language: [deu,"
        " fra]}`; several columns must all agree. A `language` filter can add the column. Any other document"
        " stays as it is, also one without a value",
    )


PersonalDataField = bool | list[Pii] | LimitedPii


def replaced_kinds(pii: PersonalDataField) -> tuple[Pii, ...]:
    """The kinds that a field `pii` names, in the order of replacement."""
    kinds = pii.kinds if isinstance(pii, LimitedPii) else pii
    chosen = ("email", "ip", "iban") if kinds is True else kinds or ()
    return tuple(kind for kind in get_args(Pii) if kind in chosen)


def replaced_only(pii: PersonalDataField) -> dict[str, list[str]]:
    """The values of columns that limit the replacement to some documents."""
    return pii.only if isinstance(pii, LimitedPii) else {}
