"""What each algorithm would take on GPUs of one host, by their data sheets. Pure.

Nothing here was measured with this package, and nothing is chosen by it: `tpkernels explain` shows
the predictions next to measured times.

Model:
- A product takes the longer of its tiles, in whole waves over the multiprocessors, and of its
  operands' and result's bytes.
- `unfused` and `ring` go through NCCL: the product and the collective of the machine's link class,
  one after the other. For `ring` the product is cut by ranks and overlaps the transfers.
- `direct` is the product, then one kernel. Up to `LL_BYTES` each word carries its flag:
  twice the bytes, one hop. An all-reduce goes as in hops.py, in words. Beyond it data is followed
  by a fence and a word. A reduction reads the slots of all ranks from memory.
- `pipelined` is one product per rank beside the copy engines, each copy with its start. Two
  products share their waves. Then the partials are summed.
- `fused` is one grid: the first tiles of a peer are exposed, the rest of the smaller of product and
  transfer is hidden. The rows of a gather are brought by `FETCHERS` multiprocessors, each with a
  ring of reads in flight, or, where shards are large, by copy engines, which leave `ROOM` to the
  kernels that wait for them. A reduction ends with the sum of its slots, which nothing hides.

Left out: the time in which the host launches, and that of a kernel before its first store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from tpkernels.integers import ceil_div
from tpkernels.planning import hops
from tpkernels.planning.hops import FENCED_HOP_S, HOP_S
from tpkernels.planning.machines import Profile
from tpkernels.planning.problem import Problem
from tpkernels.planning.rates import collective_seconds

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
# Of `fused`: kernels/configs.py, kernels/all_gather_matmul.py, algorithms/fused.py.
FETCHERS, PIECE_BYTES, RING_BYTES, ROOM, COPY_ENGINE_BYTES = 12, 128 << 10, 64 << 10, 1, 4 << 20
READ_S = 2 * HOP_S  # a read from a peer: a hop each way
# The tile loop of kernels/matmul.py relative to cuBLAS. Not measured; 0.9 is assumed.
OWN_PRODUCT = 0.9


@dataclass(frozen=True)
class _Call:
    """A call of an op on GPUs of one kind that are connected all to all."""

    profile: Profile
    problem: Problem
    other: int  # the extent of the matmul on a rank that is not part of the problem

    @property
    def all_reduces(self) -> bool:
        return self.problem.dim is None

    @property
    def ranks(self) -> int:
        return self.problem.world

    @property
    def received(self) -> float:
        """Return the seconds in which a rank receives what it lacks of the whole tensor, once."""
        share = self.problem.nbytes * (self.ranks - 1) / self.ranks
        return share / self.profile.within.bandwidth

    @property
    def sum(self) -> float:
        """Return the seconds in which a rank reads the partials of its rows."""
        return 0.0 if self.problem.spec.gathers else self.problem.nbytes / self.profile.bandwidth

    def product(
        self, parts: int = 1, *, at_once: int = 1, without: int = 0, rate: float = 1.0
    ) -> float:
        """Return the seconds of the local product, or of one of ``parts`` of its rows.

        Args:
            at_once: parts that share the multiprocessors.
            without: multiprocessors that do something else.
            rate: relative to the vendor's.
        """
        problem, profile = self.problem, self.profile
        if not problem.spec.has_matmul:
            return 0.0
        m, width = ceil_div(problem.rows, parts), problem.shape[-1]
        k, n = (width, self.other) if problem.spec.gathers else (self.other, width)
        units = profile.multiprocessors - without
        waves = ceil_div(at_once * ceil_div(m, TILE[0]) * ceil_div(n, TILE[1]), units) / at_once
        flops = 2 * prod(TILE) * k * waves * profile.multiprocessors
        multiply = flops / profile.rate(problem.dtype.itemsize) / rate
        move = (m * k + k * n + m * n) * problem.dtype.itemsize / profile.bandwidth
        return max(multiply, move)


def _unfused(call: _Call) -> float:
    passes = 2 if call.all_reduces else 1
    travel = collective_seconds(call.profile, call.problem.nbytes, call.ranks, passes=passes)
    return call.product() + (LAUNCH_S if call.problem.spec.has_matmul else 0.0) + travel


def _ring(call: _Call) -> float:
    link, steps = call.profile.within, call.ranks - 1
    passes = 2 if call.all_reduces else 1
    part = call.product(call.ranks) + LAUNCH_S
    transfer = link.call / max(steps, 1) + link.step + call.received / max(steps, 1)
    again = (passes - 1) * steps * transfer
    return part + steps * max(part, transfer) + call.sum + again


def _direct(call: _Call) -> float:
    seconds = call.product() + (LAUNCH_S if call.problem.spec.has_matmul else 0.0)
    nbytes = call.problem.nbytes
    if call.all_reduces:
        way = hops.all_reduce_way(nbytes, call.ranks, ll128=False)
        seconds += hops.seconds(way, nbytes, call.ranks, call.profile.within.bandwidth)
        return seconds + (call.sum if way == "two_shot" else 0.0)
    if nbytes <= LL_BYTES:
        return seconds + HOP_S + 2 * call.received
    return seconds + FENCED_HOP_S + call.received + call.sum


def _pipelined(call: _Call) -> float:
    peers = call.ranks - 1
    part = call.product(call.ranks, at_once=min(2, call.ranks)) + LAUNCH_S
    copy = COPY_S + call.received / max(peers, 1)
    seconds = part + peers * max(part, copy)
    if call.problem.spec.gathers:
        return seconds
    ends = copy + LAUNCH_S + call.sum  # the last partial, and the sum
    return seconds + ends + (FENCED_HOP_S + call.received if call.all_reduces else 0.0)


def _fused(call: _Call) -> float:
    peers, received, taken, begin = max(call.ranks - 1, 1), call.received, 0, FENCED_HOP_S
    if call.problem.spec.gathers:
        shard = ceil_div(call.problem.nbytes, call.ranks)
        if shard >= COPY_ENGINE_BYTES:
            taken, begin = ROOM, begin + COPY_S
        else:
            taken = min(FETCHERS, peers * ceil_div(shard, PIECE_BYTES))
            piece_s = PIECE_BYTES / RING_BYTES * READ_S + HOP_S  # with its word
            received = max(received, peers * shard / PIECE_BYTES * piece_s / taken)
    elif call.all_reduces and call.problem.nbytes <= 2 * LL_BYTES:  # one-shot
        received *= call.ranks
    product = call.product(rate=OWN_PRODUCT, without=taken)
    hidden = max(product, received) + min(product, received) / peers
    seconds = begin + hidden + call.sum
    return seconds + (FENCED_HOP_S + call.received if call.all_reduces else 0.0)


_ALGORITHMS = {
    "unfused": _unfused,
    "ring": _ring,
    "direct": _direct,
    "pipelined": _pipelined,
    "fused": _fused,
}


def predicted(problem: Problem, other: int, profile: Profile) -> Mapping[str, float]:
    """Return the seconds of each algorithm that has something to do for a problem.

    Args:
        other: the extent of the matmul that is not part of the problem, over all ranks.
        profile: of GPUs; all ranks of the problem are in one node.
    """
    call = _Call(profile, problem, ceil_div(other, problem.world))
    alone = ("unfused", "ring", "direct")  # what can be done without a matmul
    return {
        name: seconds(call)
        for name, seconds in _ALGORITHMS.items()
        if problem.spec.has_matmul or name in alone
    }
