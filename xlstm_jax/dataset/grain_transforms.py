"""Per-host toolbox on grain: the transforms from a record to a batch.

Tokens travel in dictionaries: `inputs` and `targets`, each with a `_segmentation` that counts the documents of a row
from 1 and is 0 for padding, and a `_position` that counts the tokens of each document from 0.
"""

# A transform names its argument after what it takes, where grain says `element`; grain passes it by position.
# pyright: reportIncompatibleMethodOverride=false

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

TOKEN_KEYS = ("inputs", "targets")


class ParseArrayRecords(grain.transforms.Map):
    """Reads a record as UTF-8 text."""

    def __init__(self, column_name: str):
        self.column_name = column_name

    def map(self, data: bytes) -> dict[str, str]:
        """Return the text under the name of the column."""
        return {self.column_name: data.decode("utf-8")}


class ParseTokenizedArrayRecords(grain.transforms.Map):
    """Reads a record as tokens, four bytes each, least significant byte first."""

    def __init__(self, column_name: str):
        self.column_name = column_name

    def map(self, data: bytes) -> dict[str, list[int]]:
        """Return the tokens under the name of the column."""
        return {self.column_name: self.bytestring_to_sequence(data)}

    @staticmethod
    def sequence_to_bytestring(sequence: Sequence[int] | np.ndarray) -> bytes:
        """Write tokens as a record."""
        tokens = np.asarray(sequence, np.int64)
        too_large = tokens[tokens != tokens.astype(np.int32)]
        if too_large.size:
            raise ValueError(f"{too_large[0]} is not a token: a record has four bytes for each.")
        return tokens.astype("<i4").tobytes()

    @staticmethod
    def bytestring_to_sequence(bytestring: bytes) -> list[int]:
        """Read the tokens of a record."""
        if len(bytestring) % 4:
            raise ValueError(
                f"A record of {len(bytestring)} bytes holds no tokens of four bytes each: is it text? Then set "
                "tokenize_data=True."
            )
        return np.frombuffer(bytestring, "<i4").tolist()


@dataclasses.dataclass
class HFTokenize(grain.transforms.Map):
    """Tokenises a text with a Hugging Face tokenizer.

    The tokenizer is created for the first text: in the worker, not before it starts.
    """

    create_tokenizer_fn: Callable[..., Any]
    """Returns the tokenizer; called without arguments."""
    column_name: str = "text"
    max_length: int | None = None
    """The tokenizer truncates longer documents."""
    add_eod: bool = True
    """End a document with `eod_token_id`, if it is shorter than `max_length`."""
    eod_token_id: int | None = None
    """By default, the tokenizer's token for the end of a sequence."""
    _tokenizer: Any = dataclasses.field(default=None, init=False, repr=False)

    def map(self, data: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return the tokens under the name of the column."""
        tokens = list(self._tokenize(data[self.column_name])["input_ids"])
        if self.add_eod:
            tokens = _with_end(tokens, self._end_of_document(), self.max_length)
        return {self.column_name: tokens}

    def _lazy_init(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self.create_tokenizer_fn()
        return self._tokenizer

    def _tokenize(self, example: str) -> Mapping[str, Any]:
        return _encode(self._lazy_init(), example, self.max_length)

    def _end_of_document(self) -> int:
        if self.eod_token_id is not None:
            return self.eod_token_id
        return _special_token(self._lazy_init(), "eos_token_id", "eod_token_id or add_eod=False")


@dataclasses.dataclass
class HFPrefixTokenize(grain.transforms.Map):
    """Tokenises a prefix and a text as one sequence, of which only the text is a target.

    The sequence is the token for the beginning, the prefix, the text and the token for the end. All but its last token
    are inputs, all but its first are targets. `targets_segmentation` is 1 for targets in the text or at the end, and 0
    for those in the prefix.
    """

    tokenizer: Any
    prefix_tokenizer: Any
    prefix_column_name: str = "prefix"
    text_column_name: str = "text"
    add_bos_token: bool = True
    add_eos_token: bool = False
    bos_token_id: int | None = None
    """By default, that of the tokenizer for texts."""
    eos_token_id: int | None = None
    """By default, that of the tokenizer for texts."""
    max_length: int | None = None
    """The tokenizer truncates longer texts, on the side that it truncates on."""
    max_length_prefix: int | None = None
    """The tokenizer for prefixes truncates longer ones, on the side that it truncates on."""

    def __post_init__(self):
        if self.add_bos_token and self.bos_token_id is None:
            self.bos_token_id = _special_token(self.tokenizer, "bos_token_id", "bos_token_id or add_bos_token=False")
        if self.add_eos_token and self.eos_token_id is None:
            self.eos_token_id = _special_token(self.tokenizer, "eos_token_id", "eos_token_id or add_eos_token=False")

    def map(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs and targets with their segmentations, and all other features."""
        prefix = self._encode(self.prefix_tokenizer, features[self.prefix_column_name], self.max_length_prefix)
        text = self._encode(self.tokenizer, features[self.text_column_name], self.max_length)
        before = [self.bos_token_id, *prefix] if self.add_bos_token else prefix
        after = [*text, self.eos_token_id] if self.add_eos_token else text
        tokens = np.array([*before, *after], np.int32)
        is_text = np.repeat(np.array([0, 1], np.int32), [len(before), len(after)])
        columns = (self.prefix_column_name, self.text_column_name)
        rest = {name: value for name, value in features.items() if name not in columns}
        return {
            **rest,
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "inputs_segmentation": np.ones_like(tokens[:-1]),
            "targets_segmentation": is_text[1:],
        }

    @staticmethod
    def _encode(tokenizer: Any, text: str, max_length: int | None) -> list[int]:
        return list(_encode(tokenizer, text, max_length, add_special_tokens=False)["input_ids"])


@dataclasses.dataclass
class AddEODToken(grain.transforms.Map):
    """Truncates documents, and appends a token to those that are shorter."""

    eod_token_id: int
    add_eod: bool = True
    max_length: int | None = None

    def map(self, data: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Return all columns, truncated or with the token appended."""
        documents = {name: list(tokens[: self.max_length]) for name, tokens in data.items()}
        if not self.add_eod:
            return documents
        return {name: _with_end(tokens, self.eod_token_id, self.max_length) for name, tokens in documents.items()}


@dataclasses.dataclass
class HFNormalizeFeatures(grain.transforms.Map):
    """Uses the tokens of a column as both inputs and targets."""

    column_name: str

    def map(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the inputs and the targets as separate arrays."""
        return {name: np.array(features[self.column_name], np.int32) for name in TOKEN_KEYS}


@dataclasses.dataclass
class ReformatPacking(grain.transforms.Map):
    """Renames the results of grain's `PackAndBatchOperation`: tokens, segment ids and positions."""

    @staticmethod
    def map(data: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return all arrays in one dictionary."""
        suffixes = ("", "_segmentation", "_position")
        return {name + suffix: part[name] for suffix, part in zip(suffixes, data, strict=True) for name in TOKEN_KEYS}


@dataclasses.dataclass
class ReformatLazyPacking(grain.transforms.Map):
    """Renames the results of grain's packing data sets."""

    @staticmethod
    def map(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the same arrays, `inputs_segment_ids` as `inputs_segmentation` and so on."""
        suffixes = {"": "", "_segmentation": "_segment_ids", "_position": "_positions"}
        return {name + ours: data[name + grains] for ours, grains in suffixes.items() for name in TOKEN_KEYS}


@dataclasses.dataclass
class PadToMaxLength(grain.transforms.Map):
    """Zero-pads each document to a row; longer documents are unchanged."""

    max_length: int

    def map(self, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return tokens, segmentations and positions of length `max_length`, and other entries unchanged."""
        row = dict(data)
        for name in TOKEN_KEYS:
            length = len(data[name])
            padding = (0, max(self.max_length - length, 0))
            row[name] = np.pad(data[name], padding)
            row[f"{name}_segmentation"] = np.pad(np.ones(length, np.int32), padding)
            row[f"{name}_position"] = np.pad(np.arange(length, dtype=np.int32), padding)
        return row


@dataclasses.dataclass
class ShiftData(grain.transforms.Map):
    """Makes each target the token after its input."""

    shift_target: bool = True
    """Shift the targets left; otherwise the inputs right, after a token that ends a document."""
    eod_token_id: int = 0
    """The input before the first token, if the inputs are shifted."""
    pad_token_id: int = 0
    """The target after the last token, if the targets are shifted."""
    axis: int = 1

    def map(self, data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the data with either the targets or the inputs shifted."""
        padding_value = self.pad_token_id if self.shift_target else self.eod_token_id
        return shift_and_refine(data, shift_target=self.shift_target, axis=self.axis, padding_value=padding_value)


@dataclasses.dataclass
class InferSegmentations(grain.transforms.Map):
    """Finds the documents in rows with shifted inputs: each starts with the token that ends the previous one."""

    eod_token_id: int

    def map(self, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write segmentations and positions into `data`, and return it.

        A segmentation of 0 stays 0. Positions are 0 in padding, where both segmentations are 0. Rows may be batched.
        """
        eod_mask = data["inputs"] == self.eod_token_id
        first = 1 - eod_mask[..., :1].astype(np.int32)
        documents = first + np.cumsum(eod_mask, axis=-1, dtype=np.int32)
        positions = self._get_positions(eod_mask)
        masks = {name: data[f"{name}_segmentation"] != 0 for name in TOKEN_KEYS}
        is_padding = ~np.logical_or(*masks.values())
        for name, mask in masks.items():
            data[f"{name}_segmentation"] = np.where(mask, documents, np.int32(0))
            data[f"{name}_position"] = np.where(is_padding, np.int32(0), positions)
        return data

    @staticmethod
    def _get_positions(eod_mask: np.ndarray) -> np.ndarray:
        columns = np.arange(eod_mask.shape[-1], dtype=np.int32)
        return columns - np.maximum.accumulate(np.where(eod_mask, columns, np.int32(0)), axis=-1)


@dataclasses.dataclass
class CollateToBatch(grain.transforms.Map):
    """Makes a batch from a dictionary."""

    batch_class: Callable[..., Any]
    key_map: dict[str, str] | None = None
    """The fields of the batch by the names in the dictionary, where they differ."""

    def map(self, data: Mapping[str, Any]) -> Any:
        """Return the batch."""
        names = self.key_map or {}
        return self.batch_class(**{names.get(name, name): array for name, array in data.items()})


def shift_right(x: np.ndarray, axis: int = 1, padding_value: int = 0, pad_by_first_element: bool = False) -> np.ndarray:
    """Shift an array right by one along an axis, dropping the last element.

    Args:
        x: The array.
        axis: The axis.
        padding_value: The new first element.
        pad_by_first_element: Repeat the first element instead of using `padding_value`.

    Returns:
        An array of the same shape.
    """
    shifted = np.roll(x, 1, axis)
    np.moveaxis(shifted, axis, 0)[:1] = np.moveaxis(x, axis, 0)[:1] if pad_by_first_element else padding_value
    return shifted


def shift_left(x: np.ndarray, axis: int = 1, padding_value: int = 0) -> np.ndarray:
    """Shift an array left by one along an axis, dropping the first element; the last one is `padding_value`."""
    shifted = np.roll(x, -1, axis)
    np.moveaxis(shifted, axis, 0)[-1:] = padding_value
    return shifted


def shift_and_refine(
    x: Mapping[str, np.ndarray], shift_target: bool = True, axis: int = 1, padding_value: int = 0
) -> dict[str, np.ndarray]:
    """Make each target the token after its input.

    Args:
        x: Inputs and targets that are the same, with their segmentations.
        shift_target: Shift the targets left, and their segmentation with them; otherwise the inputs right.
        axis: The axis of the tokens.
        padding_value: The token at the free end; segmentations are padded with 0.

    Returns:
        A dictionary with the shifted arrays, and all others unchanged.
    """
    if not shift_target:
        return {**x, "inputs": shift_right(x["inputs"], axis, padding_value)}
    return {
        **x,
        "targets": shift_left(x["targets"], axis, padding_value),
        "targets_segmentation": shift_left(x["targets_segmentation"], axis),
    }


def _encode(tokenizer: Any, text: str, max_length: int | None, **options: Any) -> Mapping[str, Any]:
    return tokenizer(text, truncation=max_length is not None, max_length=max_length, **options)


def _special_token(tokenizer: Any, attribute: str, way_out: str) -> int:
    token = getattr(tokenizer, attribute)
    if token is None:
        raise ValueError(f"The tokenizer has no {attribute}: set {way_out}.")
    return token


def _with_end(tokens: list[int], token: int, max_length: int | None) -> list[int]:
    return [*tokens, token] if max_length is None or len(tokens) < max_length else tokens
