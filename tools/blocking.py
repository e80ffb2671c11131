"""Writes the modules of the blocking client from those of the asyncio one.

::

    python -m tools.blocking           write them
    python -m tools.blocking --check   exit with 1 if one is not what its source says

A source awaits, and calls nothing of asyncio itself: what tasks do in one client and threads in
the other has the same names in both ``concurrency`` modules. A line that ends with ``# asyncio
only`` has no counterpart.
"""

import io
import re
import subprocess
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

__all__ = ["GENERATED", "expected", "main", "translate"]

_CLIENT = Path(__file__).resolve().parent.parent / "src" / "pulque" / "client"
GENERATED = (
    "administration",
    "brokers",
    "client",
    "consumer",
    "conversation",
    "dead_letters",
    "deferral",
    "follower_heartbeats",
    "delayed_messages",
    "messages",
    "nack_handover",
    "ordered_consumer",
    "ordered_pull_pool",
    "pull_pool",
    "reader",
    "route_watcher",
)
"""The modules of ``pulque.client.blocking`` that are generated, by their names."""

_ONLY = re.compile(r"^.*# asyncio only\n", re.MULTILINE)
_NAMES = {
    "AsyncConnection": "Connection",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}
_PHRASES = (
    (
        "Return a client: ``await`` it, or use it with ``async with``, so that it connects.",
        "Connect to a broker, or to a cluster of them.",
    ),
    (", when it connects", ""),
    ("``await`` and ``async with`` do.", "``connect`` does."),
    ("For the tasks of one event loop.", "Thread-safe."),
    ("tasks of one event loop", "threads"),
    (
        "; with asyncio, the first ``send``, ``flush`` or ``recovered`` raises it, not this call",
        "",
    ),
    (", for asyncio", ""),
    ("; for asyncio", ""),
    (" for asyncio", ""),
    ("async with", "with"),
    ("async for", "for"),
    ("await ", ""),
    ("Any task", "Any thread"),
    ("any task", "any thread"),
    ("One task", "One thread"),
    ("one task", "one thread"),
    ("A task", "A thread"),
    ("a task", "a thread"),
    ("the task", "the thread"),
    ("is cancelled", "is interrupted"),
    ("pulque.aio", "pulque"),
)
"""What docstrings and comments say otherwise."""
_OPENING = frozenset("([{")
_CLOSING = frozenset(")]}")


def translate(text: str) -> str:
    """Return asyncio code as blocking code, not formatted.

    Raises:
        ValueError: It names asyncio, which has no counterpart.
    """
    lines = _ONLY.sub("", text).splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(iter(lines).__next__))
    for (row, start), (_, end), new in sorted(_edits(tokens), reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:start] + new + line[end:]
    made = "".join(lines)
    for each in tokenize.generate_tokens(io.StringIO(made).readline):
        if each.type == tokenize.NAME and each.string in {"asyncio", "async", "await"}:
            raise ValueError(f"line {each.start[0]} names {each.string}: {each.line.strip()}")
    for old, new in _NAMES.items():
        made = re.sub(rf"\b{old}\b", new, made)
    for old, new in _PHRASES:
        edge = r"\b" if old[0].isalpha() else ""
        made = re.sub(edge + r"\s+".join(map(re.escape, old.split(" "))), new, made)
    return made


_Edit = tuple[tuple[int, int], tuple[int, int], str]


def _edits(tokens: list[tokenize.TokenInfo]) -> Iterator[_Edit]:
    """Return what to replace, none of it longer than a line."""
    for at, each in enumerate(tokens[:-1]):
        following = tokens[at + 1]
        if each.type != tokenize.NAME:
            continue
        if each.string in {"async", "await"}:
            yield each.start, following.start, ""
            closing = _closing_of_group(tokens, at - 1)
            if closing is not None:
                yield tokens[at - 1].start, tokens[at - 1].end, ""
                yield closing.start, closing.end, ""
        elif each.string == "Awaitable" and following.string == "[":
            closing = tokens[_matching(tokens, at + 1)]
            yield each.start, following.end, ""
            yield closing.start, closing.end, ""
        elif each.string == "aio" and [t.string for t in tokens[at - 2 : at]] == ["client", "."]:
            yield each.start, each.end, "blocking"


def _closing_of_group(tokens: list[tokenize.TokenInfo], at: int) -> tokenize.TokenInfo | None:
    """Return what closes ``(await call())`` in front of ``.`` or ``[``, where it is not needed."""
    before = tokens[at - 1]
    is_call = before.string in _CLOSING or (
        before.type == tokenize.NAME
        and before.string not in {"return", "in", "for", "if", "yield"}
    )
    if tokens[at].string != "(" or is_call:
        return None
    closing = _matching(tokens, at)
    is_used = tokens[closing + 1].string in {".", "["}
    return tokens[closing] if is_used and tokens[closing].start[0] == tokens[at].start[0] else None


def _matching(tokens: list[tokenize.TokenInfo], at: int) -> int:
    depth = 0
    for place in range(at, len(tokens)):
        string = tokens[place].string
        depth += (string in _OPENING) - (string in _CLOSING)
        if not depth:
            return place
    raise ValueError(f"line {tokens[at].start[0]}: {tokens[at].string} is not closed")


def _formatted(text: str, path: Path) -> str:
    ruff = str(Path(sysconfig.get_path("scripts")) / "ruff")
    fix = ("check", "--fix-only", "--unsafe-fixes", "--quiet", "--select", "I,F401,RET504,UP028")
    for arguments in (fix, ("format", "--quiet")):
        done = subprocess.run(
            [ruff, *arguments, "--stdin-filename", str(path), "-"],
            input=text,
            capture_output=True,
            check=True,
            encoding="utf-8",
        )
        text = done.stdout
    return text


def expected() -> Iterator[tuple[Path, str]]:
    """Return what each generated file should hold."""
    for name in GENERATED:
        source = _CLIENT / "aio" / f"{name}.py"
        path = _CLIENT / "blocking" / f"{name}.py"
        header = (
            f"# Generated from aio/{name}.py by `make blocking`: edit that file, not this one.\n"
        )
        yield path, _formatted(header + translate(source.read_text(encoding="utf-8")), path)


def main() -> int:
    """Write what is stale, or name it."""
    is_check = "--check" in sys.argv[1:]
    stale = []
    for path, text in expected():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not is_check:
                path.write_text(text, encoding="utf-8")
    if is_check and stale:
        print(f"stale: {', '.join(stale)}; run: make blocking", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
