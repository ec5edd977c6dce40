"""How an all-reduce of few bytes on GPUs goes: in one hop or two, and in which lines. Pure.

All ranks decide alike: by the bytes, by the number of ranks, and by what they have agreed on at
set-up. The kernels are in csrc/cuda/{ll,ll128,all_reduce}.cuh; no GPU has timed
them.
"""

from __future__ import annotations

import functools

# A store that a peer sees, by NVLink: the latencies of LL, which needs no fence, and of Simple,
# which has one, in NCCL's model (NVIDIA/nccl, src/graph/tuning.cc, rings).
HOP_S, FENCED_HOP_S = 0.6e-6, 3.4e-6
# Bytes per second that a rank sends: 18 links of NVLink 4 (NVIDIA H100 data sheet, one direction).
# One number for all GPUs, so that the ranks agree.
LINK = 450e9
# Largest x in bytes that goes without fences. By LL: 64 rows of 4096 in bf16. By LL128: what
# takes 0.6 MiB from each of 8 sources, in each parity. By the model both win beyond.
TWO_SHOT_BYTES, LL128_BYTES = 512 << 10, 2 << 20


def seconds(way: str, nbytes: int, world: int, bandwidth: float = LINK) -> float:
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
def all_reduce_way(nbytes: int, world: int, ll128: bool, split: int = 0) -> str:
    """Return the way that ``auto`` takes for x of ``nbytes`` (`tpkernels.cuda.all_reduce`): the
    fastest of those without fences, by the model.

    Args:
        ll128: stores of 128 bytes arrive whole at all ranks (symm/nvlink.py).
        split: bytes of all ranks' parts in two hops if that is more, as where parts are whole rows.
    """
    way, most = "ll_two_shot", TWO_SHOT_BYTES
    if ll128:
        way, most = "ll128", LL128_BYTES
    if nbytes > most:
        return "two_shot"
    one_hop = seconds("ll", nbytes, world) <= seconds(way, max(nbytes, split), world)
    return "ll" if one_hop else way
