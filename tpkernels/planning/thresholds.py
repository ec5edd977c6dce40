"""Where one algorithm becomes faster than another, as far as it is known before anything has been
measured on the machine. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

# Minimum bytes of the communicated tensor, and rows per rank of the matmul, at which `ring` beats
# `unfused` between ranks that share no memory. Smaller tensors are bound by latency, and `ring`
# sends more messages. AMD EPYC Zen 3, 2 cores, 2 to 4 network namespaces, gloo, 2026-11-21: `python
# -m benchmarks.hosts` (benchmarks/results/cpu-2core-zen3-hosts.md).
# From there on `hierarchical` is 1.01x to 1.68x as fast as `unfused` and 1.00x to 1.27x as fast as
# `ring` for ops with a matmul. AMD EPYC Zen 4, 2 cores, 2 network namespaces of 2 ranks, gloo,
# 2026-11-22: the same command (benchmarks/results/cpu-2core-hierarchical.md).
RING_MIN_BYTES = 8 << 20
RING_MIN_ROWS = 256

# Fewest rows of a rank with which a split is tried. With fewer, the time is that of streaming the
# weight, once for each part.
TRIED_MIN_ROWS = 16


@dataclass(frozen=True)
class _Kind:
    """A kind of CPU: an instruction set that multiplies these dtypes, and the minimum rows per rank
    at which splitting the matmul pays off. With fewer rows the matmul is bound by streaming the
    weight, and a split streams it once per part. ``splits_all_reduce``: whether it also pays off
    before an all-reduce, whose results are copied between the ranks either way."""

    instructions: str
    dtypes: frozenset[torch.dtype]
    pipeline_min_rows: int
    splits_all_reduce: bool = True


_ANY = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})

# The first that fits counts.
_KINDS = (
    # Intel Xeon with AMX, 2 cores, 480 MB L3, 2 ranks x 1 thread, 2026-11: `tpkernels bench`,
    # (M, 4096, 4096) bf16: with 256, 512, 1024 and 2048 rows a rank `pipelined` takes 1.14 to 1.18,
    # 1.06 to 1.12, 1.0 and 0.88 of the time of `direct`.
    _Kind("amx_bf16", frozenset({torch.bfloat16}), 1024),
    # AMD EPYC Zen 4, 2 cores, 32 MB L3, 2 ranks x 1 thread, 2026-11-22
    # (benchmarks/results/cpu-2core-auto.md): with 128, 256, 512 and 1024 rows a rank `pipelined`
    # takes 0.90 to 1.47, 1.03 to 1.21, 0.73 to 1.11 and 0.90 to 1.06 of the time of `direct`,
    # in the median 1.16, 1.11, 0.97 and 1.01. Zen 5, the same, 2026-11-23: with 1024 and 2048 rows
    # a rank 0.99 to 1.06 and, before an all-reduce, 1.04 to 1.13.
    _Kind("avx512_bf16", frozenset({torch.bfloat16}), 1024, splits_all_reduce=False),
    # AMD EPYC Zen 3, 2 ranks x 1 thread, 2026-11-21: `tpkernels bench` (benchmarks/results).
    _Kind("avx2", _ANY, 256),
)
_UNKNOWN = _Kind("", _ANY, 1024)  # `direct` loses less where it is wrong
INSTRUCTIONS = frozenset(kind.instructions for kind in _KINDS)


def _kind_of(dtype: torch.dtype, instructions: Collection[str]) -> _Kind:
    for kind in _KINDS:
        if kind.instructions in instructions and dtype in kind.dtypes:
            return kind
    return _UNKNOWN


def pipeline_min_rows(dtype: torch.dtype, instructions: Collection[str]) -> int:
    """Return the minimum rows per rank for `pipelined` on a CPU with these instructions."""
    return _kind_of(dtype, instructions).pipeline_min_rows


def splits_all_reduce(dtype: torch.dtype, instructions: Collection[str]) -> bool:
    """Return whether `pipelined` pays off before an all-reduce, with these rows or more."""
    return _kind_of(dtype, instructions).splits_all_reduce
