"""Names in settings: of servers, and of the subjects that a setting is about."""

from typing import Annotated

from pydantic import AfterValidator

from pulque.errors import InvalidNameError
from pulque.model.names import parse_group, parse_pattern
from pulque.settings.units import Listed

__all__ = ["OwnName", "Patterns", "checked_name"]


def checked_name(name: str) -> str:
    """Return the name of a server; it is spelled like that of a group.

    Raises:
        ValueError: It is not.
    """
    try:
        return parse_group(name)
    except InvalidNameError as error:
        raise ValueError(str(error).replace("group", "name", 1)) from None


def _checked_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            parse_pattern(pattern)
        except InvalidNameError as error:
            raise ValueError(str(error)) from None
    return patterns


OwnName = Annotated[str, AfterValidator(checked_name)]
"""What a server calls itself."""
Patterns = Annotated[Listed, AfterValidator(_checked_patterns)]
"""Subjects, and patterns like ``order.*`` that cover several."""
