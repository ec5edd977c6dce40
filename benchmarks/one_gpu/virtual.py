"""Every algorithm on 2, 4 and 8 virtual ranks, and that skipped waits are seen
(`tpkernels.qualification.virtual`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.one_gpu.machine import Machine
from benchmarks.one_gpu.stages import Case, Row
from tpkernels.qualification import virtual

_DIRECT = ("two_shot", "one_shot", "ll", "ll_two_shot", "routed")
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# From the simplest protocol to the most involved; the last compiles most kernels.
VARIANTS = (
    *(f"direct/{name}" for name in _DIRECT),
    *(f"{algorithm}/{kind}" for algorithm in ("fused", "pipelined") for kind in _KINDS),
    *("fused/copy_engines", "fused/routed"),
)
_REHEARSED = ("direct/two_shot", "direct/ll", "direct/routed", "fused/reduce_scatter")


def cases(machine: Machine) -> Iterator[Case]:
    """Yield a case for each variant of an algorithm."""
    variants = [name for name in VARIANTS if machine.kind != "stub" or name.startswith("fused/")]
    for variant in machine.choose(variants, _REHEARSED):
        yield variant, partial(_check, variant, "cpu" if machine.kind == "rehearsal" else "cuda")


def _check(variant: str, device: str) -> Row:
    found = virtual.check(variant, device)
    failure = found["failure"]
    row = {"bad": failure is not None, "calls": found["checks"]}
    return row if failure is None else row | {"error": str(failure)}
