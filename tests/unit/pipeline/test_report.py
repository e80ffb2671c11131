"""Reports as tables and as a page, without Spark: what is shown, and that nothing gets out."""

import re
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("pyarrow")
from pulque.pipeline.report.figures import (
    ConsumerFigures,
    Day,
    Failures,
    Hour,
    KeyFigures,
    Latency,
    Redeliveries,
    Report,
    SubjectFigures,
)
from pulque.pipeline.report.html_page import page
from pulque.pipeline.report.svg_plots import Column, Strip, bars, columns, strips
from pulque.pipeline.report.tables import counted, duration, sized, tables

NOW = datetime(2026, 11, 16, 8, tzinfo=UTC)
HOSTILE = "</title><script>alert(1)</script>\"'&\x1b[2J\x00\u202e\ud800"


def made(name: str = "order.paid") -> Report:
    """A report in which everything that comes from outside has this name."""
    hours = [Hour(name, NOW + timedelta(hours=at), 10 * at, 100 * at) for at in (0, 1, 5)]
    return Report(
        name,
        name,
        messages=61,
        size=600,
        settled=50,
        subjects=[SubjectFigures(name, 60, 600, 3, NOW, 50)],
        hours=[*hours, Hour(None, NOW, 1, 0)],
        days=[Day(date(2026, 11, 14), 60, 600), Day(date(2026, 11, 16), 1, 0)],
        end_to_end=[Latency(name, name, 50, 3, 700, 90_000, 4e9)],
        handling=[Latency(name, name, 50, 0, 0, 0, 0)],
        consumers=[
            ConsumerFigures(name, name, 50, 0, 1, 10, 100),
            ConsumerFigures(name, name, 0, 7, None, None, None),
        ],
        redeliveries=[Redeliveries(name, name, 3, 1)],
        failures=[Failures(name, name, "nacked", name, 3), Failures(name, name, "lost", "", 1)],
        keys=[KeyFigures(name, name, 6, 0.1)],
        notes=[name],
    )


def parsed(text: str) -> ET.Element:
    """Read a page strictly: it is written so that it is XML, too."""
    start = "<!DOCTYPE html>\n"
    assert text.startswith(start)
    return ET.fromstring(text.removeprefix(start))  # noqa: S314 - our own


class Tags(HTMLParser):
    """The tags and attributes that a browser sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("name", ["order.paid", HOSTILE, "", "x" * 500])
def test_a_page_is_whole_and_has_no_script_whatever_names_are(name: str) -> None:
    text = page(made(name), NOW)
    parsed(text)
    seen = Tags()
    seen.feed(text)
    harmless = Tags()
    harmless.feed(page(made(), NOW))
    assert seen.tags == harmless.tags
    assert seen.attributes == harmless.attributes
    assert not seen.tags & {"script", "link", "img", "iframe", "object", "image", "use", "a"}
    assert not {each for each in seen.attributes if each.startswith("on")}
    assert not seen.attributes & {"src", "href", "style"}
    assert text.encode()
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_page_loads_nothing() -> None:
    text = page(made(), NOW)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"url\(|@import|https?://", text)


def test_each_section_has_its_plot_and_its_rows() -> None:
    root = parsed(page(made(), NOW))
    sections = {each.get("id"): each for each in root.iter("section")}
    assert list(sections) == [each.name for each in tables(made())]
    plotted = {name for name, each in sections.items() if each.find(".//svg") is not None}
    assert plotted == sections.keys() - {"subjects", "retries"}
    for table in tables(made()):
        rows = sections[table.name].findall(".//tbody/tr")
        assert ["".join(cell.itertext()) for cell in rows[0]] == list(table.rows[0])
        assert len(rows) == len(table.rows)


def test_hours_without_messages_have_their_place_in_the_plot() -> None:
    root = parsed(page(made(), NOW))
    (rates,) = (each for each in root.iter("section") if each.get("id") == "rates")
    labels = ["".join(each.itertext()) for each in rates.iter("text")]
    hours = [each for each in labels if each.endswith("h")]
    assert hours == [f"11-16 {hour:02d}h" for hour in range(8, 14)]


@pytest.mark.parametrize(
    "report",
    [
        Report("lake", "all subjects"),
        Report("lake", "nothing settled", messages=1, notes=["nothing was settled yet"]),
    ],
)
def test_a_page_of_nothing_says_so(report: Report) -> None:
    text = "".join(parsed(page(report, NOW)).itertext())
    assert ("Nothing was stored" if report.is_empty else "None.") in text
    assert all(note in text for note in report.notes)
    assert not [each for each in tables(report) if each.rows]


def test_a_long_table_is_cut_and_says_so() -> None:
    many = [Day(date(2026, 1, 1) + timedelta(days=at), at, at) for at in range(100)]
    text = page(Report("lake", "", messages=1, days=many), NOW)
    root = parsed(text)
    (growth,) = (each for each in root.iter("section") if each.get("id") == "growth")
    days = [row[0].text for row in growth.findall(".//tbody/tr")]
    assert (len(days), days[-1]) == (48, "2026-04-10")
    assert "The last 48 of 100 rows." in text


@pytest.mark.parametrize("value", [0, 0.4, 1, 7, 999, 1e6, 3.2e14])
def test_plots_stay_in_their_frame(value: float) -> None:
    drawn = [
        columns("c", [Column("a", [value, value / 2])], ["one", "two"]),
        columns("c", [Column("a", [value])], is_size=True),
        bars("b", [("a", value)]),
        strips("s", [Strip("a", {"p50": value / 3, "p99": value})]),
    ]
    for each in drawn:
        root = ET.fromstring(each)  # noqa: S314 - our own
        _, _, width, height = map(float, (root.get("viewBox") or "").split())
        for rect in root.iter("rect"):
            x, y, wide, high = (float(rect.get(k) or "") for k in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width
            assert -0.1 <= y <= y + high <= height
        for circle in root.iter("circle"):
            assert 0 <= float(circle.get("cx") or "") <= width
        for text in root.iter("text"):
            assert 0 <= float(text.get("x") or "") <= width
            assert 0 <= float(text.get("y") or "") <= height


def test_plots_of_nothing_are_pictures() -> None:
    for each in (columns("c", []), bars("b", []), strips("s", [])):
        ET.fromstring(each)  # noqa: S314 - our own


def test_figures_are_written_for_people() -> None:
    assert [counted(each) for each in (0, 1234567)] == ["0", "1,234,567"]
    assert [sized(each) for each in (0, 1023, 1536, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 TiB",
    ]
    shown = [duration(each) for each in (0, 12, 999.7, 1500, 90_000, 7_200_000, 1e9)]
    assert shown == ["0 ms", "12 ms", "1.00 s", "1.50 s", "90.0 s", "2.00 h", "11.6 d"]
