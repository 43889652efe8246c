"""The memory of a compiled training step, and the error if it does not fit on a device."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Bytes on a device that a compiled training step needs."""

    device_kind: str
    """The device that it was compiled for. The compiler for `cpu` computes bfloat16 operations in float32 and keeps
    many results in float32, so its temporaries overestimate those of other devices."""
    arguments: int
    """State, batch and metrics, without arrays that the step does not read."""
    outputs: int
    """Results that do not alias an argument."""
    temporaries: int
    """Gradients, activations, gathered parameters, logits and other temporaries of a step."""
    code: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, device_kind: str) -> "CompiledMemory":
        """Read the memory of a compiled program."""
        statistics: Any = compiled.memory_analysis()
        if statistics is None:
            raise RuntimeError(f"The compiler for {device_kind!r} does not report how much memory a program needs.")
        return cls(
            device_kind=device_kind,
            arguments=statistics.argument_size_in_bytes,
            outputs=statistics.output_size_in_bytes - statistics.alias_size_in_bytes,
            temporaries=statistics.temp_size_in_bytes,
            code=statistics.generated_code_size_in_bytes,
        )

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return self.arguments + self.outputs + self.temporaries + self.code


class StepDoesNotFitError(RuntimeError):
    """A training step needs more memory than a device has.

    Args:
        needed: Bytes that the compiled step needs; `None` if it ran out of memory while it ran.
        limit: Bytes that the device has; `None` if unknown.
    """

    def __init__(self, needed: int | None, limit: int | None):
        need = "ran out of memory" if needed is None else f"needs {needed / GIB:.2f} GiB"
        room = "" if limit is None else f" on a device with {limit / GIB:.2f} GiB"
        super().__init__(f"The training step {need}{room}.")
        self.needed = needed
        self.limit = limit


def memory_limit(device: Any) -> int | None:
    """Return the bytes that JAX may allocate on a device; `None` where the device does not report it, as on CPUs."""
    return (device.memory_stats() or {}).get("bytes_limit")


@contextlib.contextmanager
def out_of_memory_is_reported(device: Any) -> Iterator[None]:
    """Raise `StepDoesNotFitError` if a program runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise StepDoesNotFitError(None, memory_limit(device)) from error
