"""Docs that can be wrong are tested: links lead somewhere, the journey names what exists."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repo.tables import bare, tables
from tests.repo.tree import DOCS, ROOT, SOURCE, pages

MAPS = [DOCS / "journey.md", DOCS / "architecture.md"]
"""The pages that name packages, files and what is in them."""
PACKAGE = SOURCE / "pulque"

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)


def links(page: str) -> list[str]:
    """Targets of relative links outside code."""
    prose = _SPAN.sub("", _FENCE.sub("", page))
    return [target for target in _LINK.findall(prose) if not re.match(r"[a-z]+:", target)]


def anchors(page: str) -> set[str]:
    """The fragments that a page's headings can be reached by."""
    titles = _HEADING.findall(_FENCE.sub("", page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    return [
        target
        for target in links(path.read_text(encoding="utf-8"))
        if not _leads_somewhere(path, target)
    ]


def _leads_somewhere(path: Path, target: str) -> bool:
    file, _, fragment = target.partition("#")
    found = path.parent / file if file else path
    if not found.exists():
        return False
    return (
        not fragment
        or found.suffix != ".md"
        or fragment in anchors(found.read_text(encoding="utf-8"))
    )


@dataclass(frozen=True, slots=True)
class Mention:
    """A file or a package that a page names, and what it says is in it."""

    path: str
    names: tuple[str, ...]


def mentions(page: str) -> Iterator[Mention]:
    """In rows of tables: a path in code style, and the identifiers in code style after it.

    A path ends with ``.py``, or with a slash if it is a package.
    """
    for row in page.splitlines():
        if not row.startswith("|"):
            continue
        path = ""
        names: list[str] = []
        for span in _SPAN.findall(row):
            if re.fullmatch(r"[\w/]+(\.py|/)", span):
                if path:
                    yield Mention(path, tuple(names))
                path, names = span, []
            elif path and re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span):
                names.append(span.removesuffix("()").rpartition(".")[2])
        if path:
            yield Mention(path, tuple(names))


def drawn(page: str) -> set[str]:
    """Return the packages that a picture names: in code blocks, words that end with a slash."""
    pictures = "\n".join(match[0] for match in _FENCE.finditer(page))
    return set(re.findall(r"(?<!\S)([a-z_]+(?:/[a-z_]+)*/)(?!\S)", pictures))


def untrue(mention: Mention, package: Path) -> list[str]:
    found = package / mention.path
    if mention.path.endswith("/"):
        files = sorted(found.rglob("*.py"))
    else:
        files = [found] if found.exists() else []
    if not files:
        return [f"{mention.path} does not exist"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return [
        f"{mention.path} has no {name}"
        for name in mention.names
        if not re.search(rf"\b{re.escape(name)}\b", text)
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.accepts("003-62")
def test_every_decision_says_why_and_at_what_price() -> None:
    records = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    parts = ("# ", "\n## Context\n", "\n## Choice\n", "\n## Price\n")
    texts = {each.name: each.read_text(encoding="utf-8") for each in records}

    assert [int(name[:4]) for name in texts] == list(range(1, len(texts) + 1))
    assert {name: [p for p in parts if p not in text] for name, text in texts.items()} == {
        name: [] for name in texts
    }


@pytest.mark.accepts("003-62")
@pytest.mark.parametrize("page", MAPS, ids=lambda path: path.stem)
def test_maps_of_the_code_name_packages_files_and_names_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = list(mentions(text))
    pictured = drawn(text)

    assert found, f"{page.name} has no row with a path"
    assert pictured, f"{page.name} has no picture of the packages"
    assert [wrong for mention in found for wrong in untrue(mention, PACKAGE)] == []
    assert [path for path in sorted(pictured) if not (PACKAGE / path).is_dir()] == []


@pytest.mark.parametrize("page", MAPS, ids=lambda path: path.stem)
def test_maps_of_the_code_draw_every_package(page: Path) -> None:
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}

    assert drawn(page.read_text(encoding="utf-8")) >= packages


def test_the_architecture_has_a_row_for_every_package() -> None:
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = next(each.rows for each in tables(text) if each.columns == ("Package", "Holds"))

    assert {bare(row["Package"]) for row in rows} >= packages


def test_each_change_is_one_line_with_a_link() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, _, changes = text.partition("\n## ")
    lines = changes.splitlines()

    assert [line for line in lines if line.startswith(" ")] == []
    assert [line for line in lines if line.startswith("- ") and not links(line)] == []


def test_links_are_read_from_prose_only() -> None:
    prose = '[a](a.md) ![b](img/b.png "title") [c](https://example.org) [d](#d)'
    code = "`[e](e.md)`\n```\n[f](f.md)\n```\n"

    assert links(code + prose) == ["a.md", "img/b.png", "#d"]


def test_a_link_to_nothing_or_to_no_heading_is_broken(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# The `first` part\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[1](there.md) [2](there.md#the-first-part) [3](gone.md) [4](there.md#second) [5](#none)"
    )

    assert broken_links(page) == ["gone.md", "there.md#second", "#none"]


def test_mentions_are_paths_with_the_names_that_follow() -> None:
    row = "| **log** | `storage/log.py` `Log.append()` → `a/b.py` `Send` `c_d` | *appended* `x` |"

    assert list(mentions("text `z.py`\n" + row)) == [
        Mention("storage/log.py", ("append",)),
        Mention("a/b.py", ("Send", "c_d", "x")),
    ]
    assert list(mentions("| `a/b/` `Send` (2), `c/` |")) == [
        Mention("a/b/", ("Send",)),
        Mention("c/", ()),
    ]


def test_pictures_name_packages() -> None:
    assert drawn("`no/`\n```\n model/  a/b/ │ and/or x.py\n```\n") == {"model/", "a/b/"}


def test_a_mention_is_untrue_without_its_file_or_its_name(tmp_path: Path) -> None:
    (tmp_path / "log.py").write_text("class Log:\n    def append(self): ...\n")

    assert untrue(Mention("log.py", ("Log", "append")), tmp_path) == []
    assert untrue(Mention("log.py", ("Logger",)), tmp_path) == ["log.py has no Logger"]
    assert untrue(Mention("gone.py", ()), tmp_path) == ["gone.py does not exist"]
    assert untrue(Mention(f"{tmp_path}/", ("Log",)), tmp_path) == []
    assert untrue(Mention(f"{tmp_path}/", ("Logger",)), tmp_path) == [f"{tmp_path}/ has no Logger"]
    assert untrue(Mention("gone/", ()), tmp_path) == ["gone/ does not exist"]
