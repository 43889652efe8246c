"""A browser draws the page: every chart, of every run, without an error."""

import html
import re
import shutil
import subprocess

import pytest
from report.run_folders import write_run

from xlstm_jax.report.page import build_page
from xlstm_jax.report.run_files import read_runs

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"No browser is on PATH: none of {', '.join(BROWSERS)}."),
    pytest.mark.slow,
]

LINES = {
    "Loss": 2,
    "Bits per byte": 2,
    "Perplexity": 2,
    "Accuracy": 2,
    "Learning rate": 1,
    "Gradient norm": 1,
    "Norm of parameters": 1,
    "Tokens per second": 1,
    "Model FLOPs utilization (MFU)": 1,
    "MFU by six FLOPs a parameter (6N-MFU)": 1,
    "Goodput": 1,
    "Step time": 1,
    "Memory of a device": 1,
    "recall": 1,
}
"""The charts of a run and how many lines each has."""


def dom_of(folder, page):
    """Let a browser open a page; return the document once its scripts have run."""
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1200,900", "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return process.stdout


def charts_of(dom):
    """Return what each chart shows, by title."""
    figures = re.findall(r"<figure.*?</figure>", dom, re.DOTALL)
    return {html.unescape(re.search(r"<figcaption><span>(.*?)</span>", figure)[1]): figure for figure in figures}


def lines_of(figure):
    """Return the number of points of each line, less those that only show how noisy one is."""
    paths = re.findall(r'<path class="(?:line|line thick|area)"[^>]* d="([^"]*)"', figure)
    return [len(re.findall("[ML]", path)) for path in paths]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    attack = "</script><script>document.documentElement.dataset.attacked = 1</script>"
    return [write_run(folder / "a", sample=attack), write_run(folder / "b", num_steps=300, lr=0.02)]


@pytest.fixture(scope="module")
def single(folders, tmp_path_factory):
    return dom_of(tmp_path_factory.mktemp("single"), build_page(read_runs(folders[:1])))


@pytest.fixture(scope="module")
def both(folders, tmp_path_factory):
    return dom_of(tmp_path_factory.mktemp("both"), build_page(read_runs(folders)))


def root_of(dom):
    return re.search(r"<html[^>]*>", dom)[0]


@pytest.mark.parametrize("fixture", ["single", "both"])
def test_the_script_comes_to_its_end_without_an_error(fixture, request):
    root = root_of(request.getfixturevalue(fixture))
    assert 'data-ready="true"' in root
    assert "data-error" not in root
    assert "data-attacked" not in root


def test_every_chart_of_a_run_is_drawn_with_all_its_points(single):
    charts = charts_of(single)
    assert set(charts) == {*LINES, "Where the time went"}
    assert f'data-charts="{len(charts)}"' in root_of(single)
    for title, num_lines in LINES.items():
        points = lines_of(charts[title])
        assert len(points) == num_lines, title
        assert points == [10] if title == "recall" else points[0] == 400, title
    assert [points > 400 for points in lines_of(charts["Where the time went"])] == [True] * 3


def test_runs_are_drawn_over_each_other_in_colours_of_their_own(both):
    charts = charts_of(both)
    assert set(charts) == {*LINES, "Where the time went: a · lr=0.01", "Where the time went: b · lr=0.02"}
    for title, num_lines in LINES.items():
        assert len(lines_of(charts[title])) == 2 * num_lines, title
        assert {"--line-0", "--line-1"} == set(re.findall(r"--line-\d", charts[title])), title
    assert sorted(lines_of(charts["Goodput"])) == [300, 400]


def test_references_are_lines_beside_bits_per_byte(single):
    assert re.findall(r'<text class="reference"[^>]*>(.*?)</text>', single) == ["gzip 2.11", "xz 1.6"]
    assert single.count('<line class="reference"') == 2


def test_samples_are_text_and_the_last_come_first(single, both):
    assert "&lt;/script&gt;&lt;script&gt;" in re.search(r'<div id="samples">.*?</section>', single, re.DOTALL)[0]
    assert "Step 200" in single
    assert both.count('<div class="sample">') == 4


ACTIONS = """
const root = document.documentElement, count = (selector) => document.querySelectorAll(selector).length;
const say = (name, value) => { root.dataset[name] = value; };
const loss = document.querySelector("figure"), paths = () => loss.querySelectorAll("path.line:not(.raw)").length;
const axis = (name) => document.querySelector(`[name=axis][value=${name}]`).click();
const ticks = () => [...loss.querySelectorAll("text")].map((text) => text.textContent).join(" ");
const box = loss.querySelector("svg").getBoundingClientRect();
const pointer = (kind, share) => loss.querySelector("svg").dispatchEvent(
    new PointerEvent(kind, { clientX: box.left + share * box.width, clientY: box.top + 50, pointerType: "mouse" }));
pointer("pointermove", 0.5);
say("tip", document.getElementById("tip").textContent);
document.querySelector("[data-run='0']").click();
say("oneRun", paths());
document.querySelector("[data-run='0']").click();
loss.querySelector(".keys button").click();
say("oneLabel", paths());
axis("tokens");
say("tokens", ticks());
axis("seconds");
say("seconds", ticks());
axis("step");
loss.querySelector("figcaption button").click();
say("linear", ticks());
pointer("pointerdown", 0.5);
pointer("pointermove", 0.75);
pointer("pointerup", 0.75);
say("zoomed", ticks());
document.querySelector("#unzoom").click();
say("whole", ticks());
document.querySelector(".chooser button").click();
say("sample", document.querySelector(".chooser output").textContent);
say("done", "true");
"""


def test_runs_lines_axes_scales_and_samples_can_be_chosen(folders, tmp_path):
    page = build_page(read_runs(folders))
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', page)[0]
    page = page.replace(policy, "").replace("</body>", f"<script>{{{ACTIONS}}}</script></body>")
    root = root_of(dom_of(tmp_path, page))
    told = {name: html.unescape(text) for name, text in re.findall(r'data-([\w-]+)="([^"]*)"', root)}
    assert "error" not in told
    assert told["done"] == "true"
    assert told["tip"].startswith("step ")
    assert all(name in told["tip"] for name in ("lr=0.01, train", "lr=0.02, train", "lr=0.01, val", "lr=0.02, val"))
    assert told["one-run"] == told["one-label"] == "2"
    assert "400k" in told["tokens"].split()
    assert "400 s" in told["seconds"] or "min" in told["seconds"]
    assert told["whole"] == told["linear"] != told["zoomed"]
    assert "100" in told["linear"].split()
    assert "100" not in told["zoomed"].split()
    assert told["sample"] == "Step 100"
