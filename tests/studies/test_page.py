"""The page of a comparison: what its charts and tables hold, and how it behaves in a browser."""

import csv
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations

import pytest

from paceline.studies import looks, page, panels
from paceline.studies.comparison import Found, page_of
from paceline.studies.lines import Finished
from paceline.studies.looks import COLOURS, look, y_range
from paceline.studies.plots import Line, Plot, Sheet, draw
from paceline.studies.table import Table

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '</script><img src=x onerror=alert(1)>" onclick="x\' & $x_1$ $title \u2028'
METHODS = {"adamw": {"AdamW": "live", "AdamW · EMA": "ema"}, "pace": {"PACE": "average"}}


def finished(kind, lr, seed, loss, *, outcome="finished", methods=None, **more):
    """Return a run whose returned weights end at this loss, after a curve that falls by 0.9."""
    methods = methods or METHODS[kind]
    views = {"live": 0.2, **dict.fromkeys(methods.values(), 0.0), **({} if kind == "pace" else {"live": 0.1})}
    curve = [
        (step, {view: loss + above + 1 - step / 100 for view, above in views.items()})
        for step in range(10, 101, 10)
    ]
    config = {"model": "gpt:1m", "data": ["text.txt"], "length": 16, "batch_size": 4, "lr": lr, "seed": seed}
    facts = {
        "name": f"{kind}-{lr:g}-{seed}",
        "config": config,
        "methods": methods,
        "method": next(iter(methods)),
        "returned": list(methods.values())[-1],
        "control": {"strength": 15.0} if kind == "pace" else None,
        "parameters": 1000,
        "steps": 100,
        "outcome": outcome,
        "ended": 100,
        "seconds": 11.0,
        "speed": 1000.0,
        "memory": dict.fromkeys(views, 8000) | {"ema": 12000},
        "batches": f"batches-{seed}",
        "start": 7.0,
        "evaluations": tuple(curve if outcome == "finished" else curve[:3]),
        "pull": ((50, {"saturated": 0.25, "gap_rms": 0.001}),) if kind == "pace" else (),
    }
    return Finished(**(facts | more))


def comparison(losses, seeds=(1, 2, 3)):
    """Runs of AdamW and of PACE by learning rate; None diverged. Seeds shift both alike."""
    return [
        finished(kind, lr, seed, (loss or 6.0) + 0.05 * seed, outcome="finished" if loss else "diverged")
        for lr, both in losses.items()
        for seed in seeds
        for kind, loss in zip(METHODS, both, strict=True)
    ]


RUNS = comparison({1e-3: (3.2, 3.1), 2e-3: (3.1, 3.05), 4e-3: (None, 3.3)})


def charts_of(runs):
    return {chart.key: chart for chart in panels.charts(Table.of(runs))}


def line_of(chart, method, *, thin=False):
    return next(line for line in chart.plot.lines if (line.label, line.thin) == (method, thin))


# --- Plots ----------------------------------------------------------------------------------------------


def _light(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_stand_out_and_no_two_methods_look_alike():
    for on_light, on_dark in COLOURS:
        assert (_light("#fdfdfb") + 0.05) / (_light(on_light) + 0.05) >= 3
        assert (_light(on_dark) + 0.05) / (_light("#15171a") + 0.05) >= 3
    pairs = combinations([(one.colour, one.dashes) for one in map(look, range(40))], 2)
    assert all(one != other for one, other in pairs)
    assert len({look(number).dashes for number in range(11)}) == 11


def test_a_bad_run_does_not_hide_the_rest():
    good = [3 + i / 100 for i in range(40)]
    assert y_range(good * 2)[1] == ()
    (low, high), outside = y_range([*good, *good, *[11.0] * 40])
    assert (low, high) == pytest.approx((2.9805, 3.4095)) and outside == (11.0,) * 40
    # The best run of all stays in the picture.
    (low, high), outside = y_range([*good, 1.0, 11.0])
    assert low < 1.0 and outside == (11.0,)


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0], [-3.0, 4.0]])
def test_the_range_of_odd_values_holds_them_all(values):
    (low, high), outside = y_range(values)
    assert outside == () and all(low < value < high for value in values)


def plot(*lines, **more):
    drawn = [
        Line(label=f"method {i}", look=look(i), x=range(len(y)), y=y, error=[0.01] * len(y))
        for i, y in enumerate(lines)
    ]
    return Plot(title="t", lines=drawn, x_label="x", y_label="y", **more)


def test_an_element_has_the_values_and_no_colour_of_its_own():
    points = plot((3.25, 3.1, None), (3.2, float("inf"), 3.3), dots=True)
    drawn = page.svg(points, "key")
    ET.fromstring(drawn.replace("xlink:href", "href"))
    titles = re.findall(r'<g class="m(\d)"><title>([^<]*)</title>', drawn)
    assert ("0", "method 0, x 0: 3.2500 ± 0.0100") in titles and ("1", "method 1, x 1: diverged") in titles
    assert not any("method 0, x 2" in words for _, words in titles)
    assert not re.search("#[0-9a-f]{6}", drawn) and "var(--c1)" in drawn
    assert drawn == page.svg(points, "key") != page.svg(points, "other")


@pytest.mark.slow
def test_nothing_and_odd_names_are_drawn_and_the_same_values_give_the_same_files(tmp_path):
    odd = plot((2.0,), (None,), x_log=True, dots=True)
    named = [replace(line, label=name) for line, name in zip(odd.lines, ("_a", "$\\frac{"), strict=True)]

    def panel(axes):
        looks.frame(axes, "$\\frac{", "漢字", "y")
        looks.curve(axes, [1, 2], [1, 2], look(3), "a")

    rows = ((plot(), replace(odd, lines=named)), (plot((None, None)), panel))
    (path,) = draw(Sheet(title="$\\frac{", rows=rows, notes=("n",)), tmp_path / "odd.1", (".png",))
    assert path.name == "odd.1.png" and path.stat().st_size > 5000
    one, other = (
        draw(Sheet(title="t", rows=((odd,),)), tmp_path / name, (".pdf", ".svg")) for name in ("one", "other")
    )
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


@pytest.mark.slow
def test_a_picture_shows_the_colours_of_its_lines(tmp_path):
    to_rgb = pytest.importorskip("matplotlib.colors").to_rgb
    imread = pytest.importorskip("matplotlib.image").imread
    draw(Sheet(title="t", rows=((plot([3.0, 3.1] * 9, [3.2] * 18),),)), tmp_path / "p", (".png",))
    picture = imread(tmp_path / "p.png")[100:450, 100:, :3]  # without the legend
    for number, seen in ((0, True), (1, True), (2, False)):
        near = abs(picture - to_rgb(look(number).colour)).max(axis=2) < 0.02
        assert (near.sum() > 100) == seen


# --- What a page shows ----------------------------------------------------------------------------------


def test_losses_by_rate_are_means_with_standard_errors_and_divergence_is_shown():
    chart = charts_of(RUNS)["learning-rates"]
    pace = line_of(chart, "PACE")
    assert pace.y == pytest.approx([3.2, 3.15, 3.4]) and pace.error == pytest.approx([0.05 / 3**0.5] * 3)
    assert line_of(chart, "AdamW · EMA").y[2] == float("inf")


def test_regret_is_against_the_best_of_the_others():
    regret = charts_of(RUNS)["regret"]
    assert line_of(regret, "PACE").x == pytest.approx([0.5, 1, 2])
    assert line_of(regret, "PACE").y == pytest.approx([0.0, -0.05, 0.2])
    assert "AdamW · EMA at 0.002" in regret.caption


def test_the_cost_of_tuning_is_the_mean_over_all_picks():
    tuning = charts_of(comparison({1e-3: (3.2, 3.2), 2e-3: (3.1, 3.1), 4e-3: (3.6, None)}, seeds=(0,)))[
        "tuning"
    ]
    picks = [[min(pick) for pick in combinations((3.2, 3.1, 3.6), n)] for n in (1, 2, 3)]
    assert line_of(tuning, "AdamW · EMA").y == pytest.approx([sum(pick) / len(pick) for pick in picks])
    assert line_of(tuning, "PACE").y[0] == pytest.approx((3.2 + 3.1 + 7.0) / 3)  # where it started


def test_curves_show_live_weights_thin_and_end_where_not_every_seed_came_to():
    """The mean of the survivors would fall where the others left."""
    early = finished("pace", 4e-3, 9, 3.0, outcome="diverged")
    charts = charts_of([*RUNS, early])
    curves = charts["curves-0.002"]
    assert {(line.label, line.thin) for line in curves.plot.lines} == {
        ("AdamW", False), ("AdamW · EMA", False), ("PACE", False), ("PACE", True)
    }  # fmt: skip
    assert line_of(curves, "PACE").y[-1] == pytest.approx(3.15)
    assert line_of(curves, "PACE", thin=True).y[-1] == pytest.approx(3.35)
    assert list(line_of(charts["curves-0.004"], "PACE").x) == [10, 20, 30]
    assert charts["last-quarter-0.002"].plot.last


def test_what_the_control_did_is_shown_for_pace_alone():
    for key, value in (("saturated-0.001", 0.25), ("gap-rms-0.001", 0.001)):
        (line,) = charts_of(RUNS)[key].plot.lines
        assert line.label == "PACE" and line.y == [value]


def rows_of(made, key):
    table = next(table for table in made.tables if table.key == key)
    return {row[0]: row[1:] for row in table.rows}


def test_tables_count_what_diverged_and_each_average_for_its_method():
    made = page_of(Found(runs=RUNS[:-1], waiting=1))
    assert rows_of(made, "results")["AdamW"] == ("3.3000 ± 0.0289", "0.002", "3.4000 ± 0.0289", *_SHOWN)
    assert {name: row[-1] for name, row in rows_of(made, "cost").items()} == {
        "AdamW": "8", "AdamW · EMA": "12", "PACE": "8"
    }  # fmt: skip
    assert made.verdict.startswith("So far, with 17 of 18 runs: ") and made.lr == 2e-3


_SHOWN = ("3.3000 ± 0.0289", "diverged")


def test_what_has_not_ended_has_not_diverged():
    runs = [finished("adamw", 1e-3, 1, 3.0), finished("pace", 1e-3, 1, 3.0, outcome="unfinished", ended=None)]
    made = page_of(Found(runs=runs, missing={"sgd": "its package is missing"}))
    assert rows_of(made, "results")["PACE"][0] == "–"
    assert "sgd was not run: its package is missing" in made.warnings
    assert any("has not come to its end" in text for text in made.warnings)


def test_a_method_of_which_one_seed_came_to_its_end_has_not_just_diverged():
    runs = [
        finished("pace", 1e-3, seed, 3.0, outcome=how) for seed, how in ((1, "finished"), (2, "diverged"))
    ]
    assert rows_of(page_of(Found(runs=runs)), "results")["PACE"][:2] == ("some diverged", "")


def test_other_batches_and_runs_that_are_there_twice_are_named():
    other = finished("pace", 1e-3, 1, 3.0, batches="others")
    twice = replace(finished("adamw", 1e-3, 1, 3.0), name="again")
    warnings = " ".join(page_of(Found(runs=[finished("adamw", 1e-3, 1, 3.0), other, twice])).warnings)
    assert (
        "have not all seen the same batches" in warnings
        and "again has the method, learning rate and seed of adamw-0.001-1" in warnings
    )
    both = finished("adamw", 1e-3, 1, 3.0)
    alone = replace(both, name="alone", methods={both.method: both.returned})
    assert any(
        "alone has the method, learning rate and seed of adamw-0.001-1" in text
        for text in page_of(Found(runs=[both, alone])).warnings
    )


# --- HTML -----------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Checks that elements are nested well, and keeps tags with attributes, and texts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if data.strip() and self.open[-1] not in ("script", "style"):
            self.texts.append(data.strip("\n"))


@pytest.fixture(scope="module")
def hostile():
    methods = {HOSTILE: "live"}
    runs = [*comparison({1e-3: (3.2, 3.1), 2e-3: (3.1, 3.0)}, seeds=(1, 2))]
    runs += [
        finished("adamw", lr, seed, 3.3, methods=methods, name=f"{HOSTILE}{lr}{seed}")
        for lr in (1e-3, 2e-3) for seed in (1, 2)
    ]  # fmt: skip
    return page_of(Found(runs=runs, missing={HOSTILE: HOSTILE}))


@pytest.fixture(scope="module")
def html(hostile):
    return page.html(hostile)


@pytest.mark.slow
def test_the_page_is_text_and_charts_that_need_nothing_else(hostile, html):
    reader = Reader(html)
    for text in (hostile.title, hostile.verdict, *hostile.remarks, *hostile.warnings):
        assert text in reader.texts
    for table in hostile.tables:
        assert all(set(filter(None, row)) <= set(reader.texts) for row in table.rows)
    assert not re.search(r"https?:|[\"'`(=]\s*//|@import|url\((?!#)", html)
    for tag, had in reader.tags:
        assert "src" not in had and tag not in {"img", "iframe", "object", "embed", "base"}
        assert not any(name.startswith("on") for name in had)
        link = had.get("href") or had.get("xlink:href") or "#"
        assert link == "data:," or link.startswith("#") or re.fullmatch(r"[\w.%-]+\.(csv|png)", link)
    policy = next(had["content"] for _, had in reader.tags if "http-equiv" in had)
    assert policy.startswith("default-src 'none'; ")
    names = [had["id"] for _, had in reader.tags if "id" in had]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_each_part_has_its_files(tmp_path, monkeypatch):
    odd = "odd \udcff\x1b[2J\x07"
    made = page_of(Found(runs=[*RUNS, finished("pace", 1e-3, 4, 3.2, name=odd)], missing={odd: "name"}))
    made = replace(made, charts=(replace(made.charts[0], key="a/b c"), *made.charts[1:3]))
    written = page.write(made, tmp_path).read_bytes()
    assert written.count(b"PACE") > 10 and rb"odd \udcff\x1b[2J\x07 was not run" in written
    assert rb"odd \udcff\x1b[2J\x07,finished" in (tmp_path / "runs.csv").read_bytes()
    assert not any(
        set(path.read_bytes()) & {7, 27} for path in (*tmp_path.glob("*.csv"), tmp_path / "report.html")
    )
    assert {path.stem for path in tmp_path.glob("*.png")} == {"a-b-c", "regret", "tuning"}
    with (tmp_path / "a-b-c.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + sum(len(line.x) for line in made.charts[0].plot.lines)
    assert ["AdamW", "returned", "0.004", "diverged", ""] in rows
    with (tmp_path / "results.csv").open(newline="") as file:
        assert tuple(map(tuple, list(csv.reader(file))[1:])) == made.tables[0].rows


# --- In a browser ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def view(browser, html, tmp_path, request):
    """The page in a window. Whatever the console says, or any request but for the page, is a failure."""
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    said = []
    context = browser.new_context(offline=True, **getattr(request, "param", {}))
    opened = context.new_page()
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("dialog", lambda dialog: said.append(dialog.message) or dialog.dismiss())
    opened.on("request", lambda sent: said.append(sent.url) if sent.url != path.as_uri() else None)
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert said == []


@pytest.mark.slow
def test_buttons_hide_a_method_and_switch_the_learning_rate(view, hostile):
    drawn = (
        "[...document.querySelectorAll('figure g')].filter((e) => /^m\\d/.test(e.className.baseVal) && "
        "getComputedStyle(e).display != 'none').map((e) => e.className.baseVal)"
    )
    assert set(view.evaluate(drawn)) == {"m0", "m1", "m2", "m3"}
    button = view.locator(".methods button").nth(3)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert set(view.evaluate(drawn)) == {"m0", "m1", "m2"}
    shown = lambda: view.locator("figure:visible h3 span").all_inner_texts()  # noqa: E731
    assert set(shown()) == {"lr 0.002"} and len(shown()) == 4
    view.get_by_role("button", name="0.001").click()
    assert set(shown()) == {"lr 0.001"}
    assert view.locator(".choices [aria-pressed=true]").all_inner_texts() == ["0.001"]


@pytest.mark.slow
@pytest.mark.parametrize("view", [{"viewport": {"width": 390, "height": 844}}], indirect=True)
def test_a_phone_shows_all_of_it_in_dark_and_light(view):
    assert view.evaluate("document.documentElement.scrollWidth") == 390
    sizes = view.evaluate(
        "[...document.querySelectorAll('figure:not(.other) svg text')]"
        ".filter((e) => e.textContent.length > 2).map((e) => e.getBoundingClientRect())"
        ".map((box) => Math.min(box.width, box.height))"
    )
    assert min(size for size in sizes if size) >= 8
    seen = []
    for scheme in ("light", "dark"):
        view.emulate_media(color_scheme=scheme)
        seen.append(
            view.evaluate(
                "[[document.body, 'backgroundColor'], [document.querySelector('figure .m0 path'), 'stroke'],"
                "[document.querySelector('figure text'), 'fill']].map(([e, k]) => getComputedStyle(e)[k])"
            )
        )
    assert all(light != dark and "rgb" in light for light, dark in zip(*seen, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("view", [{"java_script_enabled": False}], indirect=True)
def test_without_scripts_all_charts_are_shown_and_nothing_to_press(view, hostile):
    assert view.locator("figure:visible").count() == len(hostile.charts)
    assert not view.locator(".choices").is_visible()


@pytest.mark.long
def test_on_paper_all_charts_are_shown_and_nothing_is_cut(view, hostile):
    view.emulate_media(media="print", color_scheme="dark")
    view.set_viewport_size({"width": 680, "height": 960})  # A4 without its margins
    assert view.locator("figure:visible").count() == len(hostile.charts)
    assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert view.evaluate("document.documentElement.scrollWidth") == 680
    whole = "(box) => box.scrollHeight <= box.clientHeight && box.scrollWidth <= box.clientWidth"
    assert all(box.evaluate(whole) for box in view.locator(".scroll").all())
