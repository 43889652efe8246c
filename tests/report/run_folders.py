"""Folders as runs leave them, without a run."""

import json
import math

REFERENCES = {"gzip": 2.11, "xz": 1.6}


def write_rows(folder, mode, rows):
    """Write the metrics of a mode, by step."""
    path = folder / f"file_logs/metrics_{mode}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"log_step": step, "log_epoch": 1, **row}) + "\n" for step, row in rows.items()))
    return path


def write_run(folder, *, num_steps=400, lr=0.01, sample=" and more"):
    """Write a run that learns, with all that a run can leave."""
    write_rows(folder, "train", {step: _train_row(step, lr) for step in range(1, num_steps + 1)})
    every = max(num_steps // 10, 1)
    write_rows(folder, "val", {step: _learnt(step, "") for step in range(every, num_steps + 1, every)})
    write_rows(folder, "val_extended", {step: {"recall": step / 1000} for step in range(every, num_steps + 1, every)})
    write_rows(folder, "dataset", {0: {"num_train_steps": 1000}})
    write_rows(folder, "model", {0: {"num_params": 1234}})
    write_rows(folder, "parallel", {0: {"num_devices": 8}})
    config = {"optimizer": {"lr": lr, "name": "adamw"}, "seed": 0}
    (folder / "file_logs/config.json").write_text(json.dumps(config))
    (folder / "samples").mkdir()
    for step in (100, 200):
        (folder / f"samples/step_{step}.txt").write_text(f"--- 'Once'\n{sample}\n\n--- 'It\\'s'\n at {step}\n")
    start = {
        "step": 0,
        "time": "2025-01-01T00:00:00+00:00",
        "git": {"commit": "abc", "dirty": True},
        "status": "success",
    }
    (folder / "environment.json").write_text(json.dumps({"starts": [start], "references": REFERENCES}))
    parameter = {"name": "layer.kernel", "shape": [2, 3], "dtype": "float32", "spec": [["dp", "fsdp"], None], "size": 6}
    (folder / "parameters.json").write_text(json.dumps([parameter]))
    return folder


def _learnt(step, postfix):
    loss = 1 + 4 * math.exp(-step / 100) + 0.05 * math.sin(7 * step)
    numbers = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2), "accuracy": 1 / loss}
    return {f"{name}{postfix}": number for name, number in numbers.items()}


def _train_row(step, lr):
    seconds = 10 + step
    return {
        **_learnt(step, "_mean"),
        "lr": lr / step,
        "grad_norm_mean": 1 + 1 / step,
        "param_norm": 5 + step / 100,
        "tokens_seen": 1000 * step,
        "tokens_per_second": 1000 + step % 7,
        "mfu": 0.4,
        "mfu_6n": 0.5,
        "step_time": 1 + 0.01 * (step % 7),
        "device_memory_gib": 1.5,
        "compile_time": 10.0,
        "bad_steps": 0,
        "goodput": step / seconds,
        "lost_compile": 10 / seconds,
        "lost_data": 0.0,
    }
