"""Transport and serialisation are our own: no framework stands between client and broker."""

import ast
import sys

import pytest

from tests.repo.tree import SOURCE, modules, parse

ALLOWED = {"pulque", "google_crc32c"}
OPTIONAL = {
    "pulque/model/compression.py": {"lz4", "zstandard"},
    # Only for bodies that are values of theirs: what such a package writes is opaque to us.
    "pulque/client/sending/body_encoding.py": {"msgspec", "pydantic"},
    # Another loop for asyncio: it runs our protocol, and knows nothing of it.
    "pulque/net/process.py": {"uvloop"},
}


def imported(tree: ast.Module) -> set[str]:
    """Return the packages that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.accepts("000-48")
@pytest.mark.parametrize("package", ["wire", "net", "model", "client"])
def test_no_framework_carries_or_encodes_what_is_said(package: str) -> None:
    found = modules(SOURCE / "pulque" / package)

    assert found
    for path in found:
        name = path.relative_to(SOURCE).as_posix()
        others = imported(parse(path)) - sys.stdlib_module_names - ALLOWED
        assert others <= OPTIONAL.get(name, set()), name


def test_imports_are_found_wherever_they_stand() -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    import grpc\n"

    assert imported(ast.parse(source)) == {"a", "c", "grpc"}
