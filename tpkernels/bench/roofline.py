"""How fast the ranks could be: a local matmul and a copy, measured on all of them at once.

A call takes at least as long as its products at the rate of the matmul, and as the bytes that it
must touch at the rate of the copy: x, weights and result once, and what comes from the peers. The
probes run on all ranks together because ranks share memory channels, clocks and maybe cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tpkernels.bench.cases import MATMUL_OPS, Case, Spec, run_local_matmul, run_matmul
from tpkernels.bench.inputs import last_level_cache_bytes, memory_budget
from tpkernels.bench.timing import Variant, measure

# A square matmul that is long beside its overheads and short beside a case: 2 GFLOP take some 40 ms
# on a core of AMD EPYC Zen 3 in fp32 (2026-11-21, `tpkernels bench`: 0.058 TFLOP/s).
_SIZE = {"cpu": 1024, "cuda": 8192}
_REPEAT, _SECONDS = 5, 1.0
_COPY_BYTES = 4  # times the cache, where memory allows
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class Rates:
    """Of one rank while the others run the same.

    ``flops``: per second, of the faster local matmul; ``torch_flops``: of torch.matmul;
    ``copy_bytes``: per second, read and written ones counted; ``copy_over_cache``: bytes of one
    copy over those of the last-level cache.
    """

    flops: float
    torch_flops: float
    copy_bytes: float
    copy_over_cache: float


@dataclass(frozen=True)
class Work:
    """What a call costs the rank that has most of it.

    ``traffic``: bytes that must come from the peers (of an all-reduce 2 (W - 1) / W times the
    tensor, as a reduce-scatter and an all-gather move them); ``touched``: all bytes read or
    written, these included.
    """

    flops: int
    traffic: int
    touched: int

    @classmethod
    def of(cls, spec: Spec, world: int) -> Work:
        problem = spec.problem(world)
        traffic = problem.nbytes * (world - 1) // world
        traffic *= 2 if "all_reduce" in spec.op else 1
        if spec.op not in MATMUL_OPS:
            return cls(0, traffic, 2 * problem.nbytes + traffic)
        m, n, k = spec.shape
        if spec.op == "all_gather_matmul":
            n //= world
        else:
            k //= world
        own = (m * k + k * n + m * n) * spec.dtype.itemsize
        return cls(2 * m * n * k, traffic, own + traffic)

    def least_seconds(self, rates: Rates) -> float:
        """The roofline."""
        return max(self.flops / rates.flops, self.touched / rates.copy_bytes)


def measure_rates(
    dtype: torch.dtype, device: str, synchronize: Callable[[], object] | None
) -> Rates:
    """This rank's. Collective."""
    size = _SIZE[device]
    x, w = (torch.randn(size, size).to(device, dtype) for _ in range(2))
    case = Case("matmul_all_reduce", x, (), (w.t(),))
    cache = last_level_cache_bytes(device)
    nbytes = max(_LEAST_BYTES, min(_COPY_BYTES * cache, memory_budget(device) // 2))
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    variants = {
        "local_matmul": Variant(lambda: run_local_matmul(case)),
        "copy": Variant(lambda: target.copy_(source)),
    }
    samples = measure(variants, repeat=_REPEAT, budget=_SECONDS, synchronize=synchronize)
    # By itself, once: without instructions for the dtype it takes a multiple of the others' time.
    plain = {"matmul": Variant(lambda: run_matmul(case))}
    samples |= measure(plain, repeat=1, synchronize=synchronize)
    best = {name: min(found.seconds) for name, found in samples.items()}
    flops = {name: 2 * size**3 / best[name] for name in ("local_matmul", "matmul")}
    return Rates(
        flops=max(flops.values()),
        torch_flops=flops["matmul"],
        copy_bytes=2 * nbytes / best["copy"],
        copy_over_cache=2 * nbytes / cache,
    )


def slowest_rates(ranks: Sequence[Rates]) -> Rates:
    """The least of each: what all ranks reach."""
    return Rates(
        flops=min(rates.flops for rates in ranks),
        torch_flops=min(rates.torch_flops for rates in ranks),
        copy_bytes=min(rates.copy_bytes for rates in ranks),
        copy_over_cache=min(rates.copy_over_cache for rates in ranks),
    )
