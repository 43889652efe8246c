"""A folder of checkpoints: each is written atomically and has everything that a run needs to resume."""

import concurrent.futures
import contextlib
import datetime
import errno
import json
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from xlstm_jax.checkpoint import layout
from xlstm_jax.checkpoint.checksums import Checksums, CorruptCheckpointError, replace_file, seal, seal_root
from xlstm_jax.checkpoint.files import (
    TEMPORARY_INFIX,
    absolute,
    clean_up,
    delete_checkpoint,
    free_bytes,
    is_remote,
    quarantine,
    quarantined,
)
from xlstm_jax.checkpoint.items import check_fit, restore_args, save_args, stored_shapes
from xlstm_jax.checkpoint.metadata import VERSION
from xlstm_jax.checkpoint.orbax import CheckpointManager, ocp
from xlstm_jax.checkpoint.retention import Retention
from xlstm_jax.checkpoint.validity import find_problem
from xlstm_jax.common_types import PyTree
from xlstm_jax.utils.pytree_utils import delete_arrays_in_pytree

LOGGER = logging.getLogger(__name__)

PREFIX = "checkpoint"
MEBIBYTE = 2**20
SMALLEST_SHARE = 0.8
"""The smallest expected ratio of the size of a checkpoint to that of its state: trained weights hardly compress."""


class CheckpointNotFoundError(FileNotFoundError, ValueError):
    """There is no checkpoint, or not the requested one."""


class CheckpointNotWrittenError(RuntimeError):
    """A checkpoint could not be written, for example on a full disk; earlier checkpoints are unaffected."""


class CheckpointStore:
    """The checkpoints of a run in a folder, named `checkpoint_<step>`.

    A checkpoint has trees of arrays and JSON documents by name: the parts of the train state, `metadata` with the
    configs, `data` with the states of the data loaders, and `metrics`, which may be added later. The stored arrays
    depend neither on the mesh nor on how a model runs its blocks, see `checkpoint.layout`. With several processes, all
    of them have to call all methods. A store can be used again after `close`.

    Args:
        folder: The folder, local or on Google Cloud Storage (`gs://bucket/folder`).
        retention: Which checkpoints to keep.
        use_async: Whether `save` returns once the arrays are copied, and writes them in the background.
        read_only: Whether to never change the folder, as another process may be writing to it.
        checksums: Whether to store checksums of all files with each checkpoint, and to verify files that are read.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        retention: Retention | None = None,
        use_async: bool = True,
        read_only: bool = False,
        checksums: bool = True,
    ):
        self.folder = absolute(folder)
        self.retention = retention or Retention()
        self.use_async = use_async
        self.read_only = read_only
        self.checksums = checksums
        self._opened: CheckpointManager | None = None
        self._metrics: dict[int, dict[str, Any]] = {}  # of all checkpoints, from the oldest to the newest
        self._own: set[int] = set()  # the steps of the run that this store belongs to
        self._last_number = 0
        self._unfinished: int | None = None
        self._saving: int | None = None
        self._selected: tuple[int, Collection[str] | None] | None = None  # a step and its verified items

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        self.wait()
        return sorted(self._metrics)

    def has_any(self) -> bool:
        """Return whether there are checkpoints, even if all of them are corrupt."""
        return bool(self.steps() or quarantined(self.folder))

    def latest(self) -> int | None:
        """Return the step of the most recently written checkpoint; `None` if there is none."""
        self.wait()
        return next(reversed(self._metrics), None)

    def best(self) -> int | None:
        """Return the step of the best checkpoint; `None` if none has the monitored metric.

        A store without a monitored metric uses that of the run, from the last checkpoint with valid metadata. If the
        run monitored none either, the last checkpoint is the best.
        """
        retention, latest = self.retention, self.latest()
        if retention.monitor is None and latest is not None:
            found = (self._peek(step, "metadata") for step in reversed(self._metrics))
            metadata = next(filter(None, found), {})
            retention = Retention(monitor=metadata.get("monitor"), mode=metadata.get("mode", "min"))
        return latest if retention.monitor is None else retention.best(self._metrics)

    def resolve(self, step: int = -1, *, best: bool = False) -> int:
        """Return the step of an existing checkpoint.

        Args:
            step: The step; below 0, that of the most recently written checkpoint.
            best: Whether to return the step of the best checkpoint instead.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint.
        """
        if not self.steps():
            if corrupt := quarantined(self.folder):
                raise CorruptCheckpointError(
                    f"All checkpoints in {self.folder} are corrupt ({', '.join(path.name for path in corrupt)}): put a "
                    "copy in their place, or delete them to start from step 0."
                )
            raise CheckpointNotFoundError(f"There is no checkpoint in {self.folder}.")
        found = self.best() if best else step if step >= 0 else self.latest()
        if found is None:
            raise CheckpointNotFoundError(
                f"No checkpoint in {self.folder} has the monitored metric, so none is the best: load the latest one or "
                f"one of the steps {self.steps()}."
            )
        if found not in self._metrics:
            raise CheckpointNotFoundError(
                f"There is no checkpoint of step {found} in {self.folder}, only of the steps {self.steps()}."
            )
        return found

    def select(self, step: int = -1, *, best: bool = False, items: Collection[str] | None = None) -> int:
        """Return the step of a valid checkpoint: the requested or the newest one.

        Newer checkpoints that are corrupt are reported and renamed, unless the store is read-only.

        Args:
            step: The requested step; below 0, the newest valid one.
            best: Whether the best checkpoint is requested instead.
            items: The items that are going to be read; all saved items by default.

        Raises:
            CheckpointNotFoundError: If there is no such checkpoint.
            CorruptCheckpointError: If the requested checkpoint is corrupt, or all are.
        """
        found = self.resolve(step, best=best)
        while problem := self._agreed(self.problem(found, items)):
            path, others = self.path(found), [other for other in self._metrics if other != found]
            if step >= 0 or best:
                raise CorruptCheckpointError(f"{path} is corrupt: {problem}. Load another step of {others}.")
            outcome = self._set_aside(found)
            if not others:
                raise CorruptCheckpointError(f"{path} is corrupt: {problem}. {outcome}; there is no other checkpoint.")
            LOGGER.warning("%s is corrupt: %s. %s; step %d is used instead.", path, problem, outcome, others[-1])
            found = others[-1]
        self._selected = found, items
        return found

    def problem(self, step: int, items: Collection[str] | None = None) -> str | None:
        """Read the files of a checkpoint and describe the first problem; `None` if it is valid.

        Args:
            step: The step.
            items: The items to verify; all saved items by default.
        """
        return find_problem(self._existing(step), items, verify=self.checksums)

    def path(self, step: int) -> epath.Path:
        """Return the folder of a checkpoint."""
        return self.folder / f"{PREFIX}_{step}"

    def contents(self, step: int) -> set[str]:
        """Return the names of all arrays and documents in a checkpoint."""
        return {path.name for path in self._existing(step).iterdir() if path.is_dir()}

    def save(self, step: int, arrays: Mapping[str, PyTree], documents: Mapping[str, Any]) -> None:
        """Write a checkpoint; one of the same step is replaced.

        Args:
            step: The step.
            arrays: Trees of arrays by name, including `params`. Trees without arrays are left out.
            documents: Documents to write as JSON by name, including `metadata`.
        """
        assert not self.read_only
        self.wait()
        self._check_room(step, arrays)
        if step in self._metrics:
            LOGGER.warning("Replacing %s: it is from before this run came to this step.", self.path(step))
            self._delete([step])
        if not self._own and self._metrics:
            LOGGER.warning(
                "%s holds checkpoints of an earlier run, of the steps %s: they stay beside those of this one. To go on "
                "with that run, load it first.",
                self.folder,
                sorted(self._metrics),
            )
        self._own.add(step)
        self._last_number += 1
        metadata = {
            "version": VERSION,
            "checksums": self.checksums,
            "number": self._last_number,
            "saved_at": datetime.datetime.now(datetime.UTC).isoformat(),
            "random_keys": _random_keys(layout.describe(dict(arrays))),
            "monitor": self.retention.monitor,
            "mode": self.retention.mode,
            **documents["metadata"],
        }
        stacks = layout.find_stacks(arrays["params"])
        written = {name: ocp.args.JsonSave(content) for name, content in {**documents, "metadata": metadata}.items()}
        written |= {
            name: save_args(layout.to_canonical(tree, stacks)) for name, tree in arrays.items() if jax.tree.leaves(tree)
        }
        manager, self._saving = self._manager(), step
        manager.save(step, args=ocp.args.Composite(**written), force=True)
        self._unfinished = step
        if not self.use_async:
            self.wait()

    def save_document(self, step: int, name: str, content: Mapping[str, Any]) -> None:
        """Add or replace a document of a checkpoint."""
        checkpoint = self._existing(step)
        if jax.process_index() == 0:
            replace_file(checkpoint, name, _file(checkpoint, name).name, json.dumps(content))
        _wait_for_all_processes(f"{name} of {checkpoint} is written")

    def save_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a checkpoint, and drop the checkpoints that the retention policy no longer keeps."""
        self.save_document(step, "metrics", metrics)
        self._metrics[step] = dict(metrics)
        self._drop_old()

    def read_metadata(self, step: int) -> dict[str, Any]:
        """Read the metadata of a checkpoint, such as the configs of the run that wrote it."""
        metadata = self.read_document(step, "metadata")
        if metadata.get("version", VERSION) > VERSION:
            raise ValueError(
                f"{self.path(step)} has version {metadata['version']} of the layout of checkpoints, and this xlstm_jax "
                f"reads versions up to {VERSION}: update it."
            )
        return metadata

    def read_document(self, step: int, name: str) -> dict[str, Any]:
        """Read a document; empty if the checkpoint does not have it."""
        with self._reading(step):
            return self._read_document(self._existing(step), name)

    def restore(self, step: int, like: Mapping[str, PyTree], *, free: Collection[str] = ()) -> dict[str, PyTree]:
        """Read trees of arrays onto any mesh.

        Args:
            step: The step of the checkpoint.
            like: Live trees of the same shapes by name, including `params`; they give the types, boxes, dtypes, and
                shardings of the result. Leaves may be `jax.ShapeDtypeStruct`; without a sharding, the result is a NumPy
                array.
            free: The names of the trees whose live arrays are deleted before reading, to free their memory.

        Returns:
            The trees, with the values of the checkpoint.
        """
        path = self._existing(step)
        targets = {name: layout.describe(tree) for name, tree in like.items() if jax.tree.leaves(tree)}
        stacks = layout.find_stacks(targets["params"])
        wanted = {name: layout.canonical_targets(tree, stacks) for name, tree in targets.items()}
        with self._reading(step):
            self._verify(step, {*wanted, "metadata"})
        _check_random_keys(path, self.read_metadata(step).get("random_keys", {}), _random_keys(targets))
        for name, tree in wanted.items():
            if name not in self.contents(step):
                raise ValueError(f"{path} holds no {name}, only {', '.join(sorted(self.contents(step)))}.")
            if isinstance(tree, dict):
                with self._reading(step):
                    stored = stored_shapes(path, name)
                check_fit(path, name, stored, tree)
        delete_arrays_in_pytree([like[name] for name in free])
        arguments = {name: restore_args(tree) for name, tree in wanted.items()}
        with self._reading(step):
            stored = self._manager().restore(step, args=ocp.args.Composite(**arguments))
        return {name: layout.from_canonical(stored[name], tree, stacks) for name, tree in targets.items()}

    def adopt(self) -> None:
        """Adopt existing checkpoints as this run's own, so that the retention policy applies to them."""
        self._own.update(self.steps())

    def wait(self) -> None:
        """Wait until the last checkpoint is written; then drop the ones that the retention policy does not keep."""
        manager = self._manager()
        step, self._unfinished = self._unfinished, None
        if step is None:
            return
        try:
            manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(step, _reason(error)) from error
        if self.checksums and jax.process_index() == 0:
            seal_root(self.path(step))
        self._metrics[step] = {}
        self._drop_old()

    def _check_room(self, step: int, arrays: Mapping[str, PyTree]) -> None:
        """Raise before writing if the disk has too little free space; each process may have a disk of its own."""
        free = free_bytes(self.folder)
        needed = int(
            SMALLEST_SHARE * sum(leaf.nbytes for leaf in jax.tree.leaves(dict(arrays)) if hasattr(leaf, "nbytes"))
        )
        if free is not None and free < needed and jax.process_count() == 1:
            reason = f"it needs {needed / MEBIBYTE:,.1f} MiB, but the disk has {free / MEBIBYTE:,.1f} MiB"
            raise self._not_written(step, reason)

    def _not_written(self, step: int, reason: str) -> CheckpointNotWrittenError:
        last = next(reversed(self._metrics), None)
        return CheckpointNotWrittenError(
            f"{self.path(step)} could not be written ({reason}); the last whole one is of step {last}."
        )

    def close(self) -> None:
        """Wait until everything is written, and end the writer threads."""
        if self._opened is None:
            return
        try:
            self.wait()
        finally:
            self._opened.close()
            self._opened = None

    def _manager(self) -> CheckpointManager:
        if self._opened is None:
            options = ocp.CheckpointManagerOptions(
                step_prefix=PREFIX,
                create=not self.read_only,
                # Orbax would clean up in a background thread, which a process that ends early does not wait for.
                cleanup_tmp_directories=not self.read_only and is_remote(self.folder),
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
                save_root_metadata=False,
            )
            try:
                self._opened = CheckpointManager(self.folder, options=options)
            except ImportError as error:
                raise ImportError(
                    f"{self.folder} needs a package that is not installed: {error}. For Google Cloud Storage, install "
                    "gcsfs and google-cloud-storage."
                ) from error
            if not self.read_only and jax.process_index() == 0:
                clean_up(self.folder)
            self._load(self._opened.all_steps())
        return self._opened

    def _seal(self) -> None:
        """Store the checksums of the current checkpoint before Orbax commits it."""
        if self.checksums and self._saving is not None and jax.process_index() == 0:
            temporary = self.folder.glob(f"{PREFIX}_{self._saving}{TEMPORARY_INFIX}*")
            seal(next(iter(temporary), self.path(self._saving)))

    def _load(self, steps: Sequence[int]) -> None:
        """Read the metrics of checkpoints and the order in which they were written."""
        with concurrent.futures.ThreadPoolExecutor() as threads:
            metadata = list(threads.map(lambda step: self._peek(step, "metadata"), steps))
            metrics = list(threads.map(lambda step: self._peek(step, "metrics") or {}, steps))
        # A checkpoint without metadata is corrupt. It counts as the newest, so that `select` finds the problem.
        numbers = [found.get("number", 0) if found else math.inf for found in metadata]
        in_order = sorted(zip(numbers, steps, metrics, strict=True), key=lambda found: found[:2])
        self._metrics = {step: found for _, step, found in in_order}
        self._last_number = max((int(number) for number in numbers if number < math.inf), default=0)

    def _peek(self, step: int, document: str) -> dict[str, Any] | None:
        """Read a document; `None` if it is missing or corrupt, which is an error only where the document is needed."""
        try:
            return self._read_document(self.path(step), document) or None
        except CorruptCheckpointError as error:
            if document == "metrics":
                LOGGER.warning("%s cannot be the best checkpoint, as %s.", self.path(step), error)
        except (OSError, ValueError):
            pass
        return None

    def _read_document(self, checkpoint: epath.Path, name: str) -> dict[str, Any]:
        file = _file(checkpoint, name)
        content = file.read_bytes() if file.exists() else None
        checksums = Checksums.read(checkpoint) if self.checksums else None
        if checksums is not None:
            checksums.check(name, file.name, content)
        return {} if content is None else json.loads(content)

    def _verify(self, step: int, items: Collection[str]) -> None:
        """Raise an error if items are corrupt, unless they were verified when the checkpoint was selected."""
        selected, verified = self._selected or (None, ())
        if selected == step and (verified is None or set(items) <= set(verified)):
            return
        if problem := self.problem(step, items):
            raise CorruptCheckpointError(problem)

    @staticmethod
    def _agreed(problem: str | None) -> str | None:
        """Return a problem found in any process, so that all processes skip the same checkpoints."""
        if jax.process_count() == 1:
            return problem
        is_corrupt = multihost_utils.process_allgather(np.bool_(problem is not None)).any()
        return problem or ("another process cannot read it" if is_corrupt else None)

    def _set_aside(self, step: int) -> str:
        """Remove a corrupt checkpoint from the list, rename it unless read-only, and return a description of that."""
        del self._metrics[step]
        self._own.discard(step)
        if self.read_only:
            return "It is skipped"
        outcome = "It is renamed"
        if jax.process_index() == 0:
            outcome += f" to {quarantine(self.path(step)).name}"
        _wait_for_all_processes(f"{self.path(step)} is renamed")
        self._manager().reload()
        return outcome

    def _existing(self, step: int) -> epath.Path:
        return self.path(self.resolve(step))

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            others = [other for other in self._metrics if other != step]
            raise ValueError(
                f"{self.path(step)} could not be read ({error}). If a file in it is damaged, load another step; there "
                f"are {others}."
            ) from error

    def _drop_old(self) -> None:
        own = {step: metrics for step, metrics in self._metrics.items() if step in self._own}
        if dropped := self.retention.dropped(list(own), own):
            self._delete(dropped)

    def _delete(self, steps: Sequence[int]) -> None:
        for step in steps:
            del self._metrics[step]
            if jax.process_index() == 0:
                delete_checkpoint(self.path(step))
        _wait_for_all_processes(f"{self.folder} has lost {steps}")
        self._manager().reload()


def _file(checkpoint: epath.Path, document: str) -> epath.Path:
    """Return the path of the file of a document, the same as in Orbax."""
    return checkpoint / document / ("metrics" if document == "metrics" else "metadata")


def _wait_for_all_processes(reason: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


def _random_keys(targets: Mapping[str, PyTree]) -> dict[str, str]:
    """Return the kinds of all random keys, by their names."""
    named = layout.named_leaves(dict(targets))
    return {".".join(path): target.key_kind for path, target in named if target.key_kind is not None}


def _check_random_keys(checkpoint: epath.Path, stored: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    for name, kind in wanted.items():
        if stored.get(name, kind) != kind:
            raise ValueError(
                f"{name} in {checkpoint} is a random key of the kind {stored[name]}, here it is {kind}: set "
                f"jax.config.update('jax_default_prng_impl', {stored[name]!r}) before the trainer is created."
            )


def _reason(error: Exception) -> str:
    """Return the error in one line, without the source locations that libraries add on further lines."""
    text = " ".join(str(error).split())
    full = os.strerror(errno.ENOSPC)
    return full if full in text else text
