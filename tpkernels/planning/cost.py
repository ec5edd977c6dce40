"""Cost model: flops and bytes of a call, rates of machines, and the predicted seconds. Pure.

Machines: `machines.yaml` contains rates by name. store.py keeps the rates that `tpkernels tune
--machine` measured on this machine.

Matmul: the longer of the compute time (flops) and the memory time (bytes of operands and result).
On a machine without overlap: their sum. Collective: a fixed time, a time per ring step, and the
received bytes at the rate of the link. Across nodes a collective has two levels.

Small all-reduces on GPUs: `all_reduce_variant` selects one-shot or two-shot.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpkernels.common.integers import ceil_div
from tpkernels.planning.op_spec import RoutedOptions
from tpkernels.planning.problem import Problem

# Calls.


@dataclass(frozen=True)
class Cost:
    """Cost of a call on the rank with the most work."""

    flops: int  #: flops of the local matmul
    #: Bytes received from peers. An all-reduce counts as a reduce-scatter and an all-gather:
    #: 2 (W - 1) / W times the tensor. An all-to-all receives (W - 1) / W^2 of it.
    traffic: int
    touched: int  #: bytes read or written, including ``traffic``: x, weights, results, once each

    @classmethod
    def of(cls, problem: Problem, sharded_size: int) -> Cost:
        """Return the cost of an evenly split problem. ``sharded_size``: the global size of the
        weight dim that is sharded, N of a column-parallel or K of a row-parallel weight."""
        traffic = problem.nbytes * (problem.world - 1) // problem.world
        if problem.dim is None:
            traffic *= 2
        if isinstance(problem.options, RoutedOptions):  # k rows per token, evenly distributed
            tokens = problem.nbytes // problem.world
            routed = tokens * problem.options.top_k
            traffic = routed * (problem.world - 1) // problem.world
            return cls(0, traffic, tokens + routed + traffic)
        if problem.spec.exchanges:  # a rank reads a shard and writes a shard
            shard, traffic = problem.nbytes // problem.world, traffic // problem.world
            return cls(0, traffic, 2 * shard + traffic)
        if not problem.spec.has_matmul:
            return cls(0, traffic, (2 + problem.spec.normed) * problem.nbytes + traffic)
        rows, width, local = problem.rows, problem.shape[-1], sharded_size // problem.world
        elements = (1 + problem.spec.normed) * rows * width + width * local + rows * local
        return cls(
            flops=2 * rows * width * local,
            traffic=traffic,
            touched=elements * problem.dtype.itemsize + traffic,
        )


@dataclass(frozen=True)
class Rates:
    """Rates of one rank while all ranks run the same probe (bench/probes.py)."""

    flops: float  #: per second, with the faster local matmul
    torch_flops: float  #: per second, with torch.matmul
    copy_bytes: float  #: per second, reads plus writes

    def roofline_seconds(self, cost: Cost) -> float:
        """Return the roofline time of a call."""
        return max(cost.flops / self.flops, cost.touched / self.copy_bytes)


# Machines.

MEASURED = "this"  #: the name of the machine that `tpkernels tune --machine` measured
DEFAULTS: Mapping[str, str] = MappingProxyType({"cpu": "zen4-core", "cuda": "h100"})


@dataclass(frozen=True, kw_only=True)
class Link:
    """A class of links."""

    call: float  #: minimum seconds of a collective
    step: float  #: seconds per ring step; a ring over W ranks has W - 1 steps
    bandwidth: float  #: bytes per second that a rank receives

    def __post_init__(self) -> None:
        _check_positive(self.call, self.bandwidth)
        if not self.step >= 0:
            raise ValueError(f"step is {self.step!r}; it must be at least 0")

    def ring_seconds(self, ranks: int, received: float, passes: int = 1) -> float:
        """Return the seconds of a ring in which every rank receives ``received`` bytes per pass."""
        if ranks == 1:
            return 0.0
        return self.call + passes * (self.step * (ranks - 1) + received / self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine: identical devices, one per rank."""

    title: str
    device: str  #: "cpu" or "cuda"
    #: Flops per second of a large matmul, for elements of 2, 4 and 8 bytes.
    flops: tuple[float, float, float]
    bandwidth: float  #: device memory bytes per second of a large copy, reads plus writes
    memory: int  #: bytes of device memory; 0: unknown
    node: int  #: consecutive ranks per node
    within: Link  #: link within a node
    between: Link  #: link between nodes
    host: Link | None  #: link between a GPU and the host; None: the device is the host
    overlaps: bool  #: whether compute overlaps with memory access and with communication
    source: str  #: source of the figures

    def __post_init__(self) -> None:
        _check_positive(*self.flops, self.bandwidth, self.node)

    def rate(self, itemsize: int) -> float:
        """Return the flops per second of a matmul with elements of ``itemsize`` bytes."""
        return self.flops[{2: 0, 4: 1, 8: 2}[itemsize]]

    def ranks_per_node(self, ranks: int, stride: int) -> int:
        """Return the number of neighbouring ranks that share a node: the largest number that
        divides the group. ``stride``: distance between neighbouring ranks."""
        limit = max(1, min(ranks, self.node // stride))
        return max(inner for inner in range(1, limit + 1) if ranks % inner == 0)


def _check_positive(*rates: float) -> None:
    for rate in rates:
        if not rate > 0:
            raise ValueError(f"a rate is {rate!r}; it must be positive")


@functools.cache
def _data() -> dict[str, dict[str, Any]]:
    import yaml

    return yaml.safe_load(Path(__file__).with_name("machines.yaml").read_text())


def machines() -> tuple[str, ...]:
    """Return the names in `machines.yaml`."""
    return tuple(_data()["machines"])


def find_gpu_preset_name(title: str) -> str:
    """Return the `machines.yaml` name of a GPU, given its torch name. GPUs that the file does not
    contain get the name in `DEFAULTS`."""
    for name, entry in _data()["machines"].items():
        if entry["device"] == "cuda" and entry["matches"] in title:
            return str(name)
    return DEFAULTS["cuda"]


@functools.cache
def get_preset(name: str) -> Profile:
    """Return a machine of `machines.yaml`.

    Raises:
        ValueError: the file does not contain ``name``.
    """
    if name not in machines():
        raise ValueError(
            f"unknown machine '{name}'; choose from {MEASURED}, {', '.join(machines())}"
        )
    entry, links = _data()["machines"][name], _data()["links"]

    def link(field: str) -> Link:
        rates = links[entry[field]]
        call, step = (1e-6 * rates[name] for name in ("call_us", "step_us"))
        return Link(call=call, step=step, bandwidth=1e9 * rates["gb_per_s"])

    compute, copy = entry["efficiency"]
    flops16, flops32, flops64 = (1e12 * compute * entry["tflops"][bits] for bits in (16, 32, 64))
    return Profile(
        title=entry["title"],
        device=entry["device"],
        flops=(flops16, flops32, flops64),
        bandwidth=1e9 * copy * entry["memory_gb_per_s"],
        memory=int(1e9 * entry["memory_gb"]),
        node=entry["node"],
        within=link("within"),
        between=link("between"),
        host=link("host") if "host" in entry else None,
        overlaps=entry["overlaps"],
        source=entry["source"],
    )


# Matmuls and collectives.


def matmul_seconds(profile: Profile, m: int, k: int, n: int, itemsize: int) -> float:
    """Return the seconds of a local matmul [m, k] @ [k, n]."""
    multiply = 2 * m * k * n / profile.rate(itemsize)
    move = (m * k + k * n + m * n) * itemsize / profile.bandwidth
    return max(multiply, move) if profile.overlaps else multiply + move


def collective_seconds(
    profile: Profile, nbytes: float, ranks: int, *, stride: int = 1, passes: int = 1
) -> float:
    """Return the seconds of an all-gather or reduce-scatter of a tensor of ``nbytes`` or, with
    ``passes=2``, of an all-reduce. ``stride``: distance between neighbouring ranks."""
    if ranks == 1:
        return 0.0
    inner = profile.ranks_per_node(ranks, stride)
    outer = ranks // inner
    # First between nodes, among ranks with equal local rank; then within the node.
    seconds = profile.between.ring_seconds(outer, (outer - 1) / ranks * nbytes, passes)
    return seconds + profile.within.ring_seconds(inner, (inner - 1) / inner * nbytes, passes)


def all_to_all_seconds(profile: Profile, nbytes: float, ranks: int, *, stride: int = 1) -> float:
    """Return the seconds of an all-to-all with an output of ``nbytes`` per rank. Between nodes each
    rank sends its slices directly to the destination ranks."""
    inner = profile.ranks_per_node(ranks, stride)
    far, near = ranks - inner, inner - 1
    seconds = profile.between.ring_seconds(far + 1, far / ranks * nbytes)
    return seconds + profile.within.ring_seconds(near + 1, near / ranks * nbytes)


def fused_seconds(
    profile: Profile,
    shape: tuple[int, int, int],
    split_dim: int,
    communication: float,
    chunks: int,
    itemsize: int,
) -> float:
    """Return the seconds of a matmul [m, k] @ [k, n] fused with a collective.

    Both are split into chunks, and chunk i of one operation overlaps chunk i + 1 of the other. The
    first chunk of the first operation and the last chunk of the second do not overlap. Each matmul
    chunk reads the full weight. If the sequential program is faster, or if the machine cannot
    overlap, the result is the sequential time.

    Args:
        shape: m, k, n.
        split_dim: dim of ``shape`` that is split into chunks, 0 or 2.
        communication: seconds of the unfused collective.
        chunks: number of chunks.
    """
    sequential = matmul_seconds(profile, *shape, itemsize) + communication
    if not profile.overlaps:
        return sequential
    m, k, n = (ceil_div(size, chunks) if i == split_dim else size for i, size in enumerate(shape))
    multiply, move = matmul_seconds(profile, m, k, n, itemsize), communication / chunks
    return min(sequential, move + (chunks - 1) * max(multiply, move) + multiply)


# Small all-reduces on GPUs: one-shot or two-shot, with LL or with fences. All ranks select the same
# variant, from the bytes, the world size and values that they exchanged at set-up. The kernels are
# in csrc/cuda/{ll,all_reduce}.cuh. Their times over a link have not been measured.

# Seconds until a peer sees a store over NVLink: the latencies of LL (no fence) and Simple (fence)
# in the NCCL model for rings (NVIDIA/nccl, src/graph/tuning.cc).
HOP_S, FENCED_HOP_S = 0.6e-6, 3.4e-6
# Bytes per second that a rank sends: 18 links of NVLink 4 (NVIDIA H100 data sheet, one direction).
# The same value for all GPUs, so that all ranks select the same variant.
LINK_BYTES_PER_S = 450e9
# Maximum bytes for LL: 64 rows of 4096 in bf16. Larger tensors use "two_shot", although LL would
# still be faster according to the model.
MAX_LL_BYTES = {"ll": 512 << 10, "ll_two_shot": 512 << 10}


def hop_seconds(variant: str, nbytes: int, world: int) -> float:
    """Return the communication seconds of an all-reduce of ``nbytes``, without the reduction: one
    latency per hop, and the sent bytes at the rate of the link."""
    fraction = (world - 1) / world
    hops, latency, sent = {
        "ll": (1, HOP_S, 2.0 * (world - 1)),
        "ll_two_shot": (2, HOP_S, 4.0 * fraction),
        "two_shot": (2, FENCED_HOP_S, 2.0 * fraction),
    }[variant]
    return hops * latency + sent * nbytes / LINK_BYTES_PER_S


@functools.lru_cache(maxsize=4096)
def all_reduce_variant(nbytes: int, world: int, variants: frozenset[str], rows: int = 0) -> str:
    """Return the all-reduce variant that ``auto`` selects for x of ``nbytes``
    (`cuda.prepare_all_reduce`). For few bytes it is the fastest LL variant according to the model.

    Args:
        variants: the variants to select from.
        rows: number of rows of x, if two-shot segments consist of full rows; otherwise 0.
    """
    padded = world * ceil_div(rows, world) * nbytes // rows if rows else nbytes

    def seconds(variant: str) -> float:
        return hop_seconds(variant, nbytes if variant == "ll" else padded, world)

    fast = [
        variant
        for variant, max_bytes in MAX_LL_BYTES.items()
        if variant in variants and nbytes <= max_bytes
    ]
    if fast or "two_shot" not in variants:
        return min(
            fast or [variant for variant in MAX_LL_BYTES if variant in variants], key=seconds
        )
    return "two_shot"
