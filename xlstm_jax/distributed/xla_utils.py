"""Environment variables that XLA reads once, when JAX first touches a device."""

import os

GPU_FLAGS = {
    "--xla_gpu_shard_autotuning": "false",
    "--xla_gpu_triton_gemm_any": "true",
    "--xla_gpu_enable_latency_hiding_scheduler": "true",
    "--xla_gpu_enable_highest_priority_async_stream": "true",
}


def simulate_CPU_devices(device_count: int = 8) -> None:  # noqa: N802 (documented name)
    """Simulate a CPU with `device_count` devices. Call it before JAX is first used.

    Args:
        device_count: How many devices `jax.devices()` will list.
    """
    _append_xla_flags([f"--xla_force_host_platform_device_count={device_count}"])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Devices wait for each other in threads; with few of them, jaxlib 0.10 lets all threads wait at once.
    os.environ.setdefault("PJRT_NPROC", "64")


def set_XLA_flags() -> None:  # noqa: N802 (documented name)
    """Set the XLA flags that help training on GPUs. Call it before JAX is first used.

    What the environment already says, stays: neither a flag in `XLA_FLAGS` nor the memory fraction is overwritten.
    """
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # JAX refuses to start with both names.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.90")
    given = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    _append_xla_flags([f"{name}={value}" for name, value in GPU_FLAGS.items() if name not in given])


def _append_xla_flags(flags: list[str]) -> None:
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
