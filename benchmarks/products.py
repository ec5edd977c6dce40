"""Time the local matmul of torch (plain weight), oneDNN (packed weight) and the ops.

    python -m benchmarks.products
    python -m benchmarks.products --dtypes bfloat16 --rows 1 8 --weights 4096x4096
    python -m benchmarks.products --vllm PATH/vllm/_C_AVX512.abi3.so

Uses one thread. Results are verified first. The variants are interleaved. Each variant cycles
through enough copies of the weight to exceed a cache of 32 MiB, as the layers of a model do; --hot
uses one copy. "columns" is the layout of ``linear.weight.t()``, "rows" a contiguous weight [K, N].
`--vllm` adds the matmul of the vLLM CPU wheel from its shared library (see benchmarks/decode.py).
Prints medians in us. The ops use the GEMM kernels of csrc/host/matmul.h.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import tpkernels
from benchmarks.decode import multiply_by_vllm, pack_for_vllm
from tpkernels.local.matmul import allocating_matmul
from tpkernels.timing import interleaved

COLD_BYTES = 64 << 20


def onednn_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply by a weight in the oneDNN layout."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")
    return y


def can_pack_with_onednn(dtype: torch.dtype) -> bool:
    """Return True if oneDNN packs weights of this dtype on this processor."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(2, 2, dtype=dtype), 16)
    except RuntimeError:
        return False
    return True


Variant = tuple[Callable[[torch.Tensor, Any], torch.Tensor], str]
VARIANTS: dict[str, Variant] = {
    "torch.mm, columns": (torch.mm, "columns"),
    "ours": (allocating_matmul, "columns"),
    "torch.mm, rows": (torch.mm, "rows"),
    "ours, rows": (allocating_matmul, "rows"),
    "oneDNN, packed": (onednn_matmul, "onednn"),
    "ours, packed": (allocating_matmul, "packed"),
    "ours, int8": (allocating_matmul, "int8"),
}


def convert_layout(w: torch.Tensor, layout: str) -> Any:
    """Return a copy of the weight ``w`` [K, N] in a layout."""
    if layout == "vllm":
        return pack_for_vllm(w.t())
    if layout in ("packed", "int8"):
        return tpkernels.pack(w, torch.int8 if layout == "int8" else None)
    if layout == "onednn":
        return torch.ops.mkldnn._reorder_linear_weight(w.t(), 16)  # 16 rows of x
    return w.clone() if layout == "rows" else w.t().contiguous().t()


def medians(
    k: int, n: int, rows: int, dtype: torch.dtype, repeat: int, hot: bool
) -> dict[str, float]:
    """Return the median microseconds of each variant that this processor supports."""
    variants = {
        name: variant
        for name, variant in VARIANTS.items()
        if variant[1] != "onednn" or can_pack_with_onednn(dtype)
    }
    copies = 1 if hot else max(1, COLD_BYTES // (k * n * dtype.itemsize))
    x, weights = torch.randn(rows, k).to(dtype), {}
    for name, (multiply, layout) in variants.items():
        plain = (torch.randn(k, n) * k**-0.5).to(dtype)
        weights[name] = [convert_layout(plain, layout) for _ in range(copies)]
        exact = x.double() @ plain.double()
        y = multiply(x, weights[name][0]).double()
        torch.testing.assert_close(y, exact, atol=0.05, rtol=0.05)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name in interleaved(variants, max(repeat, copies) + copies):
        copy = weights[name][len(times[name]) % copies]
        begin = time.perf_counter()
        variants[name][0](x, copy)
        times[name].append(time.perf_counter() - begin)
    # Skips the first round of copies, when libraries prepare and cache the weights.
    return {name: 1e6 * statistics.median(samples[copies:]) for name, samples in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 512], help="rows of x"
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["768x576", "1024x2816", "4096x4096"],
        help="shapes KxN of the weight",
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="dtypes")
    parser.add_argument(
        "--repeat", type=int, default=40, help="interleaved repetitions (%(default)s)"
    )
    parser.add_argument(
        "--hot",
        action="store_true",
        help="reuse one copy of the weight, which may stay in the cache",
    )
    parser.add_argument(
        "--vllm", default="", metavar="PATH", help="shared library of the vLLM CPU wheel"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.vllm:
        torch.ops.load_library(args.vllm)
        VARIANTS["vLLM"] = (multiply_by_vllm, "vllm")
    print("| dtype | K x N | rows |", *(f"{name} |" for name in VARIANTS))
    print("|---|---|---|" + "---|" * len(VARIANTS))
    for dtype, weight, rows in itertools.product(args.dtypes, args.weights, args.rows):
        k, n = map(int, weight.split("x"))
        times = medians(k, n, rows, getattr(torch, dtype), args.repeat, args.hot)
        cells = (f"{times[name]:.0f} |" if name in times else "- |" for name in VARIANTS)
        print(f"| {dtype} | {weight} | {rows} |", *cells, flush=True)


if __name__ == "__main__":
    main()
