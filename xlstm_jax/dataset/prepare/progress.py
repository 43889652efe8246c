"""The progress bar of `prepare`."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from xlstm_jax.dataset.prepare.groups import Group
from xlstm_jax.dataset.shards.manifest import Shard


class ProgressBar:
    """Progress, speed and remaining time of a split, shown only in a terminal."""

    def __init__(self, name: str, num_bytes: int):
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %  {task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(name, total=num_bytes, speed="")
        self._start = time.monotonic()
        self._documents = self._tokens = self._bytes = 0

    def advance(self, shard: Shard, group: Group) -> None:
        """Count a shard that has been written."""
        self._documents += shard.num_documents
        self._tokens += shard.num_tokens
        self._bytes += group.texts.num_bytes
        seconds = time.monotonic() - self._start
        speed = (
            f"{self._documents:,} documents, {self._bytes / seconds / 1e6:.1f} MB/s, "
            f"{self._tokens / seconds / 1e6:.2f} million tokens/s"
        )
        self._progress.update(self._task, completed=group.num_bytes_read, speed=speed)

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
