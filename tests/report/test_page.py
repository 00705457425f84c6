"""The page and the pictures of a report: without a browser what they hold, with one how they behave."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from sample import HOSTILE, METHODS, RATES, sample

from paceline.studies.report.axis import y_axis
from paceline.studies.report.content import Panel, Report, Series
from paceline.studies.report.page import page
from paceline.studies.report.palette import DARK_GROUND, LIGHT_GROUND, style
from paceline.studies.report.pictures import draw

VOID = {"meta", "link", "line", "br"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def report() -> Report:
    return sample()


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return page(report)


class Reader(HTMLParser):
    """Checks that elements are nested well, and keeps tags, attributes and texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif data.strip() and self.open[-1] != "style":
            self.texts.append(data.strip("\n\u2002"))

    def of(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        return [had for one, had in self.tags if one == tag and name in (had.get("class") or "").split(" ")]


def test_page_holds_every_text_of_the_report(report: Report, html: str) -> None:
    texts = Reader(html).texts
    for text in (report.title, report.subtitle, report.verdict, *report.remarks, *report.warnings):
        assert text in texts
    for panel in report.panels:
        assert {panel.title, panel.caption, f"{panel.key}.csv", f"{panel.key}.png"} <= set(texts)
    for table in (report.results, *report.tables):
        assert {table.title, *table.columns} <= set(texts)
        for row in table.rows:
            assert set(row) <= set(texts)


def test_every_panel_has_its_place_and_the_first_is_shown(report: Report, html: str) -> None:
    reader = Reader(html)
    figures = [had for tag, had in reader.tags if tag == "figure"]
    assert sorted(int(had["data-panel"] or "") for had in figures) == list(range(len(report.panels)))
    assert len(reader.of("section", "place")) == len({panel.place for panel in report.panels})
    assert len(reader.of("figure", "shown")) == len({panel.place for panel in report.panels})
    pressed = [had["aria-pressed"] for tag, had in reader.tags if tag == "button" and "aria-pressed" in had]
    assert pressed.count("false") == 3 + 3 + 1  # of 4, 4 and 2 choices; all methods are shown


def test_warnings_only_if_there_are_any(report: Report, html: str) -> None:
    assert Reader(html).of("section", "warnings")
    assert not Reader(page(replace(report, warnings=()))).of("section", "warnings")


def test_page_refers_to_nothing_but_files_beside_it(html: str) -> None:
    assert not re.search(r"https?:|[\"'`(=]\s*//|@import|url\((?!#)", html)
    for tag, had in Reader(html).tags:
        assert "src" not in had and tag not in {"img", "iframe", "object", "embed", "base"}
        assert not any(name.startswith("on") for name in had)
        if "href" in had:
            assert had["href"] == "data:," or re.fullmatch(r"[\w.%-]+\.(csv|png)", had["href"] or "")


def test_head_of_the_page(html: str) -> None:
    metas = Reader(html).of("meta")
    policy = next(had["content"] for had in metas if had.get("http-equiv") == "Content-Security-Policy")
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    assert {had.get("charset") for had in metas} >= {"utf-8"}
    assert {had.get("name") for had in metas} >= {"viewport", "color-scheme"}
    assert ("html", {"lang": "en"}) in Reader(html).tags


def test_hostile_names_stay_text(report: Report) -> None:
    evil = f"{HOSTILE}\"'><img src=x onerror=alert(1)> $title \u2028"
    line = replace(report.panels[0].series[0], method=evil)
    panel = replace(report.panels[0], key=evil, title=evil, caption=evil, choice=evil, series=(line,))
    table = replace(report.results, title=evil, columns=(evil,), rows=((evil,),), numeric=())
    hostile = Report(
        title=evil, subtitle=evil, verdict=evil, remarks=(evil,), warnings=(evil,), methods=(evil,),
        results=table, panels=(panel, panel), tables=(table,),
    )  # fmt: skip
    reader = Reader(page(hostile))
    assert len(reader.of("script")) == len(reader.scripts) == 2
    assert not reader.of("img")
    assert reader.texts.count(evil) >= 12
    assert json.loads(reader.scripts[0])["report"]["methods"] == [evil]
    assert not set("<>&\u2028") & set(reader.scripts[0])


def test_name_with_bytes_that_are_no_text_can_be_written(report: Report) -> None:
    assert page(replace(report, subtitle="odd \udcff name")).encode()


def test_json_is_the_report(report: Report, html: str) -> None:
    data = json.loads(Reader(html).scripts[0])
    assert data["report"] == json.loads(json.dumps(asdict(report)))
    assert [axis["range"] for axis in data["axes"]] == [list(y_axis(one).range) for one in report.panels]
    with pytest.raises(ValueError, match="not JSON compliant"):  # no browser would read it
        page(replace(report, panels=(_panel((1.0, float("inf"), 2.0)),)))


def _panel(*lines: tuple[float | None, ...]) -> Panel:
    series = tuple(
        Series(method=METHODS[i], x=tuple(map(float, range(len(y)))), y=y) for i, y in enumerate(lines)
    )
    return Panel(key="k", title="t", caption="c", x_label="x", y_label="y", series=series, place="p")


def test_range_leaves_out_a_bad_run_and_nothing_else() -> None:
    good = tuple(3 + i / 100 for i in range(40))
    assert y_axis(_panel(good, good)).outside == ()
    axis = y_axis(_panel(good, good, (11.0,) * 40))
    assert axis.range == pytest.approx((2.9805, 3.4095))
    assert axis.outside == (11.0,) * 40
    assert axis.fence is not None and axis.fence[1] < 11


@pytest.mark.parametrize("y", [(), (None,), (2.0,), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 5.0), (-3.0, None, 4.0)])
def test_range_of_odd_values_holds_them_all(y: tuple[float | None, ...]) -> None:
    axis = y_axis(_panel(y))
    low, high = axis.range
    assert low < high and axis.outside == ()
    assert all(low < value < high for value in y if value is not None)


def _light(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_stand_out_and_no_two_methods_look_alike() -> None:
    for number in range(12):
        look = style(number)
        assert (_light(LIGHT_GROUND) + 0.05) / (_light(look.on_light) + 0.05) >= 3
        assert (_light(look.on_dark) + 0.05) / (_light(DARK_GROUND) + 0.05) >= 3
    assert len({style(number).dashes for number in range(11)}) == 11
    assert all(style(one) != style(other) for one, other in combinations(range(40), 2))


@pytest.mark.slow
def test_pictures_show_lines(report: Report, tmp_path: Path) -> None:
    to_rgb = pytest.importorskip("matplotlib.colors").to_rgb
    imread = pytest.importorskip("matplotlib.image").imread
    for panel in (report.panels[0], report.panels[8], report.panels[-1]):
        path = tmp_path / f"{panel.key}.png"
        draw(panel, report.methods, path)
        picture = imread(path)[..., :3]
        assert picture.shape == (832, 1440, 3)
        plot = picture[150:620, 150:]  # without title, axes and legend, which have colours of their own
        for series in panel.series:
            colour = to_rgb(style(METHODS.index(series.method)).on_light)
            assert (abs(plot - colour).max(axis=2) < 0.02).sum() > 100, (panel.key, series.method)


@pytest.mark.slow
def test_pictures_of_nothing_and_of_odd_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    odd = ("_hidden", "$\\frac{", "漢字")
    for panel in (
        _panel(),
        _panel((None, None)),
        replace(_panel((2.0,)), x_log=True, markers=True),
    ):
        series = tuple(replace(one, method=odd[1]) for one in panel.series)
        draw(replace(panel, series=series, title=odd[1], y_label=odd[2]), odd, tmp_path / "odd.png")
        assert (tmp_path / "odd.png").stat().st_size > 5000


# With a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(html: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def view(browser: Any, address: str) -> Iterator[Any]:
    """The page in a wide window. Whatever the console says, or any request but for the page, is a failure."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, offline=True)
    opened = context.new_page()
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: said.append(dialog.message) or dialog.dismiss())
    opened.on("request", lambda request: said.append(request.url) if request.url != address else None)
    opened.goto(address)
    opened.wait_for_selector(".shown .line")
    yield opened
    context.close()
    assert said == []


def _chart(view: Any, key: str, report: Report) -> Any:
    number = next(i for i, panel in enumerate(report.panels) if panel.key == key)
    return view.locator(f'[data-panel="{number}"]')


def _point(view: Any, chart: Any, part: float) -> None:
    """Moves the mouse to a part of the width of the plot."""
    svg = chart.locator("svg[role=img]")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    view.mouse.move(box["x"] + 60 + part * (box["width"] - 80), box["y"] + box["height"] / 2)


def _tip(chart: Any) -> tuple[str, list[tuple[str, str]]]:
    rows = chart.locator(".tip .row").all()
    values = [(row.locator(".name").inner_text(), row.locator(".value").inner_text()) for row in rows]
    return chart.locator(".tip .x").inner_text(), values


def _ticks(chart: Any) -> list[str]:
    return list(chart.locator("svg[role=img] text").all_text_contents())


@pytest.mark.slow
def test_every_panel_has_its_lines(view: Any, report: Report) -> None:
    for panel in report.panels:
        lines = _chart(view, panel.key, report).locator(".line").all()
        assert len(lines) == len(panel.series)
        for line in lines:
            assert len(line.get_attribute("d")) > 20
            assert "NaN" not in line.get_attribute("d")
    gap = _chart(view, "curves-0.004", report).locator('.returned[data-method="5"] .line').get_attribute("d")
    assert gap.count("M") == 2  # the line breaks where there is no value
    assert _chart(view, "loss-against-lr", report).locator(".lost").count() == 1
    assert _chart(view, "loss-against-lr", report).locator(".beyond").count() == 1


@pytest.mark.slow
def test_script_and_python_agree_on_the_range(view: Any) -> None:
    fresh, given = view.evaluate("[charts.map(freshRange), axes.map((axis) => axis.range)]")
    assert len(fresh) == len(given) > 0
    for one, other in zip(fresh, given, strict=True):
        assert one == pytest.approx(other)


@pytest.mark.slow
def test_tip_tells_the_values_best_first(view: Any, report: Report) -> None:
    chart, panel = _chart(view, "curves-0.0005", report), report.panels[0]
    _point(view, chart, 0.6)
    where, rows = _tip(chart)
    step = float(where.removeprefix("step "))
    assert 2200 < step < 2600
    values = []
    for series in panel.series:
        name = series.method + (" (live)" if series.weights == "live" else "")
        values.append((series.y[series.x.index(step)], name.replace("\u2028", "\n")))
    expected = [(name.split(), f"{value:.4f}") for value, name in sorted(values)]
    assert [(name.split(), value) for name, value in rows] == expected
    view.mouse.move(0, 0)
    assert chart.locator(".tip").is_hidden()


@pytest.mark.slow
def test_tip_by_keyboard_and_for_a_run_that_diverged(view: Any, report: Report) -> None:
    chart = _chart(view, "loss-against-lr", report)
    chart.locator(".chart").focus()
    for key, rate in (
        ("ArrowRight", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("ArrowLeft", 0), ("End", 3),
    ):  # fmt: skip
        view.keyboard.press(key)
        assert _tip(chart)[0] == f"learning rate {RATES[rate]}"
    assert _tip(chart)[1][0] == ("PACE", "3.0180")
    assert _tip(chart)[1][-1] == ("AdamW", "diverged")
    view.keyboard.press("Escape")
    assert chart.locator(".tip").is_hidden()


@pytest.mark.slow
def test_ticks_at_the_measured_points(view: Any, report: Report) -> None:
    texts = _ticks(_chart(view, "loss-against-lr", report))
    assert [text for text in texts if text in map(str, RATES)] == list(map(str, RATES))
    assert set("1234") <= set(_ticks(_chart(view, "tuning", report)))
    assert {"1M", "10M", "100M", "1B"} <= set(_ticks(_chart(view, "gap", report)))


@pytest.mark.slow
def test_hiding_a_method_hides_it_everywhere(view: Any, report: Report) -> None:
    chart = _chart(view, "loss-against-lr", report)
    button = view.locator(".legend button").nth(6)
    note, ticks = chart.locator(".note").inner_text(), _ticks(chart)
    assert "5.2110" in note and HOSTILE in note and "diverged (AdamW)" in note
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert view.locator('.series[data-method="6"]').count() == 0
    assert view.locator('.series[data-method="0"]').count() > 0
    assert view.locator('.key .off[data-method="6"]').count() == 11  # in print, too
    assert "cut" not in chart.locator(".note").inner_text()
    view.locator(".legend button").nth(0).click()
    assert _ticks(chart) != ticks
    for number in (0, 6):
        view.locator(".legend button").nth(number).click()
    assert (chart.locator(".note").inner_text(), _ticks(chart)) == (note, ticks)


@pytest.mark.slow
def test_choosing_a_learning_rate_chooses_it_everywhere(view: Any, report: Report) -> None:
    assert _chart(view, "end-0.0005", report).is_visible()
    view.get_by_role("button", name="lr 0.004").first.click()
    for place in ("curves", "end"):
        assert _chart(view, f"{place}-0.004", report).is_visible()
        assert _chart(view, f"{place}-0.0005", report).is_hidden()
    assert view.locator(".choices [aria-pressed=true]").all_inner_texts() == [
        "lr 0.004", "lr 0.004", "saturation",
    ]  # fmt: skip
    assert _chart(view, "saturation", report).is_visible()  # it has no such choice


@pytest.mark.long
def test_zooming_and_back(view: Any, report: Report) -> None:
    chart = _chart(view, "curves-0.0005", report)
    before = _ticks(chart)
    for back in ("button", "double click"):
        assert chart.locator(".reset").is_hidden()
        _point(view, chart, 0.5)
        view.mouse.down()
        _point(view, chart, 0.6)
        _point(view, chart, 0.75)
        assert chart.locator(".select").count() == 1
        view.mouse.up()
        assert chart.locator(".select").count() == 0
        assert "0" not in _ticks(chart) and "2500" in _ticks(chart) and _ticks(chart) != before
        (left, right), *others = view.evaluate("[0, 1, 4].map((number) => charts[number].zoom)")
        assert others == [[left, right], None]  # its neighbours in the place follow, other places do not
        assert 1900 < left < 2100 and 2900 < right < 3100
        _point(view, chart, 0.01)
        assert left <= float(_tip(chart)[0].removeprefix("step ")) < left + 60
        if back == "button":
            chart.locator(".reset").click()
        else:
            chart.locator("svg[role=img]").dblclick()
        assert _ticks(chart) == before
    # Steps are no tokens: the other panel of that place keeps its own range.
    assert view.evaluate("zoom(charts[11], [1000, 2000]), [charts[11].zoom, charts[12].zoom]") == [
        [1000, 2000],
        None,
    ]


@pytest.mark.long
def test_numbers_as_a_table(view: Any, report: Report) -> None:
    chart = _chart(view, "loss-against-lr", report)
    chart.locator("summary").click()
    chart.locator("tbody tr").first.wait_for()
    rows = [row.locator("td").all_inner_texts() for row in chart.locator("tbody tr").all()]
    assert [row[0] for row in rows] == list(map(str, RATES))
    assert rows[3][1] == "diverged" and rows[3][4] == "3.0180"


@pytest.mark.long
def test_nothing_is_wider_than_a_phone(view: Any) -> None:
    view.set_viewport_size({"width": 390, "height": 844})
    view.wait_for_function("charts[0].width < 390")
    for summary in view.locator("summary:visible").all():
        summary.click()
    assert view.evaluate("document.documentElement.scrollWidth") == 390
    _point(view, view.locator(".panel.shown").first, 0.9)
    assert view.locator(".tip:visible").count() == 1
    assert view.evaluate("document.documentElement.scrollWidth") == 390
    sizes = view.evaluate("[...document.querySelectorAll('body *')].map((e) => getComputedStyle(e).fontSize)")
    assert min(float(size.removesuffix("px")) for size in sizes) >= 12
    assert view.evaluate("charts[0].svg.getBoundingClientRect().width / charts[0].width") == pytest.approx(1)


@pytest.mark.long
def test_dark_and_light(view: Any) -> None:
    looks = {}
    for scheme in ("light", "dark"):
        view.emulate_media(color_scheme=scheme)
        looks[scheme] = view.evaluate(
            "['background-color', 'color'].map((name) => getComputedStyle(document.body)[name])"
            ".concat(getComputedStyle(document.querySelector('.shown .line')).stroke)"
        )
    rgb = {name: tuple(int(name[i : i + 2], 16) for i in (1, 3, 5)) for name in (LIGHT_GROUND, DARK_GROUND)}
    assert looks["light"][0] == f"rgb{rgb[LIGHT_GROUND]}"
    assert looks["dark"][0] == f"rgb{rgb[DARK_GROUND]}"
    assert all(light != dark for light, dark in zip(looks["light"], looks["dark"], strict=True))


@pytest.mark.long
def test_print_shows_every_panel_and_no_buttons(view: Any, report: Report) -> None:
    view.emulate_media(media="print", color_scheme="dark")
    view.set_viewport_size({"width": 680, "height": 960})  # A4 without its margins
    for panel in report.panels:
        chart = _chart(view, panel.key, report)
        assert chart.is_visible() and chart.locator(".key").is_visible()
        assert chart.locator("svg[role=img]").bounding_box()["height"] > 150
    assert view.locator("button:visible").count() == 0
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert view.evaluate("document.documentElement.scrollWidth") == 680
    for box in view.locator(".table .scroll").all():
        assert box.evaluate(
            "(box) => box.scrollHeight <= box.clientHeight && box.scrollWidth <= box.clientWidth"
        )


@pytest.mark.long
def test_without_scripts_the_page_says_where_the_numbers_are(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    opened = context.new_page()
    opened.goto(address)
    assert "CSV files beside" in opened.locator("noscript").inner_text()
    assert opened.locator(".verdict").is_visible()
    context.close()


@pytest.mark.long
def test_touch_reads_values_that_stay(browser: Any, address: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, offline=True)
    opened = context.new_page()
    opened.goto(address)
    chart = opened.locator(".panel.shown").first
    chart.locator("svg[role=img]").tap()
    assert chart.locator(".tip .row").count() == 2 * len(METHODS)
    opened.locator("h1").tap()
    assert chart.locator(".tip").is_hidden()
    context.close()
