"""What work costs: flops and bytes of a call, rates of machines, and the seconds that follow. Pure.

Machines: `machines.yaml` has rates by name, and store.py keeps those that `tpkernels tune
--machine` has measured here.

Product and collective: a product takes the longer of its flops and of its operands' and result's
bytes; on a machine that overlaps nothing, their sum. A collective takes a fixed time, a time for
each step of a ring, and the bytes that a rank receives at the rate of the link. Across nodes it
goes in two levels.

Small all-reduces on GPUs: `all_reduce_variant` chooses the number of hops.
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
    """What a call costs the rank with the most work."""

    flops: int  #: of the local matmul
    #: Bytes received from peers. An all-reduce counts as a reduce-scatter and an all-gather:
    #: 2 (W - 1) / W times the tensor. An all-to-all brings (W - 1) / W^2 of it.
    traffic: int
    touched: int  #: bytes read or written, ``traffic`` included: x, weights and results once each

    @classmethod
    def of(cls, problem: Problem, other: int) -> Cost:
        """Return the cost of an evenly split problem. ``other``: the extent of the matmul that is
        not part of it, over all ranks: N of a column-parallel weight, K of a row-parallel one."""
        traffic = problem.nbytes * (problem.world - 1) // problem.world
        if problem.dim is None:
            traffic *= 2
        if isinstance(problem.options, RoutedOptions):  # k rows a token, spread evenly
            part = problem.nbytes // problem.world
            moved = part * problem.options.top_k
            traffic = moved * (problem.world - 1) // problem.world
            return cls(0, traffic, part + moved + traffic)
        if problem.spec.exchanges:  # of which a rank has a part before, and a part after
            part, traffic = problem.nbytes // problem.world, traffic // problem.world
            return cls(0, traffic, 2 * part + traffic)
        if not problem.spec.has_matmul:
            return cls(0, traffic, (2 + problem.spec.normed) * problem.nbytes + traffic)
        rows, width, local = problem.rows, problem.shape[-1], other // problem.world
        elements = (1 + problem.spec.normed) * rows * width + width * local + rows * local
        return cls(
            flops=2 * rows * width * local,
            traffic=traffic,
            touched=elements * problem.dtype.itemsize + traffic,
        )


@dataclass(frozen=True)
class Rates:
    """Rates of one rank while all ranks run the same probe (bench/probes.py)."""

    flops: float  #: per second, of the faster local matmul
    torch_flops: float  #: of torch.matmul
    copy_bytes: float  #: per second, reads plus writes

    def least_seconds(self, cost: Cost) -> float:
        """Return the roofline of a call."""
        return max(cost.flops / self.flops, cost.touched / self.copy_bytes)


# Machines.

MEASURED = "this"  #: the name of the machine that `tpkernels tune --machine` measured
DEFAULTS: Mapping[str, str] = MappingProxyType({"cpu": "zen4-core", "cuda": "h100"})


@dataclass(frozen=True, kw_only=True)
class Link:
    """A class of links."""

    call: float  #: seconds that a collective takes at least
    step: float  #: seconds of each step of a ring over W ranks, which takes W - 1
    bandwidth: float  #: bytes per second that a rank receives

    def __post_init__(self) -> None:
        _check_positive(self.call, self.bandwidth)
        if not self.step >= 0:
            raise ValueError(f"step is {self.step!r}; it must be at least 0")

    def ring_seconds(self, ranks: int, received: float, passes: int = 1) -> float:
        """Return the seconds in which each rank receives so many bytes in each pass."""
        if ranks == 1:
            return 0.0
        return self.call + passes * (self.step * (ranks - 1) + received / self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A machine: devices of one kind, one for each rank."""

    title: str
    device: str  #: "cpu" or "cuda"
    #: Per second that a large product reaches, for elements of 2, 4 and 8 bytes.
    flops: tuple[float, float, float]
    bandwidth: float  #: bytes per second of the device's memory that a large copy reaches
    memory: int  #: bytes of the device's memory; 0: not known
    node: int  #: ranks of a node, with consecutive numbers
    within: Link  #: of a node
    between: Link  #: nodes
    host: Link | None  #: a GPU's link to the host; None: the device is the host
    overlaps: bool  #: whether the device multiplies while it reads its memory or data travels
    source: str  #: where the figures come from

    def __post_init__(self) -> None:
        _check_positive(*self.flops, self.bandwidth, self.node)

    def rate(self, itemsize: int) -> float:
        """Return the flops per second of a product."""
        return self.flops[{2: 0, 4: 1, 8: 2}[itemsize]]

    def ranks_in_a_node(self, ranks: int, stride: int) -> int:
        """Return how many neighbours of a group share a node: the most that divide the group."""
        most = max(1, min(ranks, self.node // stride))
        return max(inner for inner in range(1, most + 1) if ranks % inner == 0)


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


def gpu_named(title: str) -> str:
    """Return the name in `machines.yaml` of a GPU that torch calls ``title``; that of `DEFAULTS` if
    it has none."""
    for name, entry in _data()["machines"].items():
        if entry["device"] == "cuda" and entry["matches"] in title:
            return str(name)
    return DEFAULTS["cuda"]


@functools.cache
def machine_named(name: str) -> Profile:
    """Return a machine of `machines.yaml`.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in machines():
        raise ValueError(
            f"unknown machine '{name}'; choose from {MEASURED}, {', '.join(machines())}"
        )
    entry, links = _data()["machines"][name], _data()["links"]

    def link(place: str) -> Link:
        rates = links[entry[place]]
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


# Products and collectives.


def matmul_seconds(profile: Profile, m: int, k: int, n: int, itemsize: int) -> float:
    """Return the seconds of a local product [m, k] @ [k, n]."""
    multiply = 2 * m * k * n / profile.rate(itemsize)
    move = (m * k + k * n + m * n) * itemsize / profile.bandwidth
    return max(multiply, move) if profile.overlaps else multiply + move


def collective_seconds(
    profile: Profile, nbytes: float, ranks: int, *, stride: int = 1, passes: int = 1
) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of a tensor of ``nbytes``, or, with
    ``passes=2``, of an all-reduce. ``stride``: the distance between the numbers of neighbouring
    ranks."""
    if ranks == 1:
        return 0.0
    inner = profile.ranks_in_a_node(ranks, stride)
    outer = ranks // inner
    # Between nodes a rank exchanges with the ranks of the same local rank; then, within the node,
    # with its neighbours.
    seconds = profile.between.ring_seconds(outer, (outer - 1) / ranks * nbytes, passes)
    return seconds + profile.within.ring_seconds(inner, (inner - 1) / inner * nbytes, passes)


def all_to_all_seconds(profile: Profile, nbytes: float, ranks: int, *, stride: int = 1) -> float:
    """Return the seconds of an all-to-all after which a rank has ``nbytes``. Between nodes the
    pieces go directly from rank to rank."""
    inner = profile.ranks_in_a_node(ranks, stride)
    far, near = ranks - inner, inner - 1
    seconds = profile.between.ring_seconds(far + 1, far / ranks * nbytes)
    return seconds + profile.within.ring_seconds(near + 1, near / ranks * nbytes)


def fused_seconds(
    profile: Profile,
    shape: tuple[int, int, int],
    cut: int,
    communication: float,
    parts: int,
    itemsize: int,
) -> float:
    """Return the seconds of a product [m, k] @ [k, n] fused with a collective that alone takes
    ``communication``.

    Both are cut into ``parts`` along dim ``cut`` (0 or 2) of ``shape``; all but the first chunk of
    one and the last of the other overlap. If that is slower than running them in turn (each chunk
    reads the whole weight), or the machine cannot overlap, they run in turn.
    """
    apart = matmul_seconds(profile, *shape, itemsize) + communication
    if not profile.overlaps:
        return apart
    m, k, n = (ceil_div(size, parts) if i == cut else size for i, size in enumerate(shape))
    multiply, move = matmul_seconds(profile, m, k, n, itemsize), communication / parts
    return min(apart, move + (parts - 1) * max(multiply, move) + multiply)


# An all-reduce of few bytes on GPUs: in one hop or two, by LL or with fences. All
# ranks decide alike: by the bytes, the number of ranks, and what they have agreed on at set-up. The
# kernels are in csrc/cuda/{ll,all_reduce}.cuh; none has been timed over a link.

# A store that a peer sees, by NVLink: the latencies of LL, which needs no fence, and of Simple,
# which has one, in NCCL's model (NVIDIA/nccl, src/graph/tuning.cc, rings).
HOP_S, FENCED_HOP_S = 0.6e-6, 3.4e-6
# Bytes per second that a rank sends: 18 links of NVLink 4 (NVIDIA H100 data sheet, one direction).
# One number for all GPUs, so that the ranks agree.
LINK = 450e9
# Most bytes sent without fences; beyond, "two_shot" is used, though by the model the others would
# still be faster: 64 rows of 4096 in bf16.
WITHOUT_FENCES = {"ll": 512 << 10, "ll_two_shot": 512 << 10}


def hop_seconds(variant: str, nbytes: int, world: int) -> float:
    """Return what the hops of an all-reduce of ``nbytes`` take, without the sum: a latency for
    each, and the bytes that a rank sends."""
    part = (world - 1) / world
    hops, latency, sent = {
        "ll": (1, HOP_S, 2.0 * (world - 1)),
        "ll_two_shot": (2, HOP_S, 4.0 * part),
        "two_shot": (2, FENCED_HOP_S, 2.0 * part),
    }[variant]
    return hops * latency + sent * nbytes / LINK


@functools.lru_cache(maxsize=4096)
def all_reduce_variant(nbytes: int, world: int, variants: frozenset[str], rows: int = 0) -> str:
    """Return the one of ``variants`` that ``auto`` selects for x of ``nbytes``
    (`cuda.prepare_all_reduce`): for few bytes the fastest LL variant by the model. ``rows``: number
    of rows of x, if two-shot segments are made of full rows."""
    split = world * ceil_div(rows, world) * nbytes // rows if rows else nbytes

    def seconds(variant: str) -> float:
        return hop_seconds(variant, nbytes if variant == "ll" else split, world)

    fast = [
        variant
        for variant, most in WITHOUT_FENCES.items()
        if variant in variants and nbytes <= most
    ]
    if fast or "two_shot" not in variants:
        return min(
            fast or [variant for variant in WITHOUT_FENCES if variant in variants], key=seconds
        )
    return "two_shot"
