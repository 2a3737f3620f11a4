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


def replaced_kinds(stated: PersonalDataField) -> tuple[Pii, ...]:
    """The kinds that a field `pii` names, in the order of replacement."""
    stated = stated.kinds if isinstance(stated, LimitedPii) else stated
    chosen = ("email", "ip", "iban") if stated is True else stated or ()
    return tuple(kind for kind in get_args(Pii) if kind in chosen)


def replaced_only(stated: PersonalDataField) -> dict[str, list[str]]:
    """The values of columns that limit the replacement to some documents."""
    return stated.only if isinstance(stated, LimitedPii) else {}
