"""The accelerator table: rates from data sheets, used for the utilisation of runs and for plans.

FLOPs are dense, without sparsity. `float32_flops` is the rate of JAX's default float32 matmuls: TF32 on NVIDIA,
bfloat16 on TPU. Memory is in decimal gigabytes; devices have slightly more. Link bandwidths are unidirectional.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

GB = 1e9
TERA = 1e12
HOPPER_KINDS = ("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200")
BLACKWELL_KINDS = ("NVIDIA B200", "NVIDIA GB200")


def host_memory() -> int:
    """Return the bytes of memory of this machine, or of the container that this process runs in."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # The file is missing or sets no limit.
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device and its interconnect."""

    name: str
    bfloat16_flops: float
    float32_flops: float
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes per second."""
    link_bandwidth: float
    """Bytes per second that a device sends to others in its node or pod."""
    network_bandwidth: float
    """Bytes per second and device between nodes: the usual value for such nodes, as data sheets do not specify it."""
    devices_per_node: int
    device_kinds: tuple[str, ...] = ()
    """Prefixes of `jax.Device.device_kind` for this device."""

    def flops(self, dtype: str) -> float:
        """Return the peak FLOPs for a dtype."""
        return self.bfloat16_flops if dtype in ("bfloat16", "float16") else self.float32_flops

    @property
    def is_gpu(self) -> bool:
        """Whether this is an NVIDIA GPU."""
        return any(kind.startswith("NVIDIA") for kind in self.device_kinds)

    @property
    def is_hopper(self) -> bool:
        """Whether this is a Hopper GPU, which our GPU kernels are written for."""
        return any(kind.startswith(HOPPER_KINDS) for kind in self.device_kinds)

    @property
    def has_packed_attention(self) -> bool:
        """Whether cuDNN supports the packed layout: on Hopper GPUs and later."""
        return any(kind.startswith(HOPPER_KINDS + BLACKWELL_KINDS) for kind in self.device_kinds)


ACCELERATORS = (
    # NVIDIA GB200 NVL72 data sheet: 72 GPUs in one NVLink domain; ConnectX-7 at 400 Gb/s for each.
    Accelerator("gb200", 2500 * TERA, 1250 * TERA, 186 * GB, 8000 * GB, 900 * GB, 50 * GB, 72, ("NVIDIA GB200",)),
    # NVIDIA DGX B200 data sheet: 8 GPUs, 1440 GB and 64 TB/s in all; fifth-generation NVLink.
    Accelerator("b200", 2250 * TERA, 1125 * TERA, 180 * GB, 8000 * GB, 900 * GB, 50 * GB, 8, ("NVIDIA B200",)),
    # NVIDIA H200 data sheet: the compute of H100 SXM, HBM3e.
    Accelerator("h200", 989 * TERA, 494 * TERA, 141 * GB, 4800 * GB, 450 * GB, 50 * GB, 8, ("NVIDIA H200",)),
    # NVIDIA GH200 Grace Hopper data sheet, with HBM3: one GPU in a node.
    Accelerator("gh200", 989 * TERA, 494 * TERA, 96 * GB, 4000 * GB, 450 * GB, 50 * GB, 1, ("NVIDIA GH200",)),
    # NVIDIA H100 data sheet, PCIe: Gen5 between GPUs.
    Accelerator("h100-pcie", 756 * TERA, 378 * TERA, 80 * GB, 2000 * GB, 64 * GB, 25 * GB, 8, ("NVIDIA H100 PCIe",)),
    # NVIDIA H100 data sheet, NVL: NVLink between two GPUs, PCIe Gen5 beyond.
    Accelerator("h100-nvl", 835 * TERA, 417 * TERA, 94 * GB, 3900 * GB, 64 * GB, 25 * GB, 8, ("NVIDIA H100 NVL",)),
    # NVIDIA H100 data sheet, SXM: fourth-generation NVLink; DGX H100: ConnectX-7 at 400 Gb/s for each GPU.
    Accelerator("h100", 989 * TERA, 494 * TERA, 80 * GB, 3350 * GB, 450 * GB, 50 * GB, 8, ("NVIDIA H100",)),
    # NVIDIA A100 data sheet, SXM 40 GB: third-generation NVLink; DGX A100: ConnectX-6 at 200 Gb/s for each GPU.
    Accelerator(
        "a100-40",
        312 * TERA,
        156 * TERA,
        40 * GB,
        1555 * GB,
        300 * GB,
        25 * GB,
        8,
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
    ),
    # NVIDIA A100 data sheet, SXM 80 GB.
    Accelerator("a100-80", 312 * TERA, 156 * TERA, 80 * GB, 2039 * GB, 300 * GB, 25 * GB, 8, ("NVIDIA A100",)),
    # NVIDIA L40S data sheet: PCIe Gen4 between GPUs.
    Accelerator("l40s", 362 * TERA, 183 * TERA, 48 * GB, 864 * GB, 32 * GB, 25 * GB, 8, ("NVIDIA L40S",)),
    # NVIDIA A40 data sheet: PCIe Gen4 between pairs.
    Accelerator("a40", 150 * TERA, 75 * TERA, 48 * GB, 696 * GB, 32 * GB, 25 * GB, 8, ("NVIDIA A40",)),
    # NVIDIA Ada GPU architecture white paper, appendix A, bfloat16 with float32 accumulation: PCIe Gen4.
    Accelerator(
        "rtx-4090", 165 * TERA, 82.6 * TERA, 24 * GB, 1008 * GB, 32 * GB, 3 * GB, 4, ("NVIDIA GeForce RTX 4090",)
    ),
    # Google Cloud documentation, TPU v6e: 256 chips in a pod, 3200 Gb/s between them.
    Accelerator("tpu-v6e", 918 * TERA, 918 * TERA, 32 * GB, 1600 * GB, 400 * GB, 6 * GB, 256, ("TPU v6",)),
    # Google Cloud documentation, TPU v5e: 256 chips in a pod, 1600 Gb/s between them.
    Accelerator(
        "tpu-v5e", 197 * TERA, 197 * TERA, 16 * GB, 819 * GB, 200 * GB, 6 * GB, 256, ("TPU v5 lite", "TPU v5e")
    ),
    # Google Cloud documentation, TPU v5p: 8960 chips in a pod, 4800 Gb/s between them.
    Accelerator("tpu-v5p", 459 * TERA, 459 * TERA, 95 * GB, 2765 * GB, 600 * GB, 6 * GB, 8960, ("TPU v5",)),
    # Google Cloud documentation, TPU v4: 4096 chips in a pod, 2400 Gb/s between them.
    Accelerator("tpu-v4", 275 * TERA, 275 * TERA, 32 * GB, 1228 * GB, 300 * GB, 6 * GB, 4096, ("TPU v4",)),
)
"""All known accelerators; if several match a device kind, the first one applies."""


def find_accelerator(name: str) -> Accelerator:
    """Return the accelerator with a name such as `h100`, or a JAX device kind such as `NVIDIA H100 80GB HBM3`."""
    found = {accelerator.name: accelerator for accelerator in ACCELERATORS}.get(name.lower()) or of_device_kind(name)
    if found is None:
        names = ", ".join(accelerator.name for accelerator in ACCELERATORS)
        raise ValueError(f"There is no accelerator {name!r}: choose from cpu, {names}.")
    return found


def of_device_kind(kind: str) -> Accelerator | None:
    """Return the accelerator for a JAX device kind; `None` if it is unknown."""
    matches = (accelerator for accelerator in ACCELERATORS if any(map(kind.startswith, accelerator.device_kinds)))
    return next(matches, None)
