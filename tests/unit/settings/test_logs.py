"""A log line is one line, in the form that was asked for, and tells no secret."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from pulque.broker.config import LogSection
from pulque.settings.logs import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, text)


def logged(section: LogSection, stream: io.StringIO | None = None) -> io.StringIO:
    target = stream if stream is not None else io.StringIO()
    configure_logging(section, target)
    log = structlog.get_logger(component="storage")
    log.debug("segment_looked_at")
    log.info("segment_sealed", bytes=5, is_open=False, path="a b")
    return target


def test_json_has_one_object_per_line_with_the_same_first_keys() -> None:
    line = json.loads(logged(LogSection(format="json")).getvalue())

    assert list(line) == ["at", "level", "event", "component", "bytes", "is_open", "path"]
    assert (line["level"], line["event"], line["bytes"]) == ("info", "segment_sealed", 5)


def test_text_is_key_and_value() -> None:
    line = logged(LogSection(format="text")).getvalue()

    assert "level=info event=segment_sealed component=storage bytes=5" in line
    assert 'path="a b"' in line


def test_auto_is_text_on_a_terminal_and_json_elsewhere() -> None:
    assert logged(LogSection(), Terminal()).getvalue().startswith("at=")
    assert logged(LogSection()).getvalue().startswith("{")


def test_lines_below_the_level_are_left_out() -> None:
    assert logged(LogSection(level="warning")).getvalue() == ""
    assert logged(LogSection(level="debug")).getvalue().count("\n") == 2


@pytest.mark.parametrize("form", ["json", "text"])
def test_secrets_are_hidden_wherever_they_stand(form: str) -> None:
    stream = io.StringIO()
    configure_logging(LogSection.model_validate({"format": form}), stream)
    structlog.get_logger().info("client_refused", password="hunter2", hello={"token": "hunter2"})

    assert "hunter2" not in stream.getvalue()
    assert "***" in stream.getvalue()


@pytest.mark.parametrize("form", ["json", "text"])
def test_foreign_text_cannot_steer_a_terminal_or_forge_a_line(form: str) -> None:
    stream = io.StringIO()
    configure_logging(LogSection.model_validate({"format": form}), stream)
    structlog.get_logger().info("client_refused", name="\x1b[31m\nlevel=error\u202e\x9b")

    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.removesuffix("\n").isprintable()


def test_an_exception_stays_in_one_line() -> None:
    stream = io.StringIO()
    configure_logging(LogSection(format="json"), stream)
    try:
        raise ValueError("broken")
    except ValueError:
        structlog.get_logger().exception("task_failed")

    line = json.loads(stream.getvalue())
    assert line["level"] == "error"
    assert "ValueError: broken" in line["exception"]


def test_lines_of_libraries_take_the_same_way() -> None:
    stream = io.StringIO()
    configure_logging(LogSection(format="json"), stream)
    logging.getLogger("asyncio").warning("slow %s", "task")
    logging.getLogger("asyncio").info("much talk")

    line = json.loads(stream.getvalue())
    assert (line["event"], line["component"]) == ("slow task", "asyncio")


def test_a_stream_that_is_gone_stops_nobody() -> None:
    configure_logging(LogSection(), Gone())
    structlog.get_logger().error("disk_failed")
    logging.getLogger("asyncio").error("disk failed")
