"""The key of measured times: the device, the placement of the ranks, and the versions."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tpkernels import _C
from tpkernels.common import nvml
from tpkernels.common.version import VERSION

_CACHE_BYTES = 32 << 20  # assumed if the machine does not report its cache


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device and a topology, as seen by rank 0 of a group.

    ``cores`` is the number of cores that rank 0 may use, ``threads`` the number of its intra-op
    threads, ``hosts`` the number of distinct host names. The kind "cuda" has ``gpus`` instead of
    cores and threads, because times on GPUs do not depend on cores and threads.
    """

    kind: str  #: "cpu" or "cuda"
    device: str
    vector_unit: str = ""
    cores: int = 0
    threads: int = 0
    ranks: int
    hosts: int
    shared_memory: bool
    gpus: str | None = None  #: links between the GPUs, driver and NCCL versions

    @property
    def facts(self) -> dict[str, object]:
        """Return the fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def file_name(self) -> str:
        """Return a name that is unique to this machine and these versions."""
        identity = repr((sorted(self.facts.items()), sorted(versions().items())))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        return f"tuning-{self.kind}-{self.ranks}-ranks-{digest}.json"


def this_machine(
    kind: str, ranks: int, hosts: int, shared_memory: bool, *, threads: int | None = None
) -> Machine:
    """Describe this machine. ``threads`` defaults to ``torch.get_num_threads()``."""
    if kind == "cuda":
        return Machine(
            kind=kind,
            device=torch.cuda.get_device_name(),
            ranks=ranks,
            hosts=hosts,
            shared_memory=shared_memory,
            gpus=_gpus(),
        )
    return Machine(
        kind=kind,
        device=processor(),
        vector_unit=_C.host.vector_unit(),
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads() if threads is None else threads,
        ranks=ranks,
        hosts=hosts,
        shared_memory=shared_memory,
    )


@functools.cache
def _gpus() -> str:
    """Describe the NVLinks, driver and NCCL of this host."""
    gpus = [nvml.get_uuid(number) for number in range(torch.cuda.device_count())]
    driver = "unknown"
    try:
        driver = nvml.driver_version()
        pairs = sum(len(nvml.find_unlinked(gpu, gpus[i + 1 :])) for i, gpu in enumerate(gpus))
        links = f"{len(gpus)} GPUs, {pairs} pairs without NVLink"
    except nvml.ERRORS as error:
        links = f"{len(gpus)} GPUs, links unknown: {type(error).__name__}"
    return f"{links}; driver {driver}, NCCL {nccl_version()}"


def nccl_version() -> str:
    """Return the version of the NCCL in torch, or "none"."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, ImportError, RuntimeError):  # torch built without NCCL
        return "none"


def processor() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def last_level_cache_bytes(device: str) -> int:
    """Return the size of the largest CPU cache or, for "cuda", of the L2 cache of the current
    GPU."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        size = file.read_text().strip()
        if size.endswith("K") and size[:-1].isdecimal():
            sizes.append(int(size[:-1]) << 10)
    return max(sizes, default=_CACHE_BYTES)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of the packages that times depend on."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {"tpkernels": VERSION, "torch": str(torch.__version__), "triton": triton}
