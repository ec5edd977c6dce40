"""What work costs: flops and bytes of a call, rates of machines, and the seconds that follow. Pure.

Machines: `machines.yaml` has rates by name, and store.py keeps those that `tpkernels tune
--machine` has measured here.

Product and collective: a product takes the longer of its flops and of its operands' and result's
bytes; on a machine that overlaps nothing, their sum. A collective takes a fixed time, a time for
each step of a ring, and the bytes that a rank receives at the rate of the link. Across nodes it
goes in two levels.

Algorithms on GPUs of one host (`predict_seconds`), by their data sheets. Nothing of it was measured
with this package, and nothing is chosen by it: `explain` shows it next to measured times. Left out:
the time in which the host launches, and that of a kernel before its first store.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpkernels.integers import ceil_div
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
    copy_over_cache: float  #: bytes of one copy over the size of the last-level cache

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
    multiprocessors: int = 0  #: of a GPU

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
            raise ValueError(f"a rate is {rate!r}")


@functools.cache
def _data() -> Any:
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
        multiprocessors=entry.get("multiprocessors", 0),
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


# An all-reduce of few bytes on GPUs: in one hop or two, by LL or LL128. All ranks
# decide alike: by the bytes, the number of ranks, and what they have agreed on at set-up. The
# kernels are in csrc/cuda/{ll,ll128,all_reduce}.cuh; no GPU has timed them.

# A store that a peer sees, by NVLink: the latencies of LL, which needs no fence, and of Simple,
# which has one, in NCCL's model (NVIDIA/nccl, src/graph/tuning.cc, rings).
HOP_S, FENCED_HOP_S = 0.6e-6, 3.4e-6
# Bytes per second that a rank sends: 18 links of NVLink 4 (NVIDIA H100 data sheet, one direction).
# One number for all GPUs, so that the ranks agree.
LINK = 450e9
# Most bytes sent without fences; beyond, "two_shot" is used, though by the model the others would
# still be faster. LL: 64 rows of 4096 in bf16. LL128: 0.6 MiB of slots for each of 8 sources and
# each parity.
WITHOUT_FENCES = {"ll": 512 << 10, "ll_two_shot": 512 << 10, "ll128": 2 << 20}


def hop_seconds(way: str, nbytes: int, world: int, bandwidth: float = LINK) -> float:
    """Return what the hops of an all-reduce of ``nbytes`` take, without the sum: a latency for
    each, and the bytes that a rank sends."""
    part = (world - 1) / world
    hops, latency, sent = {
        "ll": (1, HOP_S, 2.0 * (world - 1)),
        "ll_two_shot": (2, HOP_S, 4.0 * part),
        "ll128": (2, HOP_S, 16 / 7 * part),
        "two_shot": (2, FENCED_HOP_S, 2.0 * part),
    }[way]
    return hops * latency + sent * nbytes / bandwidth


@functools.lru_cache(maxsize=4096)
def all_reduce_way(nbytes: int, world: int, ways: frozenset[str], split: int = 0) -> str:
    """Return the way that ``auto`` takes for x of ``nbytes`` (`tpkernels.cuda.all_reduce`), out of
    ``ways``: the fastest of those without fences, by the model, for few bytes. ``split``: bytes of
    all ranks' parts in two hops if that is more, as where parts are whole rows."""

    def seconds(way: str) -> float:
        return hop_seconds(way, nbytes if way == "ll" else max(nbytes, split), world)

    fast = [way for way, most in WITHOUT_FENCES.items() if way in ways and nbytes <= most]
    if fast or "two_shot" not in ways:
        return min(fast or [way for way in WITHOUT_FENCES if way in ways], key=seconds)
    return "two_shot"


# The algorithms on GPUs.

# Rows and columns of the tile of one multiprocessor. cuBLAS's own heuristics are not modelled.
TILE = 128, 256
# From the end of a kernel to the begin of the next in a stream: 3.8 us a kernel of 2.9 us, V100
# ("Getting Started with CUDA Graphs", NVIDIA's technical blog, 2019).
LAUNCH_S = 0.9e-6
# The start of a copy between GPUs by a copy engine: the order of what CUDA's sample
# p2pBandwidthLatencyTest prints with NVSwitch. From memory.
COPY_S = 2.5e-6
# A tensor up to this size travels with its flags: NCCL takes LL for messages of that order.
LL_BYTES = 128 << 10
# The constants of `fused`, as in:
FETCHERS = 12  # kernels/configs.py
PIECE_BYTES = 128 << 10  # kernels/configs.py
RING_BYTES = 64 << 10  # kernels/all_gather_matmul.py
FREE_SMS = 1  # kernels/all_gather_matmul.py: for kernels that wait for the peers
COPY_ENGINE_BYTES = 4 << 20  # algorithms/fused.py
READ_S = 2 * HOP_S  # a read from a peer: a hop each way
# The tile loop of kernels/matmul.py relative to cuBLAS. Not measured; 0.9 is assumed.
TRITON_EFFICIENCY = 0.9


def predict_seconds(problem: Problem, other: int, profile: Profile) -> Mapping[str, float]:
    """Return the seconds of each algorithm that has something to do for a problem on GPUs of one
    node, connected all to all. ``other``: the extent of the matmul that is not part of it, over all
    ranks."""
    ranks, nbytes, spec, link = problem.world, problem.nbytes, problem.spec, profile.within
    peers, passes = max(ranks - 1, 1), 2 if spec.keeps_sum else 1
    other, multiplies = ceil_div(other, ranks), spec.has_matmul
    # Seconds in which a rank receives what it lacks of the whole tensor, reads the partials of its
    # rows, and, of an all-reduce, gathers the sums.
    received = nbytes * (ranks - 1) / ranks / link.bandwidth
    sums = 0.0 if spec.gathers else nbytes / profile.bandwidth
    gather_sums = FENCED_HOP_S + received if spec.keeps_sum else 0.0

    def product(
        parts: int = 1, *, at_once: int = 1, reserved_sms: int = 0, rate: float = 1.0
    ) -> float:
        """Return the seconds of the local product, or of one of ``parts`` of its rows: the longer
        of its tiles, in whole waves over the multiprocessors, and of its bytes. ``at_once`` parts
        share the multiprocessors, of which ``reserved_sms`` do something else; ``rate`` is relative
        to the vendor's."""
        if not multiplies:
            return 0.0
        m, width = ceil_div(problem.rows, parts), problem.shape[-1]
        k, n = (width, other) if spec.gathers else (other, width)
        units = profile.multiprocessors - reserved_sms
        waves = ceil_div(at_once * ceil_div(m, TILE[0]) * ceil_div(n, TILE[1]), units) / at_once
        flops = 2 * prod(TILE) * k * waves * profile.multiprocessors
        multiply = flops / profile.rate(problem.dtype.itemsize) / rate
        return max(multiply, (m * k + k * n + m * n) * problem.dtype.itemsize / profile.bandwidth)

    def direct() -> float:
        """Return the seconds of one kernel: with flags in the words, twice the bytes and one hop;
        or data, a fence and a word. A reduction reads the slots of all ranks from memory."""
        if spec.keeps_sum:
            way = all_reduce_way(nbytes, ranks, frozenset({"ll", "ll_two_shot", "two_shot"}))
            hops = hop_seconds(way, nbytes, ranks, link.bandwidth)
            return hops + (sums if way == "two_shot" else 0.0)
        if nbytes <= LL_BYTES:
            return HOP_S + 2 * received
        return FENCED_HOP_S + received + sums

    def fused() -> float:
        """Return the seconds with all but a peer's first tiles overlapped: the smaller of product
        and transfer is hidden. `FETCHERS` multiprocessors bring the rows of a gather, or, where
        shards are large, copy engines, beside which `FREE_SMS` stay free. Nothing hides the sum of
        a reduction's slots."""
        transfer, reserved, begin = received, 0, FENCED_HOP_S
        if spec.gathers:
            shard = ceil_div(nbytes, ranks)
            if shard >= COPY_ENGINE_BYTES:
                reserved, begin = FREE_SMS, begin + COPY_S
            else:
                reserved = min(FETCHERS, peers * ceil_div(shard, PIECE_BYTES))
                piece_s = PIECE_BYTES / RING_BYTES * READ_S + HOP_S  # with its word
                transfer = max(transfer, peers * shard / PIECE_BYTES * piece_s / reserved)
        elif spec.keeps_sum and nbytes <= 2 * LL_BYTES:  # one-shot
            transfer *= ranks
        seconds = product(rate=TRITON_EFFICIENCY, reserved_sms=reserved)
        hidden = max(seconds, transfer) + min(seconds, transfer) / peers
        return begin + hidden + sums + gather_sums

    launched = product() + (LAUNCH_S if multiplies else 0.0)
    part, step = product(ranks) + LAUNCH_S, link.call / peers + link.step + received / peers
    seconds = {
        "unfused": launched + collective_seconds(profile, nbytes, ranks, passes=passes),
        # The product is cut by ranks; the parts overlap NCCL's transfers.
        "ring": part + (ranks - 1) * (max(part, step) + (passes - 1) * step) + sums,
        "direct": launched + direct(),
    }
    if multiplies:
        # One product per rank, two of which share their waves, beside the copy engines; then the
        # last partial is copied, and all are summed.
        part = product(ranks, at_once=min(2, ranks)) + LAUNCH_S
        copy = COPY_S + received / peers
        last = 0.0 if spec.gathers else copy + LAUNCH_S + sums + gather_sums
        seconds["pipelined"] = part + (ranks - 1) * max(part, copy) + last
        seconds["fused"] = fused()
    return seconds
