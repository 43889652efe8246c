"""What commands print to be copied can be copied."""

import shlex
from pathlib import Path
from types import SimpleNamespace

from xlstm_jax.cli.header import describe_end
from xlstm_jax.cli.screen import as_command


def test_a_command_is_what_a_shell_reads_as_its_words():
    words = ["resume", Path("my runs/größe"), "callbacks=[default]", "name=it's mine"]
    assert shlex.split(as_command(*words)) == ["xlstm-jax", *map(str, words)]


def test_the_commands_after_a_run_can_be_copied(tmp_path, monkeypatch, unchecked_shapes):
    monkeypatch.chdir(tmp_path)
    callback = SimpleNamespace(prompts=["It's a\nlong „way“ "])
    run = SimpleNamespace(
        folder=tmp_path / "my runs/größe",
        trainer=SimpleNamespace(status="success", global_step=4),
        config=SimpleNamespace(name="mine", num_train_steps=4, trainer=SimpleNamespace(callbacks=[callback])),
    )
    shown = shlex.split(describe_end(run).split("Next:\n")[1])
    assert shown[:5] == ["xlstm-jax", "generate", "my runs/größe", "--prompt", callback.prompts[0]]
    assert shown[5:9] == ["xlstm-jax", "resume", "my runs/größe", "num_train_steps=8"]
