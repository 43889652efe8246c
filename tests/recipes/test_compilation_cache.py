"""Compiled programs are kept for later processes: privately, within a limit, and while others write too."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from processes import TESTS, run_two

from xlstm_jax.recipes import compilation_cache
from xlstm_jax.recipes.compilation_cache import (
    FOLDER_VARIABLE,
    default_folder,
    describe_cache,
    enable_compilation_cache,
    prepare_folder,
)

pytestmark = pytest.mark.slow

SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_enable_compilation_cache": True,
}
"""JAX's defaults."""


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU, JAX's default settings, and a cache folder of this test; the settings of other tests come back."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for name, value in SETTINGS.items():
        monkeypatch.delenv(name.upper(), raising=False)
        jax.config.update(name, value)
    yield monkeypatch
    for name, value in before.items():
        jax.config.update(name, value)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def start(folder: Path, num_programs: int, **environment: str) -> subprocess.Popen:
    """Start a process that compiles some programs with a cache below a folder, which keeps even quick ones."""
    environment = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **environment}
    inherited = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(TESTS / "recipes/one_of_many.py"), str(num_programs)],
        env={**inherited, FOLDER_VARIABLE: str(folder), "PYTHONPATH": str(TESTS.parent), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, int]:
    """Wait for a process that has to succeed, and return its hits and writes."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    words = output.split()
    return int(words[1]), int(words[3])


def test_the_cache_is_a_private_folder_with_a_limit(gpu, tmp_path):
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compilation")
    assert jax.config.jax_compilation_cache_max_size == compilation_cache.MAX_BYTES
    assert mode(tmp_path / "compilation") == 0o700


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        (FOLDER_VARIABLE, "/scratch/me", "/scratch/me/compilation"),
        ("XDG_CACHE_HOME", "/scratch/caches", "/scratch/caches/xlstm_jax/compilation"),
        ("HOME", "/home/me", "/home/me/.cache/xlstm_jax/compilation"),
    ],
)
def test_the_folder_follows_the_environment(monkeypatch, variable, value, folder):
    for name in (FOLDER_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert default_folder() == Path(folder)


def test_a_cpu_has_no_cache(gpu):
    gpu.setattr(jax, "default_backend", lambda: "cpu")
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert describe_cache().startswith("off: it is used on GPUs only")


@pytest.mark.parametrize(
    ("name", "value"), [("jax_compilation_cache_dir", "elsewhere"), ("jax_enable_compilation_cache", False)]
)
def test_jaxs_own_settings_come_first(gpu, name, value):
    jax.config.update(name, value)
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    enable_compilation_cache()
    assert {name: getattr(jax.config, name) for name in SETTINGS} == before


def test_a_limit_of_the_user_stays(gpu):
    jax.config.update("jax_compilation_cache_max_size", 12345)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_max_size == 12345
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7.0


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("JAX_COMPILATION_CACHE_MAX_SIZE", "-1", "jax_compilation_cache_max_size"),
        ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1", "jax_persistent_cache_min_compile_time_secs"),
    ],
)
def test_a_default_of_jax_that_the_user_asks_for_stays(gpu, monkeypatch, variable, value, name):
    monkeypatch.setenv(variable, value)
    enable_compilation_cache()
    assert getattr(jax.config, name) == SETTINGS[name]


def test_a_file_that_another_process_removes_at_the_same_time_is_no_problem(tmp_path, monkeypatch):
    folder = tmp_path / "compilation"
    prepare_folder(folder)
    found = [*folder.iterdir(), folder / ".shared-that-is-gone"]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(found))
    prepare_folder(folder)


def test_a_folder_that_others_can_write_to_becomes_private(gpu, tmp_path):
    (tmp_path / "compilation").mkdir()
    (tmp_path / "compilation").chmod(0o777)
    enable_compilation_cache()
    assert mode(tmp_path / "compilation") == 0o700
    assert jax.config.jax_compilation_cache_dir is not None


def test_a_folder_of_another_user_is_refused_with_a_warning(gpu, caplog):
    enable_compilation_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    gpu.setattr(os, "getuid", lambda: 4321)
    enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    assert "belongs to another user, whose programs would be executed" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_warning(gpu, tmp_path, caplog):
    (tmp_path / "file").touch()
    gpu.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        enable_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    (warning,) = caplog.messages
    assert warning.startswith("Compiled programs are not kept, because")
    assert f"Set {FOLDER_VARIABLE} to another folder" in warning


def test_an_entry_that_a_killed_process_left_incomplete_is_removed(tmp_path):
    for name in ("whole-cache", "whole-atime", "half-cache", "orphan-atime"):
        (tmp_path / name).write_bytes(b"12345678")
    prepare_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"whole-cache", "whole-atime", ".lockfile"}


def test_the_oldest_autotuning_results_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MAX_AUTOTUNING_FILES", 2)
    folder = tmp_path / compilation_cache.AUTOTUNING_FOLDER
    folder.mkdir()
    for age, name in enumerate(["new", "newer", "old"][::-1]):
        (folder / name).touch()
        os.utime(folder / name, (1000 + age, 1000 + age))
    os.utime(folder / "old", (1, 1))
    prepare_folder(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"new", "newer"}


def test_doctor_is_told_the_place_and_the_size(gpu, tmp_path):
    enable_compilation_cache()
    (tmp_path / "compilation/a-cache").write_bytes(bytes(2**29))
    assert describe_cache() == f"{tmp_path}/compilation: 1 programs, 0.50 of 2.0 GiB"


def test_processes_share_a_cache_while_they_fill_it(tmp_path):
    counts = [finish(process) for process in [start(tmp_path, 12) for _ in range(3)]]
    num_kept = len(list((tmp_path / "compilation").glob("*-cache")))
    assert num_kept >= 12
    assert num_kept <= sum(writes for _, writes in counts)
    hits, writes = finish(start(tmp_path, 12))
    assert hits >= 12
    assert writes == 0


def test_the_cache_stays_within_its_limit(tmp_path):
    finish(start(tmp_path, 1))
    size = sum(path.stat().st_size for path in (tmp_path / "compilation").glob("*-cache"))
    finish(start(tmp_path, 12, JAX_COMPILATION_CACHE_MAX_SIZE=str(size)))
    assert sum(path.stat().st_size for path in (tmp_path / "compilation").glob("*-cache")) <= size


def test_the_processes_of_a_run_share_a_folder_that_all_see(tmp_path):
    codes, output = run_two(TESTS / "recipes/cache_of_two.py", str(tmp_path), str(tmp_path))
    assert codes == [0, 0], output
    assert [f"process {index}: {tmp_path}/compilation" in output for index in range(2)] == [True, True]
    assert not list((tmp_path / "compilation").glob(".shared-*"))


def test_processes_that_see_different_folders_have_no_cache(tmp_path):
    codes, output = run_two(TESTS / "recipes/cache_of_two.py", str(tmp_path / "a"), str(tmp_path / "b"))
    assert codes == [0, 0], output
    assert [f"process {index}: None" in output for index in range(2)] == [True, True]
    assert "processes of this run on other hosts do not see it" in output
