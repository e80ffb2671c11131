"""Nothing received is ever executed, and nothing in the repository belongs to one machine."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, modules, parse, text_files

_DANGEROUS_MODULES = {"dill", "marshal", "pickle", "shelve"}
_DANGEROUS_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}

# Written in pieces, so that this file does not name what it looks for.
_REGISTRIES = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("repo1", "maven"),
        ("repo", "maven", "apache"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("crates", "io"),
        ("anaconda", "org"),
    )
]
_MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:work|root|home/\w+|Users/\w+)/")
_REGISTRY = re.compile("|".join(re.escape(host) for host in _REGISTRIES))
_INDEX_OPTION = re.compile("-" + r"-(?:extra-)?index" + r"-url|-" + "-trusted" + "-host")


def dangers(tree: ast.Module) -> Iterator[str]:
    """Say what executes or unpickles, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [
                    alias.name
                    for alias in names
                    if alias.name.partition(".")[0] in _DANGEROUS_MODULES
                ]
            case ast.ImportFrom(module=str(module)) if (
                module.partition(".")[0] in _DANGEROUS_MODULES
            ):
                found = [module]
            case ast.Call():
                found = list(_dangers_of_call(node))
            case _:
                continue
        yield from (f"{node.lineno}: {what}" for what in found)


def _dangers_of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in _DANGEROUS_CALLS:
        yield name
    for keyword in call.keywords:
        if keyword.arg == "shell" and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            yield "shell"


def of_one_machine(text: str) -> list[str]:
    return [
        f"{number}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), start=1)
        if _MACHINE_PATH.search(line) or _REGISTRY.search(line) or _INDEX_OPTION.search(line)
    ]


def test_src_executes_and_unpickles_nothing() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{danger}"
        for path in modules()
        for danger in dangers(parse(path))
    ]

    assert found == []


def test_no_file_names_a_path_of_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in text_files()
        for line in of_one_machine(path.read_text(encoding="utf-8", errors="replace"))
    ]

    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "eval(text)",
        "exec(code)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "os.system(command)",
        "yaml.load(text)",
    ],
)
def test_a_danger_is_found(source: str) -> None:
    assert list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "re.compile(text)",
        "subprocess.run(command, shell=False)",
        "yaml.safe_load(text)",
        "retrieval(text)",
        "import json",
    ],
)
def test_harmless_code_is_left_alone(source: str) -> None:
    assert not list(dangers(ast.parse(source)))


@pytest.mark.parametrize(
    "line",
    [
        f"see /{'work'}/main/notes",
        f"'/{'root'}/.cache'",
        f"/{'home'}/ana/pulque",
        f"url = https://{_REGISTRIES[0]}/simple",
        f"pip install -{'-index'}-url x",
    ],
)
def test_what_belongs_to_one_machine_is_found(line: str) -> None:
    assert of_one_machine(line)


@pytest.mark.parametrize(
    "line",
    ["docs/work/x", "the/root/of", "/tmp/x", "/var/lib/pulque", "https://example.org/home/"],
)
def test_ordinary_paths_are_left_alone(line: str) -> None:
    assert not of_one_machine(line)


def test_text_files_leave_out_what_tools_made(tmp_path: Path) -> None:
    for name in ("a.py", ".ci/run", ".venv/b.py", "c/__pycache__/d.pyc", "c/e.md", "f.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    assert [path.relative_to(tmp_path).as_posix() for path in text_files(tmp_path)] == [
        ".ci/run",
        "a.py",
        "c/e.md",
    ]
