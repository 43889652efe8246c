"""Check that all token ids of the data are within the vocabulary of the model."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import TokenRange, find_token_ranges
from xlstm_jax.dataset.input_pipeline_interface import DataIterator as PackagedIterator
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary, check_vocabularies


class TokenCheck:
    """Checks that the token ids of data are within the vocabulary of a model.

    At the start of a run, before data is read, it compares the vocabularies of loaders and of callbacks that tokenise
    texts. Then the host checks each batch. The loaders of this package do so before a batch is copied to the devices.
    Batches of other loaders are checked if they are NumPy arrays or in host memory; of batches on accelerators, only
    the first one of each pass is checked, as the host has to wait for each check.

    Args:
        num_ids: The vocabulary size of the model; `None` if the model has none: nothing is checked.
    """

    def __init__(self, num_ids: int | None):
        self.num_ids = num_ids

    def check_data(self, loaders: Mapping[str, Any], vocabularies: Mapping[str, Vocabulary | None]) -> None:
        """Raise unless the model has all token ids of the loaders, and all texts use the same tokenizer.

        Args:
            loaders: Loaders by name; each may be one loader, several by name, or `None`.
            vocabularies: The vocabularies of tools that tokenise texts.
        """
        found = {name: getattr(loader, "vocabulary", None) for name, loader in _flatten(loaders)}
        known = {name: vocabulary for name, vocabulary in found.items() if isinstance(vocabulary, Vocabulary)}
        check_vocabularies(self.num_ids, {**known, **vocabularies})

    def check_batches(self, batches: Iterator, loader: Any) -> Iterator[Any]:
        """Yield batches, each after checking its token ids.

        Args:
            batches: The batches.
            loader: The loader that they come from.

        Raises:
            ConfigError: A batch has a token id that the model does not have.
        """
        is_first = True
        while (batch := next(batches, None)) is not None:
            self.check_batch(batch, loader, is_first=is_first)
            is_first = False
            yield batch

    def check_batch(self, batch: Any, loader: Any, *, is_first: bool = True) -> None:
        """Check the token ids of a batch; see `check_batches`."""
        if self.num_ids is None:
            return
        if isinstance(loader, PackagedIterator):
            ranges = loader.token_ranges
        elif is_first or all(map(_is_on_host, jax.tree.leaves(batch))):
            ranges = find_token_ranges(batch)
        else:
            return
        for name, (smallest, largest) in ranges.items():
            self._check_range(f"The {name} of a batch", smallest, largest)

    def check_ids(self, name: str, ids: Any) -> None:
        """Check some token ids.

        Args:
            name: The name of their source, for messages.
            ids: The ids, as an array or a sequence of numbers.
        """
        if self.num_ids is not None and np.size(ids):
            self._check_range(name, int(np.min(ids)), int(np.max(ids)))

    def _check_range(self, name: str, smallest: int, largest: int) -> None:
        assert self.num_ids is not None
        for token in TokenRange(smallest, largest):
            if not 0 <= token < self.num_ids:
                raise ConfigError(
                    f"{name} hold the token id {token}, but the model's vocab_size is {self.num_ids}, so its ids are 0 "
                    f"to {self.num_ids - 1}: use data of the model's tokenizer, or another vocab_size."
                )


def _flatten(loaders: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, loader in loaders.items():
        if isinstance(loader, Mapping):
            yield from ((f"{name}/{part}", each) for part, each in loader.items())
        else:
            yield name, loader


def _is_on_host(array: Any) -> bool:
    return not isinstance(array, jax.Array) or all(device.platform == "cpu" for device in array.sharding.device_set)
