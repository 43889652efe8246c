"""The batches of a run, epoch after epoch."""

from collections.abc import Iterator
from typing import Any

from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.data_module import DataIterator
from xlstm_jax.trainer.token_check import TokenCheck


class BatchStream:
    """Iterates over a loader, and restarts it once it is exhausted; an epoch may end before the loader does.

    Args:
        loader: The loader.
        tokens: Checks the token ids of the batches.
    """

    def __init__(self, loader: DataIterator, tokens: TokenCheck):
        self.loader: Any = loader
        self._tokens = tokens
        self._iterator: Iterator | None = None

    def restart(self) -> None:
        """Call `iter` on the loader again, after it was set to another position."""
        self._iterator = None

    def next(self, *, begins_epoch: bool, at_boundary: bool = False) -> Batch | None:
        """Return the next batch, or `None` at the end of the loader.

        Args:
            begins_epoch: Whether this is the first batch of an epoch, for which an exhausted loader is restarted.
            at_boundary: Whether the previous epoch is known to be over. Then a loader that a checkpoint has set to its
                end is restarted too; otherwise this may be the end of the epoch in which the run was stopped.
        """
        is_new = self._iterator is None
        iterator = self._iterator = self._iterator or self._tokens.check_batches(iter(self.loader), self.loader)
        batch = next(iterator, None)
        if batch is None:
            self._iterator = None
            if begins_epoch and (at_boundary or not is_new):
                return self.next(begins_epoch=False)
        return batch
