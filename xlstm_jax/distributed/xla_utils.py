"""XLA flags: environment variables that XLA reads once, when JAX first accesses a device, and compiler options."""

import os

import jax

GPU_FLAGS = {
    "--xla_gpu_shard_autotuning": "false",
    "--xla_gpu_triton_gemm_any": "true",
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
    "--xla_gpu_enable_highest_priority_async_stream": "true",
}


def simulate_CPU_devices(device_count: int = 8) -> None:  # noqa: N802 (documented name)
    """Simulate a CPU with `device_count` devices. Call it before JAX is first used.

    Args:
        device_count: The number of devices in `jax.devices()`.
    """
    _append_xla_flags([f"--xla_force_host_platform_device_count={device_count}"])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Devices wait for each other in threads; with few threads, all of them may wait at once and deadlock (jaxlib 0.10).
    os.environ.setdefault("PJRT_NPROC", "64")


def set_XLA_flags() -> None:  # noqa: N802 (documented name)
    """Set the XLA flags that help training on GPUs. Call it before JAX is first used.

    Flags in `XLA_FLAGS` and a memory fraction that are already set in the environment are not overwritten.
    """
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # JAX refuses to start with both names.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.90")
    given = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    _append_xla_flags([f"{name}={value}" for name, value in GPU_FLAGS.items() if name not in given])


def deterministic_options() -> dict[str, bool]:
    """Return the compiler options with which a program is bit-reproducible on one kind of device.

    Pass them to `jax.jit(..., compiler_options=...)`. On GPUs, XLA then uses no atomic additions and no autotuning,
    whose choice of matmul depends on measured times. The compiler for TPUs neither has the option nor needs it.
    """
    return {} if jax.default_backend() == "tpu" else {"xla_gpu_deterministic_ops": True}


def _append_xla_flags(flags: list[str]) -> None:
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
