"""The source of the running Python's standard library as a corpus: real text on every machine, without a download.

The files depend on the version of Python and on who has packaged it; two runs read the same bytes if and only if their
corpora have the same hash. Which side of the split a file is on depends on its own name and content alone.
"""

import dataclasses
import functools
import hashlib
import io
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import StandardLibraryDataConfig
from xlstm_jax.dataset.sources.bad_data import OnBadData
from xlstm_jax.dataset.sources.compressors import compressed_bits_per_byte
from xlstm_jax.dataset.sources.numbered_texts import NumberedTexts
from xlstm_jax.dataset.sources.source import PathOptions
from xlstm_jax.dataset.sources.text_files import cut_at_lines
from xlstm_jax.dataset.sources.text_store import TextStore

LOGGER = logging.getLogger(__name__)
STANDARD_LIBRARY = "stdlib"
"""The path by which `prepare` takes this source."""
SPLITS = ("train", "validation")
VALIDATION_SHARE = 0.05
"""How likely a file is to be one of the validation files."""

_LEFT_OUT = {
    *("test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),  # tables, hardly written by hand
    *("site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"),  # what others have installed
}
_BUILD_PREFIXES = ("_sysconfigdata", "config-")
"""Files of these names tell how Python was built, and differ between machines with the same version."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One source file."""

    name: str
    """The path below the folder of the standard library, with slashes."""
    content: bytes = dataclasses.field(repr=False)

    @functools.cached_property
    def digest(self) -> bytes:
        """The SHA-256 of name and content."""
        return hashlib.sha256(self.name.encode() + b"\0" + self.content).digest()

    @property
    def is_validation(self) -> bool:
        """Whether the document is for validation: its digest is a number that falls into the share."""
        return int.from_bytes(self.digest[:8], "big") < VALIDATION_SHARE * 2**64


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All documents, in the order of their names."""

    documents: tuple[Document, ...] = dataclasses.field(repr=False)
    num_unreadable: int = 0
    """Files and folders that could not be read, and are left out."""

    @functools.cached_property
    def sha256(self) -> str:
        """What the corpus is known by: changes with any name, any byte and any missing file."""
        return hashlib.sha256(b"".join(document.digest for document in self.documents)).hexdigest()

    @property
    def train(self) -> tuple[Document, ...]:
        """The documents to train on."""
        return tuple(document for document in self.documents if not document.is_validation)

    @property
    def validation(self) -> tuple[Document, ...]:
        """The documents to validate on."""
        return tuple(document for document in self.documents if document.is_validation)

    def describe(self) -> str:
        """Say in a line how much there is, and which corpus it is."""
        train, validation = (
            f"{len(part)} files, {count_bytes(part):,} bytes" for part in (self.train, self.validation)
        )
        return f"Standard library: train {train}; validation {validation}; sha256 {self.sha256}"


def load_standard_library(folder: str | os.PathLike | None = None) -> Corpus:
    """Read the Python files of the standard library.

    Tests, encodings, `pydoc_data`, installed packages, files that the build has made and empty files are left out.

    Args:
        folder: The folder of the standard library; that of the running Python if not given.

    Returns:
        The corpus. Files that cannot be read are missing from it; a warning says how many.

    Raises:
        ValueError: There is no source in the folder.
    """
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    documents: list[Document] = []
    errors: list[OSError] = []
    for name in sorted(_find_names(root, errors)):
        try:
            documents.append(Document(name, (root / name).read_bytes()))
        except OSError as error:
            errors.append(error)
    documents = [document for document in documents if document.content]
    if not documents:
        raise ValueError(
            f"No Python source can be read below {root}: this Python may have been installed without it. "
            "Give the folder of another one."
        )
    if errors:
        LOGGER.warning("The corpus is without %d paths that cannot be read. The first: %s", len(errors), errors[0])
    return Corpus(tuple(documents), num_unreadable=len(errors))


def count_bytes(documents: Sequence[Document]) -> int:
    """Return the size of all documents together."""
    return sum(len(document.content) for document in documents)


def yardsticks(documents: Sequence[Document]) -> dict[str, float]:
    """Return the bits per byte that `gzip -9` and `xz -9` reach on all documents together.

    The compressors know nothing before the first byte, and their headers count. A model that was trained on the other
    files of the library has read 20 times as much text: `compressors` primes xz with them for a fair comparison.

    Args:
        documents: The documents, which must not all be empty.

    Returns:
        The bits per byte of "gzip" and "xz".
    """
    content = b"".join(document.content for document in documents)
    if not content:
        raise ValueError(f"There is nothing to compress in these {len(documents)} documents: give one that has bytes.")
    return compressed_bits_per_byte(content)


def open_config(config: StandardLibraryDataConfig) -> NumberedTexts:
    """Open a split, and log the identity of the corpus and the bits per byte that compressors reach."""
    corpus = load_standard_library()
    LOGGER.info("%s", corpus.describe())
    if config.split != "train":
        reached = ", ".join(f"{name} {bits:.3f}" for name, bits in yardsticks(corpus.validation).items())
        LOGGER.info("Bits per byte on all validation files, without the training files: %s.", reached)
    return _open_split(corpus, config.split, None, config.on_bad_data)


def open_paths(paths: Sequence[str], options: PathOptions) -> NumberedTexts | None:
    """Open a split for `prepare`: training files are cut like other plain text, validation files stay whole."""
    if list(paths) != [STANDARD_LIBRARY]:
        return None
    if options.split not in SPLITS:
        raise ConfigError(f"The standard library has no split {options.split!r}, only {' and '.join(SPLITS)}.")
    max_bytes = options.max_document_bytes if options.split == "train" else None
    return _open_split(load_standard_library(), options.split, max_bytes, options.on_bad_data)


def _open_split(corpus: Corpus, split: str, max_bytes: int | None, on_bad_data: OnBadData) -> NumberedTexts:
    documents = corpus.train if split == "train" else corpus.validation
    texts = [document.content.decode("utf-8", "replace") for document in documents]
    if max_bytes is not None:
        texts = [piece.decode() for text in texts for piece in cut_at_lines(io.BytesIO(text.encode()), max_bytes)]
    return NumberedTexts(
        STANDARD_LIBRARY,
        TextStore.build(texts),
        num_bytes=count_bytes(documents),
        describe=lambda: {"paths": [STANDARD_LIBRARY], "sha256": corpus.sha256, "max_document_bytes": max_bytes},
        on_bad_data=on_bad_data,
    )


def _find_names(root: Path, errors: list[OSError]) -> Iterator[str]:
    for folder, folders, files in os.walk(root, onerror=errors.append):
        folders[:] = filter(_belongs, folders)
        for name in files:
            if name.endswith(".py") and _belongs(name):
                yield Path(folder, name).relative_to(root).as_posix()


def _belongs(name: str) -> bool:
    return name not in _LEFT_OUT and not name.startswith(_BUILD_PREFIXES)
