"""From data configs to batches in an order that is a function of the seed and the step alone."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh

from xlstm_jax.dataset.configs import (
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    StandardLibraryDataConfig,
    TextDataConfig,
    TextFilesDataConfig,
)
from xlstm_jax.dataset.document_stream import Documents, Source
from xlstm_jax.dataset.grain_batch_rampup import create_batch_rampup_schedule
from xlstm_jax.dataset.mixture import WeightSchedule
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator, rows_of_process
from xlstm_jax.dataset.ordered_batches import BatchOrder, OrderedBatches
from xlstm_jax.dataset.record_files import load_huggingface_dataset
from xlstm_jax.dataset.standard_library import load_standard_library, yardsticks
from xlstm_jax.dataset.text_documents import ColumnTexts, EncodedTexts, RecordTexts, Texts
from xlstm_jax.dataset.text_encoder import TextEncoder
from xlstm_jax.dataset.text_files import TextFiles
from xlstm_jax.dataset.text_store import TextStore
from xlstm_jax.dataset.token_shards import TokenShards, open_records

LOGGER = logging.getLogger(__name__)

_SHARED = (
    *("global_batch_size", "max_target_length", "packing_name", "grain_packing_bin_count"),
    *("batch_rampup_factors", "max_steps_per_epoch"),
)
"""What the data sets of a mixture must have in common."""


def make_ordered_iterator(
    configs: Sequence[TextDataConfig],
    global_mesh: Mesh,
    weights: Sequence[float | int] | None = None,
    weights_at_steps: Mapping[int, Sequence[float | int]] | None = None,
) -> MultiHostDataLoadIterator:
    """Make an iterator over the global batches of some data sets.

    Args:
        configs: The data sets; what they say of batches must be the same.
        global_mesh: The mesh; the rows of a batch are split over all of its devices.
        weights: The share of tokens of each data set, in any unit; equal ones if not given.
        weights_at_steps: From these steps on, other weights.

    Returns:
        The iterator. One data set with `drop_remainder=False` ends after each pass over its documents. Otherwise an
        epoch ends, without a border in the data, when every data set has been read once more; it has a length where the
        number of rows is known beforehand.
    """
    _check_configs(configs)
    config = configs[0]
    sources = [_make_source(each, each.name or str(index)) for index, each in enumerate(configs)]
    schedule = WeightSchedule(len(sources), weights, weights_at_steps)
    is_endless = len(configs) > 1 or config.drop_remainder
    length = _epoch_length(config, sources, schedule(0)) if is_endless else None
    batches = OrderedBatches(
        sources,
        BatchOrder(
            length=config.max_target_length or 0,
            num_rows=_row_schedule(config, global_mesh),
            packing=config.packing_name,
            num_bins=config.grain_packing_bin_count or config.global_batch_size,
            weights=schedule,
            is_endless=is_endless,
            stops_after_pass=is_endless and length is None,
            bos_token_id=_first_input(config, sources[0]),
        ),
        own_rows=lambda num_rows: rows_of_process(global_mesh, num_rows),
        num_workers=max(map(_num_workers, configs)),
        description={
            "global_batch_size": config.global_batch_size,
            "batch_rampup_factors": {str(k): v for k, v in (config.batch_rampup_factors or {}).items()},
        },
    )
    return MultiHostDataLoadIterator(
        batches,
        global_mesh,
        iterator_length=min(filter(None, [length, config.max_steps_per_epoch]), default=None),
        dataset_size=sum(len(source.documents) for source in sources),
        reset_after_epoch=not is_endless and not config.shuffle_data,
        prefetch=config.worker_buffer_size,
    )


def open_documents(config: TextDataConfig) -> Documents:
    """Open the documents of a data set, which are tokenised as they are read if they are not on disk as tokens."""
    if isinstance(config, GrainArrayRecordsDataConfig) and not config.tokenize_data:
        return TokenShards(config.data_path / config.split)
    return EncodedTexts(_open_texts(config), _make_encoder(config))


def _open_texts(config: TextDataConfig) -> Texts:
    match config:
        case GrainArrayRecordsDataConfig():
            return RecordTexts(open_records(config.data_path / config.split))
        case HFHubDataConfig():
            return ColumnTexts(load_huggingface_dataset(config), config.data_column)
        case TextFilesDataConfig():
            files = TextFiles(
                str(config.data_path),
                column=config.data_column,
                on_bad_data=config.on_bad_data,
                max_document_bytes=config.max_document_bytes,
            )
            return TextStore.build(files)
        case StandardLibraryDataConfig():
            return TextStore.build(_read_standard_library(config.split))
    raise ValueError(f"A {type(config).__name__} does not say where its documents are: use a config that does.")


def _read_standard_library(split: str) -> list[str]:
    """Return the files of a split, and say which corpus they are from and what a model has to beat on them."""
    corpus = load_standard_library()
    LOGGER.info("%s", corpus.describe())
    if split == "train":
        documents = corpus.train
    else:
        documents = corpus.validation
        reached = ", ".join(f"{name} {bits:.3f}" for name, bits in yardsticks(documents).items())
        LOGGER.info("Bits per byte on all validation files: %s.", reached)
    return [document.content.decode("utf-8", "replace") for document in documents]


def _make_source(config: TextDataConfig, name: str) -> Source:
    documents = open_documents(config)
    return Source(
        documents,
        shuffle_seed=config.data_shuffle_seed if config.shuffle_data else None,
        eod_token_id=_end_of_document(config, documents) if config.add_eod else None,
        on_bad_data=config.on_bad_data,
        name=name,
    )


def _make_encoder(config: TextDataConfig) -> TextEncoder:
    return TextEncoder(
        config.tokenizer_path, config.add_bos, config.add_eos, config.hf_access_token, config.hf_cache_dir
    )


def _end_of_document(config: TextDataConfig, documents: Documents) -> int:
    if not isinstance(documents, TokenShards) or documents.manifest is None:
        return _make_encoder(config).eod_token_id
    token = documents.manifest.eod_token_id
    if token is None:
        raise ValueError(f"The tokenizer that {documents.folder} was prepared with has no token to end documents with.")
    return token


def _first_input(config: TextDataConfig, source: Source) -> int:
    """Return what a model sees before the first token of a document: the end of another one."""
    return _end_of_document(config, source.documents) if source.eod_token_id is None else source.eod_token_id


def _check_configs(configs: Sequence[TextDataConfig]) -> None:
    if not configs:
        raise ValueError("There is no data set: give at least one config.")
    if configs[0].max_target_length is None:
        raise ValueError("max_target_length is None, but rows need a length: set it.")
    names = [config.name for config in configs if config.name is not None]
    if len(set(names)) < len(names):
        raise ValueError(f"The data sets of a mixture must have different names, but they are called {names}.")
    for name in _SHARED:
        values = [getattr(config, name) for config in configs]
        if any(value != values[0] for value in values):
            raise ValueError(f"All data sets of a mixture must have the same {name}, but they have {values}.")


def _num_workers(config: TextDataConfig) -> int:
    is_tokenized = isinstance(config, GrainArrayRecordsDataConfig) and not config.tokenize_data
    return 0 if is_tokenized else config.worker_count


def _row_schedule(config: TextDataConfig, mesh: Mesh) -> Callable[[int], int]:
    factors = config.batch_rampup_factors
    schedule = create_batch_rampup_schedule(config.global_batch_size, "stepwise", factors)
    for step in (0, *map(int, factors or ())):
        if schedule(step) % mesh.size:
            raise ValueError(
                f"From step {step} on, a batch has {schedule(step)} rows, but it must be a multiple of the {mesh.size} "
                "devices: change global_batch_size or batch_rampup_factors."
            )
    return schedule


def _epoch_length(config: TextDataConfig, sources: Sequence[Source], shares: Sequence[float]) -> int | None:
    """Return the number of batches that it takes to read each source once: counted in tokens, where rows are packed."""
    if config.packing_name == "none":
        sizes, batch_size = [len(source.documents) for source in sources], config.global_batch_size
    else:
        sizes = [source.num_tokens for source in sources]
        batch_size = config.global_batch_size * (config.max_target_length or 1)
    if None in sizes:
        return None
    whole = max((size or 0) / share for size, share in zip(sizes, shares, strict=True) if share)
    return max(math.floor(whole) // batch_size, 1)
