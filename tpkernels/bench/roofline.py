"""How fast the ranks could be: the rates of a local matmul and of a copy on all ranks at once.

A call takes at least as long as its flops at the matmul's rate, and as the bytes it must touch at
the copy's rate. The probes run on all ranks together because ranks share memory channels, clocks
and possibly cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tpkernels.bench.cases import Case, run_local_matmul, run_matmul
from tpkernels.bench.inputs import memory_budget
from tpkernels.launch.session import rank_device, synchronizer
from tpkernels.planning.cost import Cost
from tpkernels.planning.machine import last_level_cache_bytes
from tpkernels.timing import Variant, measure

# A square matmul that is long compared with its overheads and short compared with a case: 2 GFLOP
# take about 40 ms on a core of AMD EPYC Zen 3 in fp32 (2026-11-21, `tpkernels bench`: 0.058
# TFLOP/s).
_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEAT, _SECONDS = 5, 1.0
_COPY_BYTES = 4  # times the cache, if memory allows
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Rates:
    """Rates of one rank while the others run the same probe.

    Attributes:
        flops: per second, of the faster local matmul.
        torch_flops: per second, of torch.matmul.
        copy_bytes: per second, reads plus writes.
        copy_over_cache: bytes of one copy over the size of the last-level cache.
    """

    flops: float
    torch_flops: float
    copy_bytes: float
    copy_over_cache: float

    def least_seconds(self, cost: Cost) -> float:
        """Return the roofline of a call."""
        return max(cost.flops / self.flops, cost.touched / self.copy_bytes)


def measure_rates(dtype: torch.dtype, device: str) -> Rates:
    """Measure this rank's rates on "cpu" or "cuda". Collective."""
    place, synchronize = rank_device(device), synchronizer(device)
    size = _SIZE[device]
    x, w = (torch.randn(size, size).to(place, dtype) for _ in range(2))
    case = Case("matmul_all_reduce", x, (), (w.t(),))
    cache = last_level_cache_bytes(device)
    nbytes = max(_LEAST_BYTES, min(_COPY_BYTES * cache, memory_budget(device) // 2))
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    variants = {
        "local_matmul": Variant(lambda: run_local_matmul(case)),
        "copy": Variant(lambda: target.copy_(source)),
    }
    samples = measure(variants, repeat=_REPEAT, budget=_SECONDS, synchronize=synchronize)
    # Separate, and only once: without instructions for the dtype it takes many times as long.
    alone = {"matmul": Variant(lambda: run_matmul(case))}
    samples |= measure(alone, repeat=1, synchronize=synchronize)
    best = {name: min(each.seconds) for name, each in samples.items()}
    flops = {name: 2 * size**3 / best[name] for name in ("local_matmul", "matmul")}
    return Rates(
        flops=max(flops.values()),
        torch_flops=flops["matmul"],
        copy_bytes=2 * nbytes / best["copy"],
        copy_over_cache=2 * nbytes / cache,
    )


def slowest_rates(ranks: Sequence[Rates]) -> Rates:
    """Return the minimum of each rate, which all ranks reach."""
    return Rates(
        flops=min(rates.flops for rates in ranks),
        torch_flops=min(rates.torch_flops for rates in ranks),
        copy_bytes=min(rates.copy_bytes for rates in ranks),
        copy_over_cache=min(rates.copy_over_cache for rates in ranks),
    )
