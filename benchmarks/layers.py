"""The overhead of a layer over calling the ops by hand: a gated MLP, forward and backward.

    python -m benchmarks.layers --nproc 2 --rows 16 256 --repeat 60

Both variants are interleaved call by call, on the same weights; each time is the slowest rank's.
Prints the median of each variant, and layer / by hand: of the medians, and of the 10th percentiles,
which other load on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels
from tpkernels import nn as tnn
from tpkernels.launch import Ranks

WIDTH, HIDDEN = 512, 1408
Step = Callable[[], torch.Tensor]


def by_hand(layer: tnn.ParallelMLP, x: torch.Tensor, group: dist.ProcessGroup) -> Step:
    gate, up, down = layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight

    def step() -> torch.Tensor:
        a, b = tpkernels.all_gather_matmul(x, [gate.t(), up.t()], group)
        return tpkernels.matmul_reduce_scatter(F.silu(a) * b, down.t(), group, residual=x)

    return step


def timed(step: Step, backward: bool, group: dist.ProcessGroup) -> float:
    """Milliseconds of the slowest rank."""
    tpkernels.all_reduce(torch.zeros(1), group)
    begin = time.perf_counter()
    if backward:
        step().sum().backward()
    else:
        with torch.no_grad():
            step()
    took = torch.tensor([time.perf_counter() - begin])
    return float(tpkernels.all_gather(took, group).max()) * 1e3


def measure(rows: int, backward: bool, repeat: int) -> list[tuple[float, float]]:
    """(by hand, layer) milliseconds of each repetition."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    layer = tnn.ParallelMLP(WIDTH, HIDDEN, group, sequence_parallel=True)
    x = torch.randn(rows // group.size(), WIDTH, requires_grad=True)
    variants: tuple[Step, Step] = (by_hand(layer, x, group), lambda: layer(x, residual=x))
    torch.testing.assert_close(variants[0](), variants[1](), rtol=0, atol=0)
    times = []
    for repetition in range(repeat + 5):
        order = (0, 1) if repetition % 2 == 0 else (1, 0)  # alternates which one is first
        took = [0.0, 0.0]
        for i in order:
            took[i] = timed(variants[i], backward, group)
        if repetition >= 5:
            times.append((took[0], took[1]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--repeat", type=int, default=60)
    given = parser.parse_args()
    with Ranks(given.nproc) as ranks:
        for rows in given.rows:
            for backward in (False, True):
                times = ranks.run(measure, rows, backward, given.repeat, timeout=280)[0]
                hand, layer = (statistics.quantiles(one, n=10) for one in zip(*times, strict=True))
                what = "forward and backward" if backward else "forward"
                print(
                    f"rows {rows}, {what}: by hand {hand[4]:.3f} ms, layer {layer[4]:.3f} ms, "
                    f"layer / by hand {layer[4] / hand[4]:.3f}, of the 10th percentiles "
                    f"{layer[0] / hand[0]:.3f} ({hand[0]:.3f} ms)"
                )


if __name__ == "__main__":
    main()
