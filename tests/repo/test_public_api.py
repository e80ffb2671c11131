"""What ``pulque.__all__`` names is the API: it exists, is in order, and nothing is named twice."""

import importlib

import pytest

from tests.repo.tree import SOURCE

PUBLIC = [
    name
    for name, path in (
        ("pulque", "pulque/__init__.py"),
        ("pulque.aio", "pulque/aio/__init__.py"),
        ("pulque.aio", "pulque/aio.py"),
    )
    if (SOURCE / path).exists()
]


def in_order(names: list[str]) -> list[str]:
    """Constants, then classes, then the rest, as ruff sorts ``__all__``."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


def missing(names: list[str], module: object) -> list[str]:
    return [name for name in names if not hasattr(module, name)]


@pytest.mark.parametrize("module_name", PUBLIC)
def test_every_public_name_exists_once_and_in_order(module_name: str) -> None:
    module = importlib.import_module(module_name)
    names: list[str] = list(module.__all__)

    assert missing(names, module) == []
    assert names == in_order(names)
    assert len(set(names)) == len(names)


def test_a_missing_name_is_found() -> None:
    assert missing(["dumps", "does_not_exist"], importlib.import_module("json")) == [
        "does_not_exist"
    ]


def test_order_is_constants_classes_functions() -> None:
    assert in_order(["connect", "Client", "VERSION", "Batch"]) == [
        "VERSION",
        "Batch",
        "Client",
        "connect",
    ]
