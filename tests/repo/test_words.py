"""One word per thing: what src defines is named with the words of docs/glossary.md."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.repo.tree import DOCS, ROOT, modules, parse

GLOSSARY = DOCS / "glossary.md"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SPAN = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Definition:
    """A name that a module gives to something of its own."""

    name: str
    line: int


def words(identifier: str) -> list[str]:
    """Split ``_send_queue`` and ``SendQueue`` alike; plurals count as their singular."""
    return [word.lower().removesuffix("s") for word in _WORD.findall(identifier)]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def column(text: str, name: str) -> list[str]:
    """Read one column of every table that has it."""
    found: list[str] = []
    index: int | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            index = None
        elif name in cells(line):
            index = cells(line).index(name)
        elif index is not None:
            found.append(cells(line)[index])
    return found


def refused_words(glossary: str) -> set[str]:
    return {word for cell in column(glossary, "Not") for word in _SPAN.findall(cell)}


def allowed_identifiers(glossary: str) -> set[str]:
    return {name for cell in column(glossary, "Identifier") for name in _SPAN.findall(cell)}


def definitions(tree: ast.Module) -> Iterator[Definition]:
    """Classes, functions, arguments, attributes and module constants."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef():
                yield Definition(node.name, node.lineno)
                yield from _assigned(node.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield Definition(node.name, node.lineno)
            case ast.arg():
                yield Definition(node.arg, node.lineno)
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield Definition(node.attr, node.lineno)
            case ast.Module():
                yield from _assigned(node.body)
            case _:
                pass


def _assigned(body: list[ast.stmt]) -> Iterator[Definition]:
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield Definition(name, statement.lineno)
            case ast.Assign(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield Definition(target.id, statement.lineno)
            case _:
                pass


def refused_in(identifier: str, refused: set[str]) -> set[str]:
    """The refused words that stand in an identifier, as whole words side by side."""
    spelled = f"_{'_'.join(words(identifier))}_"
    return {word for word in refused if f"_{'_'.join(words(word))}_" in spelled}


def complaints(source: str, refused: set[str], allowed: set[str]) -> list[str]:
    return [
        f"{definition.line}: {definition.name} ({', '.join(sorted(found))})"
        for definition in definitions(ast.parse(source))
        if definition.name not in allowed
        if (found := refused_in(definition.name, refused))
    ]


def test_src_uses_no_refused_word() -> None:
    glossary = GLOSSARY.read_text(encoding="utf-8")
    refused, allowed = refused_words(glossary), allowed_identifiers(glossary)
    found = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for path in modules()
        for complaint in complaints(path.read_text(encoding="utf-8"), refused, allowed)
    ]

    assert not found, "see docs/glossary.md:\n" + "\n".join(found)


def test_the_glossary_refuses_words_and_allows_names() -> None:
    glossary = GLOSSARY.read_text(encoding="utf-8")

    assert {"topic", "queue", "slave", "commit_log", "offline"} <= refused_words(glossary)
    assert "worker" not in refused_words(glossary)
    assert "queue_size" in allowed_identifiers(glossary)


@pytest.mark.parametrize(
    "source",
    [
        "class TopicReader: ...",
        "def read_topic(): ...",
        "async def read_topics(): ...",
        "def read(*, topic: str) -> None: ...",
        "read = lambda topic: topic",
        "class Reader:\n    topic: str",
        "class Reader:\n    def __init__(self) -> None:\n        self._topic = 1",
        "TOPIC_LIMIT = 3",
        "class OldCommitLog: ...",
        "commit_logs: int = 3",
    ],
)
def test_a_refused_word_is_found_wherever_a_name_is_defined(source: str) -> None:
    assert complaints(source, {"topic", "commit_log"}, set())


@pytest.mark.parametrize(
    "source",
    [
        "class TopicalReader: ...",
        "import topic\nwith_topic = topic.read",
        "def read() -> None:\n    topic = 1",
        "class GroupCommit: ...",
        "reader.topic = 1",
    ],
)
def test_other_peoples_names_and_parts_of_words_are_left_alone(source: str) -> None:
    assert not complaints(source.replace("with_topic", "reader"), {"topic", "commit_log"}, set())


def test_an_allowed_identifier_is_left_alone() -> None:
    assert not complaints("def make(queue_size): ...", {"queue"}, {"queue_size"})


def test_every_module_can_be_read() -> None:
    for path in modules():
        assert list(ast.iter_child_nodes(parse(path))) or path.name == "__init__.py", path
