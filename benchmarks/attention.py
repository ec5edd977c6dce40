"""Time the attention kernel for CPUs next to scaled_dot_product_attention of torch.

    python -m benchmarks.attention
    python -m benchmarks.attention --dtypes float32 --heads 8 8 --head-dim 128 --threads 2

Calls alternate in one process. Prints medians in ms, and the median ratio of the pairs. The last
ratio is against SDPA on repeated keys and values instead of ``enable_gqa=True``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tpkernels.ops.attention import attention

# (batch, queries, keys)
SHAPES = [(batch, 1, keys) for batch in (1, 8) for keys in (64, 512, 2048)]
SHAPES += [(1, tokens, tokens) for tokens in (64, 512, 2048)]


def sdpa_on_repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    return sdpa(q, k, v, is_causal=q.shape[2] > 1)


def measure(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    shape: tuple[int, int, int],
    seconds: float,
) -> list[list[float]]:
    """Return the times of each function in ms, in the order of the calls."""
    batch, queries, keys = shape
    q = torch.randn(batch, queries, heads[0], dim).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, heads[1], keys, dim).to(dtype) for _ in range(2))
    functions: list[Callable[[], torch.Tensor]] = [
        partial(attention, q, k, v, scale=dim**-0.5),
        partial(sdpa, q, k, v, is_causal=queries > 1, enable_gqa=True),
        partial(sdpa_on_repeated, q, k, v),
    ]
    times: list[list[float]] = [[] for _ in functions]
    for function in functions * 2:
        function()
    end = time.perf_counter() + seconds
    while len(times[0]) < 7 or time.perf_counter() < end:
        for function, samples in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            samples.append(1e3 * (time.perf_counter() - begin))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--heads", type=int, nargs=2, default=[12, 4], help="query and key heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="per row")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| dtype | batch x queries | keys | tpkernels | SDPA | ratio | ratio, repeated |")
    print("|---|---|---|---|---|---|---|")
    for name in args.dtypes:
        for shape in SHAPES:
            ours, theirs, repeated = measure(
                getattr(torch, name), tuple(args.heads), args.head_dim, shape, args.seconds
            )
            ratios = (
                statistics.median(a / b for a, b in zip(ours, other, strict=True))
                for other in (theirs, repeated)
            )
            print(
                f"| {name} | {shape[0]} x {shape[1]} | {shape[2]} | {statistics.median(ours):.4f} "
                f"| {statistics.median(theirs):.4f} | " + " | ".join(f"{r:.2f}" for r in ratios),
                "|",
                flush=True,
            )


if __name__ == "__main__":
    main()
