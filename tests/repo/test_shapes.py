"""A module stays small enough to read in one sitting."""

from collections.abc import Mapping
from pathlib import Path

from tests.repo.tree import SOURCE, modules

LIMIT = 500

LONG_MODULES: dict[str, str] = {
    # "pulque/storage/engine.py": "why there is no seam",
}


def too_long(lengths: Mapping[str, int], reasons: Mapping[str, str]) -> list[str]:
    return [name for name, length in lengths.items() if length > LIMIT and name not in reasons]


def outdated(lengths: Mapping[str, int], reasons: Mapping[str, str]) -> list[str]:
    return [name for name in reasons if lengths.get(name, 0) <= LIMIT]


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_module_is_too_long_without_a_reason() -> None:
    lengths = {path.relative_to(SOURCE).as_posix(): length(path) for path in modules()}

    assert not too_long(lengths, LONG_MODULES)
    assert not outdated(lengths, LONG_MODULES)


def test_a_long_module_is_found_unless_it_has_a_reason() -> None:
    lengths = {"short.py": 500, "long.py": 501}

    assert too_long(lengths, {}) == ["long.py"]
    assert too_long(lengths, {"long.py": "a table"}) == []


def test_a_reason_for_a_module_that_is_short_or_gone_is_found() -> None:
    assert outdated({"short.py": 20}, {"short.py": "was long", "gone.py": "was long"}) == [
        "short.py",
        "gone.py",
    ]
