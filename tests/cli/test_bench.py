"""`bench` runs scripts, passes on what they print, and keeps it as dated Markdown."""

import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import xlstm_jax
from xlstm_jax.cli import bench
from xlstm_jax.cli.main import main

ROOT = Path(xlstm_jax.__file__).parent.parent

TABLE = '''"""A table.

More about it.
"""
import sys
print("| a | b |\\n|---|---|\\n| 1 | " + " ".join(sys.argv[1:]) + " |")
print("a warning", file=sys.stderr)
'''
PLAIN = '''"""Words alone."""
print("three ``` ticks, no table")
'''
FAILING = '''"""It fails."""
print("so far, so good")
raise SystemExit("no luck")
'''
OWN_PAGE = '''"""It writes its page."""
import datetime, os, pathlib
folder = pathlib.Path(os.environ["BENCHMARK_RESULTS"])
folder.mkdir(exist_ok=True)
(folder / f"{datetime.date.today().isoformat()}-own_page.md").write_text("its own")
'''
ENDLESS = '''"""It never ends."""
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(inner.pid, flush=True)
time.sleep(600)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for results, beside the scripts of these tests."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    texts = {"table": TABLE, "plain": PLAIN, "failing": FAILING, "own_page": OWN_PAGE, "endless": ENDLESS}
    for name, text in texts.items():
        (scripts / f"{name}.py").write_text(text)
    monkeypatch.setattr(bench, "SCRIPTS", scripts)
    machine = {"Versions": "jax 1", "Devices": "8 × cpu"}
    monkeypatch.setattr(bench, "_describe_machine", lambda: machine)
    return tmp_path / "results"


def run(folder, *arguments):
    return main(["bench", "--output", str(folder), *arguments])


@pytest.mark.parametrize("arguments", [[], ["--list"], ["--list", "table"]])
def test_benchmarks_are_listed_with_their_first_line(arguments, folder, capsys):
    assert main(["bench", *arguments]) == 0
    assert [line.split(maxsplit=1) for line in map(str.rstrip, capsys.readouterr().out.splitlines())] == [
        ["endless", "It never ends."],
        ["failing", "It fails."],
        ["own_page", "It writes its page."],
        ["plain", "Words alone."],
        ["table", "A table."],
    ]
    assert not folder.exists()


def test_the_scripts_of_the_sources_are_found():
    names = {path.stem for path in bench.SCRIPTS.glob("*.py")}
    assert {"accumulation", "cpu", "data", "gradients", "tasks", "train_step"} <= names
    assert bench.RESULTS == ROOT / "benchmarks" / "results"


def test_results_are_markdown_with_the_date_and_all_they_depend_on(folder, capsys):
    assert run(folder, "table", "--", "--rows", "3 4") == 0
    (file,) = folder.iterdir()
    date = re.fullmatch(r"(\d{4}-\d{2}-\d{2})-table\.md", file.name)[1]
    assert re.sub(r"after \d+ s", "after 0 s", file.read_text()) == (
        f"# table, {date}\n\nA table.\n\n"
        "- Command: `xlstm-jax bench table -- --rows '3 4'`\n- Versions: jax 1\n- Devices: 8 × cpu\n"
        "- Result: done after 0 s\n\n| a | b |\n|---|---|\n| 1 | --rows 3 4 |\n"
    )
    shown = capsys.readouterr()
    assert "| 1 | --rows 3 4 |" in shown.out
    assert shown.err == "a warning\n"


def test_output_without_markdown_becomes_a_block_of_code(folder):
    assert run(folder, "plain") == 0
    (file,) = folder.iterdir()
    assert file.read_text().endswith("\n\n```\nthree ``` ticks, no table\n```\n")


def test_a_script_may_write_its_page_itself(folder, capsys):
    assert [run(folder, "own_page") for _ in range(2)] == [0, 0]
    (file,) = folder.iterdir()
    assert file.read_text() == "its own"
    assert f"written to {file}" in capsys.readouterr().out.replace("\n", "")


def test_a_second_file_of_a_day_gets_a_number(folder):
    for _ in range(3):
        assert run(folder, "plain") == 0
    (folder / "2000-01-01-plain.md").touch()
    names = sorted(path.name[len("2026-01-01-") :] for path in folder.iterdir())
    assert names == ["plain-2.md", "plain-3.md", "plain.md", "plain.md"]


def test_what_fails_is_kept_and_marked_and_the_others_still_run(folder, capsys):
    assert run(folder, "failing", "table") == 1
    failing, table = sorted(folder.iterdir())
    text = failing.read_text()
    assert text.startswith("# FAILED: failing, ")
    assert "- Result: failed with exit code 1 after " in text
    assert "so far, so good" in text
    assert text.endswith("\n\nOutput on stderr:\n\n```\nno luck\n```\n")
    assert table.read_text().startswith("# table, ")
    assert "failing: failed with exit code 1" in capsys.readouterr().err


def test_an_unknown_name_is_told_the_nearest_before_anything_runs(folder, capsys):
    assert run(folder, "plain", "tabel") == 2
    assert capsys.readouterr().err == (
        "There is no benchmark 'tabel'. Did you mean 'table'? `xlstm-jax bench --list` lists all.\n"
    )
    assert not folder.exists()


def test_results_that_cannot_be_written_are_an_error_without_a_traceback(folder, capsys):
    folder.touch()
    assert run(folder, "plain") == 1
    assert capsys.readouterr().err == f"{folder}: File exists.\n"


def is_alive(process_id):
    """Tell whether a process runs; one that has ended stays known until somebody asks for its exit code."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_an_interrupt_ends_the_script_and_all_it_has_started(folder):
    code = (
        "import signal, sys; from pathlib import Path; from xlstm_jax.cli import bench, main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background takes away\n"
        "bench.SCRIPTS, bench._describe_machine = Path(sys.argv[1]), dict\n"
        "sys.exit(main.main(['bench', '--output', sys.argv[2], 'endless']))"
    )
    command = [sys.executable, "-c", code, str(bench.SCRIPTS), str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "== endless\n"
        inner = int(process.stdout.readline())
        try:
            assert is_alive(inner)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            deadline = time.monotonic() + 10
            while is_alive(inner):
                assert time.monotonic() < deadline, "what the script had started runs on"
                time.sleep(0.05)
        finally:
            process.kill()
            if is_alive(inner):
                os.kill(inner, signal.SIGKILL)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "Stopped; the running benchmark wrote no results."
    assert not folder.exists()


def test_the_machine_is_described_by_versions_devices_processor_and_commit():
    facts = bench._describe_machine()
    assert list(facts)[:3] == ["Versions", "Devices", "CPU"]
    assert re.fullmatch(rf"xlstm_jax {xlstm_jax.__version__}, jax \S+, jaxlib \S+, Python \S+", facts["Versions"])
    assert facts["Devices"] == "8 × cpu"
    assert facts["CPU"].endswith(" cores")
    assert re.fullmatch(r"[0-9a-f]{12}(, with changes)?", facts.get("Commit", "0" * 12))


def test_results_are_kept_even_where_jax_does_not_start(monkeypatch):
    monkeypatch.setattr(bench, "DESCRIBE", "raise SystemExit(1)")
    assert bench._describe_machine()["Devices"] == "JAX does not start"


def test_an_installed_package_brings_its_benchmarks(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "xlstm_jax.cli.main", "bench", "--list"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed"), "COLUMNS": "200"}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert [line.split()[0] for line in shown.splitlines()] == [
        path.stem for path in sorted(bench.SCRIPTS.glob("*.py"))
    ]
    code = "from xlstm_jax.cli import bench; print(bench.SCRIPTS, bench.RESULTS)"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert printed.split() == [str(tmp_path / "installed" / "xlstm_jax" / "benchmarks"), "benchmark-results"]
