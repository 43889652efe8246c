"""Requests of the evaluation harness lm-eval as rows of equal length, in which only the texts are targets."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from xlstm_jax.dataset.tokenizers.loading import load_tokenizer


class HFTokenizeLogLikelihood:
    """Reads the texts of requests."""

    @staticmethod
    def map(requests: Sequence[Any]) -> grain.MapDataset:
        """Return the `prefix` and the `text` of each request; see `split_request`."""
        return grain.MapDataset.source([split_request(request) for request in requests])


class HFTokenizeLogLikelihoodRolling:
    """Tokenises requests into rows of `max_length` tokens.

    A longer document is split into consecutive windows; the last window is moved left until it is full. Every token of
    the text is a target in exactly one window, and no token of the prefix is a target; windows without targets are
    dropped. Documents count from 1, and rows of document 0 pad the last batch.

    Args:
        tokenizer_path: The tokenizer, as for `load_tokenizer`.
        max_length: The length of a row.
        batch_size: The number of rows is padded to a multiple of it.
        hf_access_token: The token for the Hugging Face hub.
        tokenizer_cache_dir: The folder of downloaded tokenizers.
        add_bos_token: Start each document with `bos_token_id`.
        add_eos_token: End each document with `eos_token_id`, which is then a target too.
        bos_token_id: By default, that of the tokenizer.
        eos_token_id: By default, that of the tokenizer.
    """

    def __init__(
        self,
        tokenizer_path: str,
        max_length: int,
        batch_size: int = 1,
        hf_access_token: str | None = "",
        tokenizer_cache_dir: str | Path | None = None,
        add_bos_token: bool = True,
        add_eos_token: bool = False,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ):
        self.max_length = max_length
        self.batch_size = batch_size
        self.tokenizer = load_tokenizer(
            tokenizer_path,
            add_bos=False,
            add_eos=False,
            hf_access_token=hf_access_token or None,
            cache_dir=tokenizer_cache_dir,
        )
        bos_token_id, eos_token_id = document_tokens(self.tokenizer, bos_token_id, eos_token_id)
        self._before = [bos_token_id] if add_bos_token else []
        self._after = [eos_token_id] if add_eos_token else []

    def map(self, requests: Sequence[Any]) -> grain.MapDataset:
        """Return the rows of all requests, each a dictionary with the fields of `LLMIndexedBatch`."""
        texts = HFTokenizeLogLikelihood.map(requests)
        windows = [
            {**window, "doc_idx": index, "seq_idx": number}
            for index, text in enumerate(texts, start=1)
            for number, window in enumerate(self._windows(**text))
        ]
        padding = {"prefix_tokens": [], "all_tokens": [], "doc_idx": 0, "seq_idx": 0}
        windows += [padding] * (-len(windows) % self.batch_size)
        return grain.MapDataset.source(windows).map(lambda window: self.simple_array(**window))

    def simple_array(
        self, *, prefix_tokens: Sequence[int], all_tokens: Sequence[int], doc_idx: int, seq_idx: int
    ) -> dict[str, np.ndarray]:
        """Make a row: each token but the last is an input, and the next token is its target.

        Args:
            prefix_tokens: The leading tokens that are not targets.
            all_tokens: All tokens, including the prefix.
            doc_idx: The document.
            seq_idx: The window of the document.

        Returns:
            The row, padded to `max_length`.
        """
        tokens = np.array(all_tokens, np.int32)
        columns = np.arange(self.max_length, dtype=np.int32)
        is_input = columns < len(tokens) - 1
        is_target = is_input & (columns >= len(prefix_tokens) - 1)
        position = np.where(is_input, columns, np.int32(0))
        return {
            "inputs": self._padded(tokens[:-1]),
            "targets": self._padded(tokens[1:]),
            "inputs_position": position,
            "targets_position": position,
            "inputs_segmentation": is_input.astype(np.int32),
            "targets_segmentation": is_target.astype(np.int32),
            "document_idx": np.array(doc_idx, np.int32),
            "sequence_idx": np.array(seq_idx, np.int32),
        }

    def _windows(self, prefix: str, text: str) -> Iterator[dict[str, list[int]]]:
        """Yield the tokens of each window, and its leading tokens that are not targets."""
        before = [*self._before, *self._tokenize(prefix)["input_ids"]]
        tokens = [*before, *self._tokenize(text)["input_ids"], *self._after]
        num_inputs = max(len(tokens) - 1, 0)
        first_target = max(len(before) - 1, 0)
        for begin in range(0, max(num_inputs, 1), self.max_length):
            end = min(begin + self.max_length, num_inputs)
            if end > first_target or end == num_inputs:
                start = max(end - self.max_length, 0)
                yield {
                    "prefix_tokens": tokens[start : max(begin, first_target) + 1],
                    "all_tokens": tokens[start : end + 1],
                }

    def _tokenize(self, example: str) -> Mapping[str, Any]:
        return self.tokenizer(example, add_special_tokens=False)

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        return np.pad(tokens, (0, self.max_length - len(tokens)))


def split_request(request: Any) -> dict[str, str]:
    """Return the given part of a request, `prefix`, and the part to predict, `text`.

    Trailing white space of a prefix is moved to the text, as in lm-eval: words are tokenized with the space before
    them.

    Args:
        request: An `Instance` of lm-eval, with the arguments (context, continuation) or (document,).
    """
    *context, text = request.args
    prefix = "".join(context)
    stripped = prefix.rstrip()
    return {"prefix": stripped, "text": prefix[len(stripped) :] + text}


def document_tokens(
    tokenizer: Any, bos_token_id: int | None = None, eos_token_id: int | None = None
) -> tuple[int, int]:
    """Return the tokens that start and end a document: the given ones, or those of the tokenizer.

    If only one of them exists, it is used for both.
    """
    bos_token_id = tokenizer.bos_token_id if bos_token_id is None else bos_token_id
    eos_token_id = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    tokens = [token for token in (bos_token_id, eos_token_id) if token is not None]
    if not tokens:
        raise ValueError(
            "The tokenizer has neither a bos_token_id nor an eos_token_id, so nothing to begin documents with: set one."
        )
    return tokens[0], tokens[-1]
