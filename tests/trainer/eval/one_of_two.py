"""One of two processes that answer requests together.

python one_of_two.py INDEX PORT FOLDER
"""

import json
import os
import sys
from pathlib import Path

# Of the flags that the tests compile with, only the number of devices is another one here: the last one counts.
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2"])

import jax
from trainer.eval.requests import CONTEXTS, REQUESTS, evaluation_on, request


def main():
    """Write down the answers."""
    index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    evaluation = evaluation_on({"dp": 2, "fsdp": 2})
    answers = {
        "scores": evaluation.loglikelihood([request(*args) for args in REQUESTS]),
        "texts": evaluation.generate_until([request(context, {"max_gen_toks": 10}) for context in CONTEXTS[1:-1]]),
    }
    (folder / f"{index}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
