"""Filters as people write them: ``red || blue`` for any of these tags, ``red && big`` for all."""

import re

from pulque.errors import UsageError

__all__ = ["parse_filter"]

_PIECE = re.compile(r"\s*([|&]+|[^\s|&]+)")


def parse_filter(text: str) -> tuple[list[str], list[str]]:
    """Return the tags of a filter: those of which one must be there, and those that all must.

    Raises:
        UsageError: The text cannot be read; the error says where, counted from 1.
    """
    pieces = [(found[1], found.start(1)) for found in _PIECE.finditer(text)]
    for number, (piece, at) in enumerate(pieces):
        is_operator = piece[0] in "|&"
        if number % 2 == 0 and is_operator:
            raise _error(text, at, f"a tag is expected, not {piece}")
        if number % 2 == 1 and piece not in {"||", "&&"}:
            raise _error(text, at, f"|| or && is expected, not {piece}")
        if number % 2 == 1 and piece != pieces[1][0]:
            raise _error(text, at, f"{piece} after {pieces[1][0]}: use one of them only")
    if len(pieces) % 2 == 0:
        raise _error(text, len(text), "a tag is expected")
    tags = [piece for piece, _ in pieces[::2]]
    return ([], tags) if len(pieces) > 1 and pieces[1][0] == "&&" else (tags, [])


def _error(text: str, at: int, problem: str) -> UsageError:
    return UsageError(
        f"filter {text!r}, position {at + 1}: {problem}; write tags with || between them (any of "
        "them) or && (all of them)"
    )
