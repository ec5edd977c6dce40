"""Wrong calls of the ops on scaled operands, and what their errors must say. For two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import tpkernels
from tests.support import refusals
from tests.support.refusals import Refusal, no, ones
from tests.support.scaled import BF16, E4M3, E5M2, E8M0, FP4

GATHER = tpkernels.all_gather_scaled_matmul
SCATTER = tpkernels.scaled_matmul_reduce_scatter
REDUCE = tpkernels.scaled_matmul_all_reduce
ONE = ones()


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def fp4(rows: int, elements: int) -> torch.Tensor:
    return torch.full((rows, elements), 0x22, dtype=torch.uint8).view(FP4)


def operands() -> Iterator[Refusal]:
    x, w = fp8(4, 32), fp8(32, 8)
    allowed = "supported: float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2"
    for op in (GATHER, SCATTER, REDUCE):
        wrong = f"x has dtype float32; {allowed}"
        yield no(NotImplementedError, wrong, op, ones(4, 32), w, ONE, ONE)
        fnuz = x.to(torch.float8_e4m3fnuz)
        yield no(NotImplementedError, "x has dtype float8_e4m3fnuz", op, fnuz, w, ONE, ONE)
        wrong = f"has dtype bfloat16; {allowed}"
        yield no(NotImplementedError, wrong, op, x, w.bfloat16(), ONE, ONE)
        wrong = r"has shape \[31, 8\], but x of shape \[4, 32\] needs \[32, N\]"
        yield no(ValueError, wrong, op, x, fp8(31, 8), ONE, ONE)
        yield no(ValueError, r"has shape \[32, 0\], but", op, x, fp8(32, 0), ONE, ONE)
        wrong = "is float4_e2m1fn_x2 and x is float8_e4m3fn; both must be fp8, or both fp4"
        yield no(TypeError, wrong, op, x, fp4(8, 32).t(), ONE, ONE)
        wrong = r"x must have at least 2 dims \[..., K\] with K >= 1, not \[4, 0\]"
        yield no(ValueError, wrong, op, fp8(4, 0), fp8(0, 8), ONE, ONE)


def scales() -> Iterator[Refusal]:
    x, w, blocks = fp8(4, 64), fp8(64, 8), ones(4, 2).to(E8M0)
    for op in (GATHER, SCATTER, REDUCE):
        for shape in ([1, 1], [4], [5, 1], [1, 4]):
            wrong = rf"scale_x has shape \[{', '.join(map(str, shape))}\]; it must be \[\] or \[1\]"
            yield no(ValueError, wrong, op, x, w, ones(*shape), ONE)
        for shape in ([8, 1], [8], [1, 7]):
            wrong = r"the scale of w.* has shape .*; it must be .* or \[1, 8\] \(row-wise\)"
            yield no(ValueError, wrong, op, x, w, ONE, ones(*shape))
        wrong = "scale_x is bfloat16; it must be float32 or float8_e8m0fnu"
        yield no(TypeError, wrong, op, x, w, ones(dtype=BF16), ONE)
        wrong = r"scale_x has shape \[4, 3\]; it must be \[4, 2\], or \[512\] where it is swizzled"
        yield no(ValueError, wrong, op, x, w, ones(4, 3).to(E8M0), ones(8, 2).to(E8M0))
        wrong = r"the scale of w.* has shape \[2, 8\]; it must be \[8, 2\], or \[512\]"
        yield no(ValueError, wrong, op, x, w, blocks, ones(2, 8).to(E8M0))
        wrong = "scale_x is block-wise and the scale of w.* tensor-wise; block-wise scales do not"
        yield no(ValueError, wrong, op, x, w, blocks, ONE)
        wrong = "scale_x has a scale for every 32 of K, which is 33: no multiple"
        yield no(ValueError, wrong, op, fp8(4, 33), fp8(33, 8), blocks, ONE)
        wrong = "scale_x is float32; it must be float8_e4m3fn"
        yield no(TypeError, wrong, op, fp4(4, 32), fp4(8, 32).t(), ONE, ONE)
    wrong = "x has 4 rows on rank 0 and swizzled scales, whose tiles have 128 rows; give each"
    swizzled = ones(512).to(E8M0)
    yield no(NotImplementedError, wrong, GATHER, x, w, swizzled, swizzled)
    yield no(ValueError, "2 scales for 1 weights", GATHER, x, w, ONE, [ONE, ONE])


def options() -> Iterator[Refusal]:
    x, w = fp8(4, 32), fp8(32, 8, dtype=E5M2)
    opaque = ones(1).to_mkldnn()
    wrong = "has layout torch._mkldnn; the ops take dense tensors"
    for op in (GATHER, SCATTER, REDUCE):
        yield no(NotImplementedError, f"scale_x {wrong}", op, x, w, opaque, ONE)
        yield no(NotImplementedError, rf"scales?_w(\[0\])? {wrong}", op, x, w, ONE, opaque)
    bias = ones(8, dtype=BF16).to_mkldnn()
    yield no(NotImplementedError, f"biases.0. {wrong}", GATHER, x, w, ONE, ONE, biases=bias)
    for op, rows in ((SCATTER, 2), (REDUCE, 4)):
        residual = ones(rows, 8, dtype=BF16).to_mkldnn()
        yield no(NotImplementedError, f"bias {wrong}", op, x, w, ONE, ONE, bias=bias)
        yield no(NotImplementedError, f"residual {wrong}", op, x, w, ONE, ONE, residual=residual)
    for op in (GATHER, SCATTER, REDUCE):
        wrong = "out_dtype is float8_e4m3fn; supported: bfloat16, float16, float32"
        yield no(NotImplementedError, wrong, op, x, w, ONE, ONE, out_dtype=E4M3)
        wrong = "algorithm 'fused' of .*scaled_matmul.* has no kernel for operands with scales"
        yield no(NotImplementedError, wrong, op, x, w, ONE, ONE, algorithm="fused")
        for needs in range(4):
            given = [x, w.clone(), ONE.clone(), ONE.clone()]
            given[needs] = given[needs].detach().clone().requires_grad_()
            wrong = f"{op.__name__} has no gradient; call it under torch.no_grad"
            yield no(NotImplementedError, wrong, op, *given)
    for op in (SCATTER, REDUCE):
        wrong = "wire_dtype is float16; supported: bfloat16, float32"
        yield no(NotImplementedError, wrong, op, x, w, ONE, ONE, wire_dtype=torch.float16)
        for name, shape in (("bias", (8,)), ("residual", (2 if op is SCATTER else 4, 8))):
            wrong = f"{name} is float32; it must be bfloat16"
            yield no(TypeError, wrong, op, x, w, ONE, ONE, **{name: ones(*shape)})
            wrong = rf"{name} has shape \[3\]"
            yield no(ValueError, wrong, op, x, w, ONE, ONE, **{name: ones(3, dtype=BF16)})
    wrong = "biases.0. is float32; it must be bfloat16"
    yield no(TypeError, wrong, GATHER, x, w, ONE, ONE, biases=ones(8))
    yield no(ValueError, "2 biases for 1 weights", GATHER, x, w, ONE, ONE, biases=[None, None])
    yield no(ValueError, "weights is empty", GATHER, x, [], ONE, [])
    for op, name in ((GATHER, "gather_dim"), (SCATTER, "scatter_dim")):
        wrong = rf"{name} is 1, the last of"
        yield no(NotImplementedError, wrong, op, x, w, ONE, ONE, **{name: 1})
        yield no(ValueError, f"{name} is 2; a tensor of 2 dims", op, x, w, ONE, ONE, **{name: 2})
    wrong = "5 rows do not divide by 2 ranks"
    yield no(ValueError, wrong, SCATTER, fp8(5, 32), w, ONE, ONE)
    wrong = r"x has 4 rows in the gathered dim, but shard_sizes \[3, 3\] gives rank"
    yield no(ValueError, wrong, GATHER, x, w, ONE, ONE, shard_sizes=[3, 3])


def placements() -> Iterator[Refusal]:
    """Arguments on another device than x, one at a time, and ones that are not dense."""
    x, w, columns, rows, shard = ones(4, 6), ones(6, 8), ones(8), ones(4, 8), ones(2, 8)
    fp8, scale = torch.float8_e4m3fn, torch.ones(())
    scaled = {"x": x.to(fp8), "scale_x": scale, "w": w.t().to(fp8).t(), "scale_w": scale}
    listed = {"weights": scaled["w"], "scales_w": scale}
    added, normed = {"bias": columns, "residual": rows}, {"residual": rows, "weight": columns}
    arguments: dict[Callable[..., Any], dict[str, torch.Tensor]] = {
        refusals.GATHER: {"x": x, "weights": w, "biases": columns},
        refusals.SCATTER: {"x": x, "w": w, "bias": columns, "residual": shard},
        refusals.REDUCE: {"x": x, "w": w, **added},
        tpkernels.all_reduce_rms_norm: {"x": rows, **normed},
        tpkernels.matmul_all_reduce_rms_norm: {"x": x, "w": w, **added, "norm_weight": columns},
        GATHER: {"x": scaled["x"], "scale_x": scale, **listed},
        SCATTER: scaled,
        REDUCE: scaled,
    }
    for op, tensors in arguments.items():
        for name in tensors:
            wrong = {**tensors, name: tensors[name].to("meta")}
            pattern = f"is on {'cpu but x is on meta' if name == 'x' else 'meta but x is on cpu'}"
            yield Refusal(
                ValueError, pattern, lambda group, op=op, wrong=wrong: op(group=group, **wrong)
            )
    for product in (w, tpkernels.LocalProduct(lambda x: x @ w, (6, 8), torch.float32)):
        pattern = "w is on|x is on meta"
        yield Refusal(
            ValueError if product is w else NotImplementedError,
            pattern,
            lambda group, w=product: refusals.REDUCE(x.to("meta"), w, group),
        )
        pattern = "residual is on meta but x is on cpu"
        yield no(ValueError, pattern, refusals.REDUCE, x, product, residual=rows.to("meta"))
    pattern = r"biases\[0\] is nested; the ops take dense tensors"
    yield no(
        NotImplementedError,
        pattern,
        refusals.GATHER,
        x,
        w,
        biases=torch.nested.nested_tensor([w], layout=torch.jagged),
    )
    pattern = "x has layout torch._mkldnn; the ops take dense tensors"
    yield no(NotImplementedError, pattern, tpkernels.all_reduce_rms_norm, rows.to_mkldnn(), columns)
    for layer, given in (
        (tpkernels.nn.ColumnParallelLinear, x),
        (tpkernels.nn.RowParallelLinear, x[:, :3]),
        (tpkernels.nn.VocabParallelEmbedding, torch.ones(2, dtype=torch.int64)),
    ):
        yield Refusal(
            ValueError,
            "w.* is on meta but x is on cpu",
            lambda group, layer=layer, x=given: layer(6, 8, group, device="meta")(x),
        )
