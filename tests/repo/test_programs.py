"""Programs that are no Python packages are installed where that is possible, or asked for."""

from pathlib import Path

import pytest

from tools import programs

JAVA = """#!/bin/sh
echo 'openjdk version "{version}" 2026-04-21' >&2
"""
APT = """#!/bin/sh
echo "$@" >> {folder}/asked
if [ "$1" = install ]; then
    printf '%s\\n' '#!/bin/sh' "echo 'openjdk version \\"17.0.1\\"' >&2" > {folder}/java
    /bin/chmod 755 {folder}/java
fi
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return tmp_path


def write_program(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    path.chmod(0o755)


def test_a_program_that_is_there_is_fine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(folder / "strace", "")
    write_program(folder / "java", JAVA.format(version="21.0.2"))

    assert programs.main(["java", "strace"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.usefixtures("folder")
def test_without_apt_one_line_says_what_to_install(
    user: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)

    assert programs.main(["java"]) == 1
    expected = "java is not installed: install it (Debian: apt install openjdk-17-jre-headless)\n"
    assert capsys.readouterr().out == expected


def test_root_gets_it_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(folder / "apt-get", APT.format(folder=folder))
    monkeypatch.setattr("os.geteuid", lambda: 0)

    assert programs.main(["java"]) == 0
    assert (folder / "asked").read_text().splitlines() == [
        "update",
        "install --yes --no-install-recommends openjdk-17-jre-headless",
    ]
    assert capsys.readouterr().out == "installing openjdk-17-jre-headless …\n"


def test_others_are_told_and_nothing_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(folder / "apt-get", APT.format(folder=folder))
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    assert programs.main(["java"]) == 1
    assert not (folder / "asked").exists()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (JAVA.format(version="11.0.2"), "is Java 11, and Spark needs 17 or newer"),
        ("#!/bin/sh\nexit 1\n", "does not run"),
    ],
)
def test_a_java_that_spark_cannot_use_is_named(
    source: str, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(folder / "java", source)

    assert programs.main(["java"]) == 1
    assert problem in capsys.readouterr().out


def test_a_wrong_java_home_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(folder / "java", JAVA.format(version="17.0.2"))
    monkeypatch.setenv("JAVA_HOME", str(folder / "nothing"))

    assert programs.main(["java"]) == 1
    assert "nothing, which has no bin/java" in capsys.readouterr().out


def test_the_commands_that_need_java_look_for_it_first() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for command in ("demo", "test", "test-slow", "acceptance"):
        recipe = makefile.partition(f"\n{command}: ")[2].splitlines()[1]
        assert "tools.programs" in recipe, command
