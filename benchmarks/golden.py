"""Compare the golden curves of two commits on this machine, bit by bit; or replace the curves that tests compare with.

    python benchmarks/golden.py                  # the working tree with the curves in tests/golden/curves
    python benchmarks/golden.py --against REV    # the working tree with a commit: all bits have to be the same
    python benchmarks/golden.py --write          # replace the curves in tests/golden/curves

Refactoring must not change a bit. Replace the curves only in a commit that changes numerics on purpose, and say in its
body which change moved them and by how much: the first command prints the largest difference of each curve.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "golden" / "curves.py"
GOLDEN = ROOT / "tests" / "golden" / "curves"
NAMES = ("xlstm", "llama")
TOLERANCE = 1e-5
"""Relative; what machines may differ by. Two commits on one machine may not differ at all."""


def train(package: Path, output: Path) -> dict[str, dict[str, list[float]]]:
    """Train both runs with the package in a folder, and return the curves by name."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    output.mkdir()
    with (output / "log").open("wb") as log:
        code = subprocess.run([sys.executable, SCRIPT, output], env=environment, stdout=log, stderr=log).returncode
    if code != 0:
        sys.exit(f"Training with the package in {package} failed:\n{(output / 'log').read_text()[-2000:]}")
    return {name: read(output / f"{name}.json") for name in NAMES}


def read(file: Path) -> dict[str, list[float]]:
    """Read the curves of a run."""
    return json.loads(file.read_text(encoding="utf-8"))


def check_out(revision: str, folder: Path) -> Path:
    """Write the files of a commit to a folder."""
    folder.mkdir()
    archive = folder / "files.tar"
    with archive.open("wb") as file:
        subprocess.run(["git", "archive", revision, "xlstm_jax"], cwd=ROOT, stdout=file, check=True)
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder


def compare(ours: Mapping[str, list[float]], others: Mapping[str, list[float]], name: str, tolerance: float) -> bool:
    """Print how much the curves of a run differ, and return whether they agree."""
    agrees = True
    for metric, values in others.items():
        if len(ours[metric]) != len(values):
            print(f"{name:6} {metric:16} has {len(ours[metric])} values instead of {len(values)}")
            agrees = False
            continue
        difference = float(np.max(np.abs(np.divide(ours[metric], values) - 1)))
        is_close = difference <= tolerance
        print(f"{name:6} {metric:16} largest relative difference {difference:.1e}{'' if is_close else '  DIFFERS'}")
        agrees &= is_close
    return agrees


def main() -> int:
    """Train, compare, and return the exit code: 1 if the curves differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--against", metavar="REV", help="the commit to compare with, bit by bit")
    choice.add_argument("--write", action="store_true", help="replace the golden curves")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ours = train(ROOT, folder / "ours")
        if args.against is None:
            others = {name: read(GOLDEN / f"{name}.json") for name in NAMES if (GOLDEN / f"{name}.json").is_file()}
        else:
            others = train(check_out(args.against, folder / "package"), folder / "theirs")
        tolerance = TOLERANCE if args.against is None else 0.0
        agrees = [compare(ours[name], curves, name, tolerance) for name, curves in others.items()]
        if args.write:
            for name, curves in ours.items():
                (GOLDEN / f"{name}.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
            return 0
    return 0 if all(agrees) else 1


if __name__ == "__main__":
    sys.exit(main())
