"""Time the local matmul: torch with a plain weight, oneDNN with a packed one, and those of the ops.

    python -m benchmarks.products
    python -m benchmarks.products --dtypes bfloat16 --rows 1 8 --weights 4096x4096
    python -m benchmarks.products --vllm PATH/vllm/_C_AVX512.abi3.so

Uses one thread. Results are checked first. The variants are interleaved. Each variant has enough
copies of the weight to exceed a cache of 32 MiB, as the layers of a model do; --hot uses one copy.
"columns" is the layout of ``linear.weight.t()``, "rows" a contiguous weight [K, N]. `--vllm` adds
the matmul of the vLLM CPU wheel from its shared library (see benchmarks/decode.py). Prints medians
in us. The ops use the matmuls of csrc/host/product.h.
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
from tpkernels.local.matmul import new_product
from tpkernels.timing import interleaved

COLD_BYTES = 64 << 20


def onednn_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product with a weight in oneDNN's layout."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")
    return product


def reorders(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this processor."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.ones(2, 2, dtype=dtype), 16)
    except RuntimeError:
        return False
    return True


Way = tuple[Callable[[torch.Tensor, Any], torch.Tensor], str]
WAYS: dict[str, Way] = {
    "torch.mm, columns": (torch.mm, "columns"),
    "ours": (new_product, "columns"),
    "torch.mm, rows": (torch.mm, "rows"),
    "ours, rows": (new_product, "rows"),
    "oneDNN, packed": (onednn_product, "onednn"),
    "ours, packed": (new_product, "packed"),
    "ours, int8": (new_product, "int8"),
}


def laid_out(w: torch.Tensor, layout: str) -> Any:
    """A copy of a weight [K, N]."""
    if layout == "vllm":
        return pack_for_vllm(w.t())
    if layout in ("packed", "int8"):
        return tpkernels.pack(w, torch.int8 if layout == "int8" else None)
    if layout == "onednn":
        return torch.ops.mkldnn._reorder_linear_weight(w.t(), 16)  # rows
    return w.clone() if layout == "rows" else w.t().contiguous().t()


def medians(
    k: int, n: int, rows: int, dtype: torch.dtype, repeat: int, hot: bool
) -> dict[str, float]:
    """Microseconds of each way that this processor has."""
    ways = {way: made for way, made in WAYS.items() if made[1] != "onednn" or reorders(dtype)}
    copies = 1 if hot else max(1, COLD_BYTES // (k * n * dtype.itemsize))
    x, weights = torch.randn(rows, k).to(dtype), {}
    for way, (multiply, layout) in ways.items():
        plain = (torch.randn(k, n) * k**-0.5).to(dtype)
        weights[way] = [laid_out(plain, layout) for _ in range(copies)]
        exact = x.double() @ plain.double()
        got = multiply(x, weights[way][0]).double()
        torch.testing.assert_close(got, exact, atol=0.05, rtol=0.05)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for way in interleaved(ways, max(repeat, copies) + copies):
        copy = weights[way][len(times[way]) % copies]
        begin = time.perf_counter()
        ways[way][0](x, copy)
        times[way].append(time.perf_counter() - begin)
    # The first round of copies prepares what libraries keep of a weight.
    return {way: 1e6 * statistics.median(taken[copies:]) for way, taken in times.items()}


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
        WAYS["vLLM"] = (multiply_by_vllm, "vllm")
    print("| dtype | K x N | rows |", *(f"{way} |" for way in WAYS))
    print("|---|---|---|" + "---|" * len(WAYS))
    for dtype, weight, rows in itertools.product(args.dtypes, args.weights, args.rows):
        k, n = map(int, weight.split("x"))
        times = medians(k, n, rows, getattr(torch, dtype), args.repeat, args.hot)
        shown = (f"{times[way]:.0f} |" if way in times else "- |" for way in WAYS)
        print(f"| {dtype} | {weight} | {rows} |", *shown, flush=True)


if __name__ == "__main__":
    main()
