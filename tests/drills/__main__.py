"""Run drills by hand: `make drills`, or `PYTHONPATH=.:tests python -m drills kills --count 100`.

Prints what becomes of every kill, a table of all cases by their outcomes and a line for each fault. Exits with 1 if
there is a fault.
"""

import argparse
import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path

DRILLS = {
    "commands": "bad commands",
    "bad_calls": "wrong arguments of the Python API",
    "bad_sources": "bad files of text",
    "bad_shards": "damaged shards and manifests",
    "bad_tokenizers": "damaged tokenizers",
    "damage": "damaged checkpoint directories",
    "kills": "killed runs; about ten seconds each",
}
"""All drills and what they do, from the quickest to the slowest."""
DEFAULT_COUNT = {"damage": 120, "kills": 100}


def main() -> int:
    """Run the drills that were named, or all, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__.splitlines()[0])
    summary = "; ".join(f"{name}: {what}" for name, what in DRILLS.items())
    parser.add_argument("drills", nargs="*", metavar="drill", help=f"which drills to run, all by default: {summary}")
    parser.add_argument("--count", type=int, help="how many cases of each; by default, all, and 100 kills")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other cases")
    parser.add_argument("--folder", type=Path, help="where to work; by default, in a temporary folder")
    options = parser.parse_args()
    if unknown := set(options.drills) - DRILLS.keys():
        parser.error(f"there is no drill {', '.join(sorted(unknown))}: choose from {', '.join(DRILLS)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    from drills.outcomes import faults, show, table

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax describes damage in its own way too.
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.drills or DRILLS:
            module = importlib.import_module(f"drills.{name}")
            folder = (options.folder or Path(temporary)) / name
            count = options.count or DEFAULT_COUNT.get(name, sys.maxsize)
            results[name] = module.drill(folder, count=count, seed=options.seed)
    show(table(results))
    return int(any(faults(each) for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
