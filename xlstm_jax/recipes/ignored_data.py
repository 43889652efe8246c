"""Reject data settings that have no effect, and name the settings to use instead."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xlstm_jax.configs import ConfigError, describe_ignored
from xlstm_jax.dataset.configs import DataConfig

OF_PREPARED = {
    "data_path": "data.prepare.sources, and data.prepare.output for the folder of the shards",
    "tokenizer_path": "data.prepare.tokenizer_path or data.prepare.train_vocab_size",
    "tokenize_data": "data.prepare.tokenizer_path",
    "data_column": "data.prepare.column",
    "max_document_bytes": "data.prepare.max_document_bytes",
    "worker_count": "data.prepare.num_workers",
}
"""The replacements for settings that have no effect in a run that prepares its data, by the name of the setting."""


class Layer(NamedTuple):
    """Fields that apply to some sets; an inner layer overrides an outer one."""

    name: str
    """The key of the fields in the settings, such as `data.train`."""
    fields: Mapping[str, Any]


class DataSet(NamedTuple):
    """A data set and the layers of its fields, outermost first."""

    config: DataConfig
    layers: Sequence[Layer]


def check_prepared(layers: Iterable[Layer]) -> None:
    """Reject settings that `data.prepare` replaces."""
    for layer in layers:
        for name, effective in OF_PREPARED.items():
            if layer.fields.get(name) is not None:
                raise ConfigError(
                    f"{layer.name}.{name} has no effect with data.prepare: set {effective}; or data.prepare=null or "
                    "another choice of data, to read existing data unchanged."
                )


def check_layers(sets: Sequence[DataSet]) -> None:
    """Reject settings that no set of a run reads because inner layers or other settings override them."""
    layers = {layer.name: layer for each in sets for layer in each.layers}
    for layer in layers.values():
        users = [each for each in sets if layer in each.layers]
        for name, value in layer.fields.items():
            if value is not None:
                _check_is_read(layer, name, users)


def _check_is_read(layer: Layer, name: str, users: Sequence[DataSet]) -> None:
    places, reasons = [], []
    for config, layers in users:
        place = next(own for own in reversed(layers) if name in own.fields)
        ignored = describe_ignored(config, config.ignored_fields())
        if place.name != layer.name:
            places.append(f"{place.name}.{name}")
        elif name in ignored:
            reasons.append(ignored[name])
        else:
            return
    if reasons:
        raise ConfigError(f"{layer.name}.{reasons[0]}")
    raise ConfigError(
        f"{layer.name}.{name} has no effect, as it is replaced by {' and '.join(dict.fromkeys(places))}: change that, "
        f"and leave this out ({layer.name}.{name}=null)."
    )
