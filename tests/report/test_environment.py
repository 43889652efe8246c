"""What a run ran on is written down, start by start."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from xlstm_jax.report.environment import (
    command_as_typed,
    describe_environment,
    describe_git,
    describe_parameters,
    record_end,
    record_start,
)
from xlstm_jax.version import __version__


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_versions_devices_and_the_command_are_described():
    found = describe_environment()
    assert found["packages"]["xlstm_jax"] == __version__
    assert found["packages"]["jax"] == jax.__version__
    assert found["devices"] == {"kind": "cpu", "count": 8, "processes": 1}
    assert found["command"] == command_as_typed(sys.orig_argv)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        ("/env/bin/python /env/bin/xlstm-jax train a=1", "xlstm-jax train a=1"),
        ("/env/bin/python -m xlstm_jax.cli.main train -m", "xlstm-jax train -m"),
        ("/env/bin/python3 -W error mine/train.py --fast", "python3 -W error mine/train.py --fast"),
    ],
)
def test_the_command_is_kept_as_it_was_typed(argv, typed):
    assert " ".join(command_as_typed(argv.split())) == typed


def test_a_commit_is_dirty_once_a_file_that_git_knows_has_changed(tmp_path):
    assert describe_git(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "unknown").write_text("b")
    clean = describe_git(tmp_path)
    assert clean is not None
    assert clean["dirty"] is False
    assert len(clean["commit"]) == 40
    (tmp_path / "file").write_text("b")
    assert describe_git(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert describe_git() is None


def test_every_parameter_is_described_with_its_split():
    mesh = make_mesh(fsdp=2)
    split = jax.device_put(jnp.zeros((4, 3)), NamedSharding(mesh, P("fsdp")))
    params = {
        "b": {"kernel": split},
        "a": nn.Partitioned(jnp.zeros((2, 2), jnp.bfloat16), names=(("dp", "fsdp"), None)),
        "scale": jnp.zeros(()),
    }
    assert describe_parameters(params) == [
        {"name": "a", "shape": [2, 2], "dtype": "bfloat16", "spec": [["dp", "fsdp"], None], "size": 4},
        {"name": "b.kernel", "shape": [4, 3], "dtype": "float32", "spec": ["fsdp", None], "size": 12},
        {"name": "scale", "shape": [], "dtype": "float32", "spec": [], "size": 1},
    ]


def test_a_run_that_goes_on_remembers_its_earlier_starts(tmp_path):
    record_start(tmp_path, step=0, references={"gzip": 2.0, "xz": 1.5})
    record_end(tmp_path, status="interrupted")
    record_start(tmp_path, step=30, references={"gzip": 2.5})
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert [(start["step"], start["status"]) for start in environment["starts"]] == [(0, "interrupted"), (30, None)]
    assert environment["references"] == {"gzip": 2.5, "xz": 1.5}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"starts": 3, "references": {}}'])
def test_a_broken_record_does_not_keep_a_run_from_starting(tmp_path, content):
    (tmp_path / "environment.json").write_text(content)
    record_start(tmp_path, step=0, references={})
    assert len(json.loads((tmp_path / "environment.json").read_text())["starts"]) == 1
