"""Small sets of documents for tests; workers import this file too."""

import os
import time
from pathlib import Path

import numpy as np

from xlstm_jax.dataset.shards.records import ShardError


class ListedDocuments:
    """Documents from a list.

    Args:
        rows: Their tokens.
        num_tokens: What the set says of its size.
    """

    def __init__(self, rows, num_tokens=None):
        self.rows = [np.asarray(row, np.int32) for row in rows]
        self.num_tokens = num_tokens

    def __len__(self):
        return len(self.rows)

    def read(self, indices):
        return [self.rows[index] for index in indices]

    def describe(self):
        return {"documents": len(self.rows), "tokens": sum(map(len, self.rows))}


class FaultyDocuments(ListedDocuments):
    """A list of documents of which some cannot be read."""

    def __init__(self, rows, faulty):
        super().__init__(rows)
        self.faulty = faulty

    def read(self, indices):
        for index in indices:
            if index in self.faulty:
                raise ValueError(f"shard_{index}.arecord is gone")
        return super().read(indices)


class MissingDocuments(FaultyDocuments):
    """A list of documents of which some lie in a shard that is gone."""

    def read(self, indices):
        try:
            return super().read(indices)
        except ValueError as error:
            raise ShardError(str(error)) from error


def random_documents(seed, num_documents, max_length=30, first_token=1):
    """Return documents of all lengths from 1 on; every token says which document and which place it is from."""
    lengths = np.random.default_rng(seed).integers(1, max_length, num_documents, endpoint=True)
    return [first_token + 1000 * index + np.arange(length) for index, length in enumerate(lengths)]


def do_task(task):
    """Do what a test of workers asks for."""
    match task:
        case "die":
            os.kill(os.getpid(), 9)
        case "fail":
            raise KeyError("no such thing")
        case "sleep":
            time.sleep(60)
        case Path():
            task.write_text(str(os.getpid()))
            time.sleep(60)
    return task, os.getpid()
