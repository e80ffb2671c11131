"""Escape untrusted text, so that a terminal prints it and does not interpret it."""

import re

__all__ = ["escaped", "quoted"]

_PASSWORD = re.compile(r"(://[^/@:]*:).*(@)")


def escaped(text: str) -> str:
    """Return text with control and invisible characters as escape sequences."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escape_of(each) for each in text)


def quoted(value: object, *, longest: int = 80) -> str:
    """Return a value in quotes, escaped and cut; a password in a URL is left out."""
    shown = _PASSWORD.sub(r"\1...\2", ascii(value))
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def _escape_of(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
