"""Where the files of this repository are."""

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DOCS", "ROOT", "SOURCE", "modules", "pages", "parse", "text_files"]

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
DOCS = ROOT / "docs"

_MADE_BY_TOOLS = {"__pycache__", "build", "dist"}
_BINARY = {".bin", ".gz", ".lz4", ".png", ".zst"}


def modules(below: Path = SOURCE) -> list[Path]:
    return sorted(below.rglob("*.py"))


def pages() -> list[Path]:
    """Every page people read: at the top, and under docs."""
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def text_files(below: Path = ROOT) -> Iterator[Path]:
    """Every text file that belongs to the repository; hidden folders are tools', except CI's."""
    for path in sorted(below.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name != ".ci"
            if not hidden and path.name not in _MADE_BY_TOOLS:
                yield from text_files(path)
        elif path.is_file() and path.suffix not in _BINARY:
            yield path


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
