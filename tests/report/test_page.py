"""The page holds all of a run, loads nothing, and runs nothing but its own script."""

import html
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report.run_folders import write_rows, write_run

from xlstm_jax.report.markup import Markup, joined, script_json, tag
from xlstm_jax.report.page import build_page, write_report
from xlstm_jax.report.run_files import read_run, read_runs

pytestmark = pytest.mark.slow

ATTACK = "</script><script>alert(1)</script><img src=http://a.b onerror=alert(1)>"


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1])


def test_text_is_escaped_and_markup_is_not():
    inner = tag("b", "<&>", class_="a", data_run=1, open=True, hidden=False)
    assert inner == '<b class="a" data-run="1" open>&lt;&amp;&gt;</b>'
    assert joined("<", inner, None) == f"&lt;{inner}"
    assert tag("p", inner, title='"<') == f'<p title="&quot;&lt;">{inner}</p>'
    assert isinstance(inner, Markup)


@given(st.text() | st.dictionaries(st.text(), st.text()))
def test_embedded_data_cannot_end_its_script_and_is_read_back_as_it_was(data):
    text = script_json(data)
    assert not set("<>&") & set(text)
    assert json.loads(text) == data


def test_no_text_of_a_run_can_run_as_a_script(tmp_path):
    folder = write_run(tmp_path / "<b>run", sample=ATTACK)
    write_rows(folder, "val_extended", {1: {ATTACK: 1.0}, 2: {ATTACK: 2.0}, 3: {"once": 1.0}})
    write_rows(folder, ATTACK.replace("/", "%2F"), {1: {"once": 1.0}})
    (folder / "file_logs/config.json").write_text(json.dumps({ATTACK: {ATTACK: ATTACK}, "list": [{ATTACK: ATTACK}]}))
    start = dict.fromkeys(("step", "time", "python", "platform", "status"), ATTACK)
    start |= {"command": [ATTACK], "git": {"commit": ATTACK}, "devices": {"kind": ATTACK}, "packages": {ATTACK: ATTACK}}
    (folder / "environment.json").write_text(json.dumps({"starts": [start], "references": {ATTACK: 2.0}}))
    parameter = {"name": ATTACK, "shape": [ATTACK], "dtype": ATTACK, "spec": [ATTACK], "size": 6}
    (folder / "parameters.json").write_text(json.dumps([parameter]))
    for runs in ([folder], [folder, write_run(tmp_path / "other")]):
        page = build_page(read_runs(runs))
        assert page.count("<script") == page.count("</script>") == 2
        assert "<img" not in page
        assert "<b>run" not in page
    assert ATTACK in data_of(page)["runs"][0]["samples"][0]["texts"][0][1]


def test_the_page_loads_nothing(tmp_path):
    page = build_page([read_run(write_run(tmp_path / "run"))])
    assert re.findall(r'\b(?:src|href|action|poster)\s*=\s*"([^"]*)"', page) == ["data:,"]
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in html.unescape(page)


def test_the_page_tells_what_a_run_is_and_how_it_did(tmp_path):
    page = build_page([read_run(write_run(tmp_path / "my run"))])
    for text in (
        "my run",
        "finished",
        "Step 400 of 1,000",
        "gzip",
        "layer.kernel",
        "2 × 3",
        "dp+fsdp, –",
        "abc, with changes",
    ):
        assert text in page
    assert data_of(page)["runs"][0]["samples"][0] == {
        "step": 100,
        "texts": [["Once", " and more"], ["It's", " at 100"]],
    }


def test_several_runs_are_compared_and_their_differing_settings_come_first(tmp_path):
    folders = [write_run(tmp_path / name, lr=lr) for name, lr in (("a", 0.1), ("b", 0.2))]
    page = build_page(read_runs(folders))
    differences, rest = page.split("<h3>Differences</h3>")[1].split("</table>", 1)
    assert "optimizer.lr" in differences
    assert "optimizer.name" not in differences
    assert "adamw" in rest
    assert [run["name"] for run in data_of(page)["runs"]] == ["a · lr=0.1", "b · lr=0.2"]


def test_metrics_alone_make_a_page(tmp_path):
    write_rows(tmp_path, "val", {7: {"loss": None, "accuracy": 0.5}})
    page = build_page([read_run(tmp_path)])
    assert [chart["title"] for chart in data_of(page)["charts"]] == ["Accuracy"]
    assert "running" in page


def test_a_page_of_a_long_run_stays_small(tmp_path):
    folder = write_run(tmp_path / "run", num_steps=20_000)
    page = build_page([read_run(folder)])
    assert max(len(series["x"]) for chart in data_of(page)["charts"] for series in chart["series"]) <= 2000
    assert len(page) < 2e6


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    run, path = read_run(write_run(tmp_path / "run")), tmp_path / "report.html"
    write_report([run], path)
    before = path.read_text()

    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_report([run, run], path)
    assert path.read_text() == before
