"""Reports as tables and as a page, without Spark: what is shown, and that nothing gets out."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("pyarrow")
from matplotlib import rc_context

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
from pulque.pipeline.report.svg_plots import bars, columns, strips
from pulque.pipeline.report.tables import counted, duration, sized, tables

NOW = datetime(2026, 11, 16, 8, tzinfo=UTC)
HOUR = timedelta(hours=1)
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


def parsed_plot(text: str) -> ET.Element:
    return ET.fromstring(text)  # noqa: S314 - our own


class Tags(HTMLParser):
    """The tags and attributes that a browser sees."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("name", ["order.paid", HOSTILE, "", "_x", "x" * 500])
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


def places(root: ET.Element) -> Iterator[tuple[float, float]]:
    """Yield the points of all that is drawn, and where texts stand."""
    for path in root.iter("path"):
        numbers = [float(each) for each in re.findall(r"-?[\d.]+(?:e-?\d+)?", path.get("d") or "")]
        yield from zip(numbers[::2], numbers[1::2], strict=True)
    for text in root.iter("text"):
        yield float(text.get("x") or ""), float(text.get("y") or "")


@pytest.mark.parametrize("value", [0, 0.4, 1, 7, 999, 1e6, 3.2e14])
def test_plots_stay_in_their_frame(value: float) -> None:
    drawn = [
        columns("c", [NOW], [("one", [value]), ("two", [value / 2])], HOUR),
        columns("c", [NOW], [("", [value])], HOUR, is_size=True),
        bars("b", [("a", value)]),
        strips("s", [("a", {"p50": value / 3, "p99": value})]),
    ]
    for each in drawn:
        root = parsed_plot(each)
        _, _, width, height = map(float, (root.get("viewBox") or "").split())
        found = list(places(root))
        assert len(found) > 4
        for x, y in found:
            assert 0 <= x <= width
            assert -0.1 <= y <= height


def test_plots_of_nothing_are_pictures() -> None:
    for each in (columns("c", [], [], HOUR), bars("b", []), strips("s", [])):
        parsed_plot(each)


def test_plots_are_read_out_and_explained() -> None:
    root = parsed(page(made("<script>"), NOW))
    plots = list(root.iter("svg"))
    assert {each.get("role") for each in plots} == {"img"}
    assert all(each.get("aria-label") for each in plots)
    assert all(each.find("figcaption") is not None for each in root.iter("figure"))
    tooltips = {each.text for plot in plots for each in plot.iter("title")}
    assert {
        "11-16 13h: 50",
        "<script> / <script>: longest 100 ms",
        "<script>: <script>: 6",
    } <= tooltips


def test_every_colour_of_a_plot_has_a_twin_for_dark_pages() -> None:
    text = page(made(), NOW)
    style, _, body = text.partition("</style>")
    drawn = set(re.findall(r'(?:fill|stroke)="(#[^"]+)"', body))
    assert drawn
    for colour in drawn:
        (name,) = set(re.findall(rf'svg \[(?:fill|stroke)="{colour}"\] .*var\(--(\w+)\)', style))
        assert len(set(re.findall(rf"--{name}: (#\w+)", style))) == 2


def test_a_page_is_the_same_whatever_the_users_style_is() -> None:
    text = page(made(), NOW)
    with rc_context({"font.size": 40, "text.color": "red"}):
        assert page(made(), NOW) == text


def test_a_legend_names_every_series() -> None:
    names = ["_hidden", "order.paid", "x" * 50]
    plot = columns("c", [NOW, NOW + HOUR], [(name, [0, 1]) for name in names], HOUR)
    legend = [each for each in parsed_plot(plot).iter("g") if each.find("text") is not None]
    assert [each.findtext("title") for each in legend if each.find("title") is not None] == names
    shown = [each.text or "" for each in parsed_plot(plot).iter("text")]
    assert {"_hidden", "order.paid"} <= set(shown)
    assert [each for each in shown if each.startswith("xxx") and "…" in each]
    fills = Counter(each.get("fill") for each in parsed_plot(plot).iter("path"))
    del fills["none"]
    assert list(fills.values()) == [2, 2, 2]  # a column and a mark each


def test_a_name_is_no_formula_and_may_be_in_any_script(recwarn: pytest.WarningsRecorder) -> None:
    drawn = parsed_plot(bars("b", [(r"$\frac$ 日本", 1)]))
    assert r"$\frac$ 日本" in [each.text for each in drawn.iter("text")]
    assert not recwarn.list


@pytest.mark.parametrize("module", ["pulque.cli.main", "pulque.pipeline.report.queries"])
def test_only_a_page_needs_the_packages_for_plots(module: str) -> None:
    code = (
        f"import sys, {module}, pulque.cli.pipeline.commands\n"
        "assert not {'matplotlib', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
