"""Wrong input raises an error of one line with the values, on every rank, before any data is sent.
The group remains usable.

Tables of wrong calls on two ranks come first, then the tests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

import tpkernels
from tests.support import faults
from tests.support.ranked import fresh_group, on_ranks
from tests.support.reference import E4M3, E8M0, FP4

F32, F16, BF16, F64, INT = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64
GATHER = tpkernels.all_gather_matmul
SCATTER = tpkernels.matmul_reduce_scatter
REDUCE = tpkernels.matmul_all_reduce
NORMED = tpkernels.matmul_all_reduce_rms_norm
UNSUPPORTED = "x has dtype int64; supported: float32, float16, bfloat16, float64"


@dataclass(frozen=True)
class Refusal:
    """``call(group)`` must raise ``error`` with a message that matches ``pattern``."""

    error: type[Exception]
    pattern: str
    call: Callable[[dist.ProcessGroup], Any]


def make_refusal(
    error: type[Exception], pattern: str, op: Callable[..., Any], *tensors: Any, **options: Any
) -> Refusal:
    """Return the refusal of ``op(*tensors, group, **options)``."""
    return Refusal(error, pattern, lambda group: op(*tensors, group, **options))


bad_value, bad_type = (
    functools.partial(make_refusal, ValueError),
    functools.partial(make_refusal, TypeError),
)
unsupported = functools.partial(make_refusal, NotImplementedError)


def ones(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def normed(x: Any, w: Any, group: dist.ProcessGroup, **options: Any) -> Any:
    """Run a matmul with RMSNorm, with the arguments of the other matmul ops."""
    return NORMED(x, w, ones(8), group, **options)


def packed_weights() -> Iterator[Refusal]:
    x, w, int8 = ones(4, 6), tpkernels.pack(ones(6, 8)), tpkernels.pack(ones(8, 8), torch.int8)
    for op in (GATHER, SCATTER, REDUCE):
        pattern = r"packed shape \[5, 8\], but .* needs \[6, N\]"
        yield bad_value(pattern, op, x, tpkernels.pack(ones(5, 8)))
        yield bad_value(r"has packed shape \[8, 8\], but .* needs \[6, N\]", op, x, int8)
        pattern = "is float32 but x is float64; they must be equal: pack it in float64"
        yield bad_type(pattern, op, x.double(), w)
        yield bad_type("is int8 but x is float64", op, ones(4, 8).double(), int8)
        pattern = "x has layout torch._mkldnn; the ops support dense tensors only"
        yield unsupported(pattern, op, x.to_mkldnn(), w)
        pattern = r"shape \[8, 6, 1\] .* is neither a matrix nor a result of tpkernels.pack"
        yield bad_value(pattern, op, x.bfloat16(), w.bfloat16())
    pattern = r"weights\[1\] has packed shape \[8, 6\], but .* needs \[6, N\]"
    yield bad_value(pattern, GATHER, x, [w, tpkernels.pack(ones(8, 6))])
    for op in (SCATTER, REDUCE):
        yield unsupported("bias has layout torch._mkldnn", op, x, w, bias=ones(8).to_mkldnn())
        pattern = "residual has layout torch._mkldnn"
        residual = ones(2 if op is SCATTER else 4, 8).to_mkldnn()
        yield unsupported(pattern, op, x, w, residual=residual)
    narrow = tpkernels.pack(ones(6, 8, dtype=BF16))
    yield from opaque_weights("is packed", "a packed weight", w, narrow)


def custom_matmuls() -> Iterator[Refusal]:
    x, w = ones(4, 6), tpkernels.CustomMatmul(lambda x: x @ ones(6, 8), (6, 8), F32)
    for op in (GATHER, SCATTER, REDUCE):
        yield bad_value(r"has shape \[6, 8\], but .* needs \[7, N\]", op, ones(4, 7), w)
        yield bad_type("is float32 but x is bfloat16", op, x.bfloat16(), w)
        fake = FakeTensorMode().from_tensor(x)
        yield bad_type("supports plain tensors only, not FakeTensor", op, fake, w)
    pattern = r"weights\[0\] is a CustomMatmul, which does not support biases\[0\]; add the bias in"
    yield unsupported(pattern, GATHER, x, w, biases=ones(8))
    narrow = tpkernels.CustomMatmul(lambda x: x, (6, 6), BF16)
    yield from opaque_weights("is a CustomMatmul", "a CustomMatmul", w, narrow)


def opaque_weights(description: str, kind: str, w: Any, narrow: Any) -> Iterator[Refusal]:
    """Refusals that packed weights and custom matmuls share. ``narrow`` is a bf16 weight."""
    x = ones(4, 6)
    for op in (GATHER, SCATTER, REDUCE, normed):
        pattern = f"{description}, which the kernels of 'fused' cannot read"
        yield unsupported(pattern, op, x, w, algorithm="fused")
        pattern = f"has no gradient with {kind}; call it under torch.no_grad"
        yield unsupported(pattern, op, x.clone().requires_grad_(), w)
    pattern = (
        rf"weights\[0\] {description}, so its matmul returns float32, the dtype of x, not bfloat16"
    )
    yield unsupported(pattern, GATHER, x, w, out_dtype=BF16)
    pattern = f"w {description}, so the last dim of the result cannot be split over the ranks"
    yield unsupported(pattern, SCATTER, x, w, scatter_dim=1)
    pattern = f"w {description}, so its matmul returns bfloat16, the dtype of x, not float32"
    for op in (SCATTER, REDUCE):
        yield unsupported(pattern, op, x.bfloat16(), narrow, wire_dtype=F32)


def matmul_operands() -> Iterator[Refusal]:
    x, w = ones(4, 6), ones(6, 8)
    for op in (GATHER, SCATTER, REDUCE, normed):
        yield bad_value(r"\[5, 8\].*\[4, 6\].*\[6, N\]", op, x, ones(5, 8))
        yield bad_value(r"shape \[6\].*needs \[6, N\]", op, x, ones(6))
        yield bad_value(r"\[6, 0\]: N must be at least 1", op, x, ones(6, 0))
        yield bad_value(r"\[4, 0\]: K must be at least 1", op, ones(4, 0), ones(0, 8))
        yield bad_value(r"at least 2 dims.*\[6\]", op, ones(6), w)
        yield bad_type("float16 but x is float32", op, x, ones(6, 8, dtype=F16))
        yield unsupported(UNSUPPORTED, op, x.to(INT), w.to(INT))
        pattern = "unknown algorithm 'tree'; choose from auto, unfused, ring, direct, multimem"
        yield bad_value(pattern, op, x, w, algorithm="tree")
    for op in (GATHER, SCATTER, REDUCE):
        yield unsupported("out_dtype has dtype int32", op, x, w, out_dtype=torch.int32)
        yield unsupported(
            "out_dtype is float64 but x is float32; if either is float64", op, x, w, out_dtype=F64
        )
    yield bad_value("weights is empty", GATHER, x, [])
    yield bad_value(r"weights\[1\].*\[7, 8\].*\[6, N\]", GATHER, x, [w, ones(7, 8)])
    yield bad_value(r"\[6, 8\].*\[4, 6\].*\[12, N\]", GATHER, x, w, gather_dim=1)
    for algorithm in ("ring", "pipelined"):
        pattern = (
            f"'{algorithm}' of all_gather_matmul cannot gather the dim that the matmul sums over"
        )
        along_k = {"gather_dim": 1, "algorithm": algorithm}
        yield unsupported(pattern, GATHER, x, ones(12, 8), **along_k)


def epilogues() -> Iterator[Refusal]:
    x, w = ones(4, 6), ones(6, 8)
    for op, rows in ((SCATTER, 2), (REDUCE, 4), (normed, 4)):
        yield bad_value(r"bias has shape \[7\], expected \[8\]", op, x, w, bias=ones(7))
        yield bad_value(r"bias has shape \[1, 8\], expected", op, x, w, bias=ones(1, 8))
        yield bad_type("bias is float16; it must be float32", op, x, w, bias=ones(8, dtype=F16))
        pattern = rf"residual has shape \[{rows}, 7\], but the output has shape \[{rows}, 8\]"
        yield bad_value(pattern, op, x, w, residual=ones(rows, 7))
        pattern = rf"residual has shape \[8\], but the output has shape \[{rows}, 8\]"
        yield bad_value(pattern, op, x, w, residual=ones(8))
        pattern = "residual is bfloat16; it must be float32"
        yield bad_type(pattern, op, x, w, residual=ones(rows, 8, dtype=BF16))
    for op in (SCATTER, REDUCE):
        pattern = "wire_dtype is bfloat16 and x is float32; wire_dtype must be float32"
        yield bad_value(pattern, op, x, w, wire_dtype=BF16)
        pattern = "wire_dtype is float16 and x is bfloat16; wire_dtype must be bfloat16 or float32"
        yield bad_value(pattern, op, x.to(BF16), w.to(BF16), wire_dtype=F16)
    pattern = r"biases\[1\] has shape \[8\], expected \[3\]"
    yield bad_value(pattern, GATHER, x, [w, ones(6, 3)], biases=[None, ones(8)])
    yield bad_value(
        "biases has length 2, but weights has length 1", GATHER, x, w, biases=[None, None]
    )
    yield bad_value("biases has length 0, but weights has length 1", GATHER, x, w, biases=[])


def shards() -> Iterator[Refusal]:
    x, w = ones(4, 6), ones(6, 8)
    ops: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (tpkernels.all_gather, (x,)),
        (GATHER, (x, w)),
        (tpkernels.reduce_scatter, (x,)),
        (SCATTER, (x, w)),
    ]
    for i, (op, tensors) in enumerate(ops):
        for sizes in ([4], [4, 2, 2], []):
            pattern = rf"{len(sizes)} entries \[{', '.join(map(str, sizes))}\].*2 ranks"
            yield bad_value(pattern, op, *tensors, shard_sizes=sizes)
        yield bad_value(r"\[5, -1\] has a negative entry", op, *tensors, shard_sizes=[5, -1])
        dim = "gather_dim" if i < 2 else "scatter_dim"
        for value in (-1, -2, 2, 100):
            pattern = f"{dim} is {value}; a tensor of 2 dims allows 0 to 1"
            yield bad_value(pattern, op, *tensors, **{dim: value})
    for op, tensors in ops[:2]:
        pattern = r"x has 4 rows in the gathered dim, but shard_sizes \[5, 5\] specifies 5 for rank"
        yield bad_value(pattern, op, *tensors, shard_sizes=[5, 5])
    for op, tensors in ops[2:]:
        pattern = r"\[2, 3\] add up to 5, but the scattered dim has 4"
        yield bad_value(pattern, op, *tensors, shard_sizes=[2, 3])
    pattern = (
        "the scattered dim has 5 rows, which is not divisible by world_size=2; pass "
        r"shard_sizes=tpkernels.shard_sizes\(5, 2\)"
    )
    yield bad_value(pattern, tpkernels.reduce_scatter, ones(5, 6))
    yield bad_value(pattern, SCATTER, ones(5, 6), w)
    yield bad_value(pattern, SCATTER, x, ones(6, 5), scatter_dim=1)
    yield bad_value("gather_dim is 0; a tensor of 0 dims", tpkernels.all_gather, ones())


def collectives() -> Iterator[Refusal]:
    x = ones(4, 6)
    for name in ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_"):
        op = getattr(tpkernels, name)
        moves, pattern = name == "all_gather", UNSUPPORTED
        if moves:
            pattern = "x has dtype bool; supported: .*float64, int64, int32"
        yield unsupported(pattern, op, x.to(torch.bool if moves else INT))
        pattern = "unknown algorithm 'rnig'; choose from auto, unfused"
        yield bad_value(pattern, op, x, algorithm="rnig")
        pattern = "'pipelined' of .* overlaps communication with a matmul, but this op does not"
        yield unsupported(pattern, op, x, algorithm="pipelined")
    pattern = r"all_reduce_ has no gradient; it overwrites its input; use tpkernels.all_reduce$"
    yield unsupported(pattern, tpkernels.all_reduce_, ones(4, 6).requires_grad_())
    overlapping = [ones(4, 1).expand(4, 6), ones(1).expand(5), ones(3, 4).expand(2, 3, 4)]
    for shared in overlapping:
        pattern = r"x of shape .* and strides .* has elements that share memory.*x.contiguous\(\)"
        yield bad_value(pattern, tpkernels.all_reduce_, shared)
    for inference in (False, True):
        with torch.inference_mode(inference):
            negative = torch.ones(4, dtype=torch.complex64).conj().imag
        pattern = r"cannot overwrite a negative view.*x.resolve_neg\(\)"
        yield unsupported(pattern, tpkernels.all_reduce_, negative)
    for op in (tpkernels.reduce_scatter, tpkernels.all_reduce):
        yield unsupported(
            "out_dtype is float32 but x is float64; if either is float64",
            op,
            x.double(),
            out_dtype=F32,
        )


def arguments() -> Iterator[Refusal]:
    """Arguments that an op does not accept, receives twice or misses."""
    x, reduce, norm = ones(4, 6), tpkernels.all_reduce, tpkernels.all_reduce_rms_norm
    pattern = r"^all_reduce\(\) got an unexpected keyword argument 'algorithms'$"
    yield bad_type(pattern, reduce, x, algorithms="direct")
    yield bad_type(r"^all_reduce\(\) got multiple values for argument 'x'$", reduce, x, x=x)
    pattern = r"^all_reduce\(\) takes 2 positional arguments but 5 were given$"
    yield bad_type(pattern, reduce, x, x, x, x)
    pattern = r"^all_reduce_rms_norm\(\) missing 1 required positional argument: "
    yield bad_type(pattern + "'group'$", norm, x)
    yield Refusal(TypeError, pattern + "'weight'$", lambda group: norm(x, group=group))


def group_arguments() -> Iterator[Refusal]:
    """Arguments that are not groups. The group that the refusal receives is unused."""
    x, w = ones(4, 6), ones(6, 8)
    outsider = dist.GroupMember.NON_GROUP_MEMBER
    absent = "process group 'no such group' does not exist on this rank"
    wrong_groups: list[tuple[Any, type[Exception], str]] = [
        ("no such group", ValueError, absent),
        (outsider, ValueError, r"global rank \d is not in this group"),
        (7, TypeError, "must be a ProcessGroup, a DeviceMesh.*not int"),
        ((1, 2), TypeError, "not tuple"),
        (None, TypeError, "not NoneType"),
    ]
    for group, error, pattern in wrong_groups:

        def refused(
            op: Callable[..., Any],
            *tensors: torch.Tensor,
            group: Any = group,
            error: type[Exception] = error,
            pattern: str = pattern,
        ) -> Refusal:
            return Refusal(error, pattern, lambda _: op(*tensors, group))

        yield refused(tpkernels.all_gather, x)
        yield refused(tpkernels.all_reduce_, x)
        yield refused(GATHER, x, w)
        yield refused(SCATTER, x, w)
        yield refused(lambda group: tpkernels.empty(3, group=group))
        if group is not None:  # None is the default group
            yield refused(tpkernels.init)
    yield Refusal(ValueError, absent, lambda _: torch.ops.tpkernels.all_reduce(x, "no such group"))


def options() -> Iterator[Refusal]:
    """Arguments of ``init`` and ``empty``, on a group that is in use."""
    for timeout in (0, -1.5, 86401, float("inf"), float("nan")):
        pattern = rf"timeout must be in \(0, 86400\] seconds, not {timeout}"
        yield bad_value(pattern, tpkernels.init, timeout=timeout)
    for nbytes in (0, -1, 65535):
        pattern = f"workspace_bytes must be at least 65536, not {nbytes}"
        yield bad_value(pattern, tpkernels.init, workspace_bytes=nbytes)
    pattern = (
        "is already initialized with timeout=20.0, workspace_bytes=1048576, autotune=None, "
        "numerics=None; it cannot be changed to timeout=19.0, workspace_bytes=1048576, "
        "autotune=None, numerics=None"
    )
    yield bad_value(pattern, tpkernels.init, timeout=19.0, workspace_bytes=1 << 20)
    yield bad_value(
        "it cannot be changed to timeout=30.0, workspace_bytes=67108864", tpkernels.init
    )
    pattern = "it cannot be changed to .*autotune=False"
    same = {"timeout": 20.0, "workspace_bytes": 1 << 20}
    yield bad_value(pattern, tpkernels.init, **same, autotune=False)
    pattern = "numerics=None; it cannot be changed to .*numerics='ordered'"
    yield bad_value(pattern, tpkernels.init, **same, numerics="ordered")
    pattern = "numerics is 'fast'; it can be 'vendor', 'ordered', 'invariant' or None"
    yield bad_value(pattern, tpkernels.init, numerics="fast")
    pattern = r"\[3, -4\] has a negative size"
    yield Refusal(ValueError, pattern, lambda group: tpkernels.empty(3, -4, group=group))


def normed_matmuls() -> Iterator[Refusal]:
    """Refusals of the norm. `matmul_all_reduce` covers the rest."""
    op, x, w, weight = NORMED, ones(4, 6), ones(6, 8), ones(8)
    yield bad_value(r"norm_weight has shape \[6\], expected \[8\]", op, x, w, ones(6))
    yield bad_type("norm_weight is float16; it must be float32", op, x, w, weight.half())
    yield bad_value("eps is -1.0; it must be finite and at least 0", op, x, w, weight, eps=-1)


def normed_sums() -> Iterator[Refusal]:
    op, x, weight = tpkernels.all_reduce_rms_norm, ones(4, 6), ones(6)
    yield bad_value(r"x has shape \[\]; it must be \[..., N\] with N >= 1", op, ones(), weight)
    yield bad_value(r"x has shape \[4, 0\]; it must be", op, ones(4, 0), ones(0))
    yield bad_value(r"weight has shape \[5\], expected \[6\]", op, x, ones(5))
    yield bad_value(r"weight has shape \[1, 6\], expected \[6\]", op, x, ones(1, 6))
    yield bad_type("weight is bfloat16; it must be float32", op, x, weight.bfloat16())
    pattern = "weight is float16; it must be bfloat16 or float32"
    yield bad_type(pattern, op, x.bfloat16(), weight.half())
    yield bad_value(r"residual has shape \[6\]", op, x, weight, residual=weight)
    yield bad_type("residual is float16", op, x, weight, residual=x.half())
    for eps in (-1e-6, float("nan"), float("inf")):
        yield bad_value(f"eps is {eps}; it must be finite and at least 0", op, x, weight, eps=eps)
    yield unsupported("x has dtype int64; supported", op, x.long(), weight)
    yield bad_value("unknown algorithm 'tree'", op, x, weight, algorithm="tree")
    pattern = "'pipelined' of all_reduce_rms_norm overlaps communication with a matmul, but this op"
    yield unsupported(pattern, op, x, weight, algorithm="pipelined")


# Ops on scaled operands.


SCALED_GATHER = tpkernels.all_gather_scaled_matmul
SCALED_SCATTER = tpkernels.scaled_matmul_reduce_scatter
SCALED_REDUCE = tpkernels.scaled_matmul_all_reduce
SCALED_OPS = (SCALED_GATHER, SCALED_SCATTER, SCALED_REDUCE)
ONE = ones()


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def fp4(rows: int, elements: int) -> torch.Tensor:
    return torch.full((rows, elements), 0x22, dtype=torch.uint8).view(FP4)


def scaled_operands() -> Iterator[Refusal]:
    x, w = fp8(4, 32), fp8(32, 8)
    allowed = "supported: float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2"
    for op in SCALED_OPS:
        yield unsupported(f"x has dtype float32; {allowed}", op, ones(4, 32), w, ONE, ONE)
        fnuz = x.to(torch.float8_e4m3fnuz)
        yield unsupported("x has dtype float8_e4m3fnuz", op, fnuz, w, ONE, ONE)
        yield unsupported(f"has dtype bfloat16; {allowed}", op, x, w.bfloat16(), ONE, ONE)
        wrong = r"has shape \[31, 8\], but x of shape \[4, 32\] needs \[32, N\]"
        yield bad_value(wrong, op, x, fp8(31, 8), ONE, ONE)
        yield bad_value(r"has shape \[32, 0\], but", op, x, fp8(32, 0), ONE, ONE)
        wrong = "is float4_e2m1fn_x2 and x is float8_e4m3fn; both must be fp8, or both fp4"
        yield bad_type(wrong, op, x, fp4(8, 32).t(), ONE, ONE)
        wrong = r"x must have at least 2 dims \[..., K\] with K >= 1, not \[4, 0\]"
        yield bad_value(wrong, op, fp8(4, 0), fp8(0, 8), ONE, ONE)


def scaled_scales() -> Iterator[Refusal]:
    x, w, blocks = fp8(4, 64), fp8(64, 8), ones(4, 2).to(E8M0)
    for op in SCALED_OPS:
        for shape in ([1, 1], [4], [5, 1], [1, 4]):
            wrong = rf"scale_x has shape \[{', '.join(map(str, shape))}\]; it must be \[\] or \[1\]"
            yield bad_value(wrong, op, x, w, ones(*shape), ONE)
        for shape in ([8, 1], [8], [1, 7]):
            wrong = r"the scale of w.* has shape .*; it must be .* or \[1, 8\] \(row-wise\)"
            yield bad_value(wrong, op, x, w, ONE, ones(*shape))
        wrong = "scale_x is bfloat16; it must be float32 or float8_e8m0fnu"
        yield bad_type(wrong, op, x, w, ones(dtype=BF16), ONE)
        wrong = r"scale_x has shape \[4, 3\]; it must be \[4, 2\], or \[512\] if it is swizzled"
        yield bad_value(wrong, op, x, w, ones(4, 3).to(E8M0), ones(8, 2).to(E8M0))
        wrong = r"the scale of w.* has shape \[2, 8\]; it must be \[8, 2\], or \[512\]"
        yield bad_value(wrong, op, x, w, blocks, ones(2, 8).to(E8M0))
        wrong = "scale_x is block-wise but the scale of w.* is tensor-wise; if either is block-wise"
        yield bad_value(wrong, op, x, w, blocks, ONE)
        wrong = (
            "scale_x has one scale per 32 elements of K, but K is 33, which is not divisible by 32"
        )
        yield bad_value(wrong, op, fp8(4, 33), fp8(33, 8), blocks, ONE)
        wrong = "scale_x is float32; it must be float8_e4m3fn"
        yield bad_type(wrong, op, fp4(4, 32), fp4(8, 32).t(), ONE, ONE)
    wrong = "scale_x is swizzled, but x has 4 rows on rank 0, which is not a multiple of 128; give"
    swizzled = ones(512).to(E8M0)
    yield unsupported(wrong, SCALED_GATHER, x, w, swizzled, swizzled)
    yield bad_value(
        "scales_w has length 2, but weights has length 1", SCALED_GATHER, x, w, ONE, [ONE, ONE]
    )


def scaled_options() -> Iterator[Refusal]:
    x, w = fp8(4, 32), fp8(32, 8, dtype=torch.float8_e5m2)
    opaque = ones(1).to_mkldnn()
    wrong = "has layout torch._mkldnn; the ops support dense tensors only"
    for op in SCALED_OPS:
        yield unsupported(f"scale_x {wrong}", op, x, w, opaque, ONE)
        yield unsupported(rf"scales?_w(\[0\])? {wrong}", op, x, w, ONE, opaque)
    bias = ones(8, dtype=BF16).to_mkldnn()
    yield unsupported(f"biases.0. {wrong}", SCALED_GATHER, x, w, ONE, ONE, biases=bias)
    for op, rows in ((SCALED_SCATTER, 2), (SCALED_REDUCE, 4)):
        residual = ones(rows, 8, dtype=BF16).to_mkldnn()
        yield unsupported(f"bias {wrong}", op, x, w, ONE, ONE, bias=bias)
        yield unsupported(f"residual {wrong}", op, x, w, ONE, ONE, residual=residual)
    for op in SCALED_OPS:
        wrong = "out_dtype is float8_e4m3fn; supported: bfloat16, float16, float32"
        yield unsupported(wrong, op, x, w, ONE, ONE, out_dtype=E4M3)
        wrong = "algorithm 'fused' of .*scaled_matmul.* does not support operands with scales"
        yield unsupported(wrong, op, x, w, ONE, ONE, algorithm="fused")
        for index in range(4):
            tensors = [x, w.clone(), ONE.clone(), ONE.clone()]
            tensors[index] = tensors[index].detach().clone().requires_grad_()
            wrong = f"{op.__name__} has no gradient; call it under torch.no_grad"
            yield unsupported(wrong, op, *tensors)
    for op in (SCALED_SCATTER, SCALED_REDUCE):
        wrong = "wire_dtype is float16; supported: bfloat16, float32"
        yield unsupported(wrong, op, x, w, ONE, ONE, wire_dtype=torch.float16)
        for name, shape in (("bias", (8,)), ("residual", (2 if op is SCALED_SCATTER else 4, 8))):
            wrong = f"{name} is float32; it must be bfloat16"
            yield bad_type(wrong, op, x, w, ONE, ONE, **{name: ones(*shape)})
            wrong = rf"{name} has shape \[3\]"
            yield bad_value(wrong, op, x, w, ONE, ONE, **{name: ones(3, dtype=BF16)})
    wrong = "biases.0. is float32; it must be bfloat16"
    yield bad_type(wrong, SCALED_GATHER, x, w, ONE, ONE, biases=ones(8))
    yield bad_value(
        "biases has length 2, but weights has length 1",
        SCALED_GATHER,
        x,
        w,
        ONE,
        ONE,
        biases=[None, None],
    )
    yield bad_value("weights is empty", SCALED_GATHER, x, [], ONE, [])
    for op, name in ((SCALED_GATHER, "gather_dim"), (SCALED_SCATTER, "scatter_dim")):
        yield unsupported(rf"{name} is 1, the last dim of shape", op, x, w, ONE, ONE, **{name: 1})
        yield bad_value(f"{name} is 2; a tensor of 2 dims", op, x, w, ONE, ONE, **{name: 2})
    yield bad_value(
        "dim has 5 rows, which is not divisible by world_size=2",
        SCALED_SCATTER,
        fp8(5, 32),
        w,
        ONE,
        ONE,
    )
    wrong = r"x has 4 rows in the gathered dim, but shard_sizes \[3, 3\] specifies 3 for rank"
    yield bad_value(wrong, SCALED_GATHER, x, w, ONE, ONE, shard_sizes=[3, 3])


def placements() -> Iterator[Refusal]:
    """Tensors on a different device than x, one at a time, and tensors that are not dense."""
    x, w, columns, rows, shard = ones(4, 6), ones(6, 8), ones(8), ones(4, 8), ones(2, 8)
    fp8, scale = torch.float8_e4m3fn, torch.ones(())
    scaled = {"x": x.to(fp8), "scale_x": scale, "w": w.t().to(fp8).t(), "scale_w": scale}
    listed = {"weights": scaled["w"], "scales_w": scale}
    added, normed = {"bias": columns, "residual": rows}, {"residual": rows, "weight": columns}
    arguments: dict[Callable[..., Any], dict[str, torch.Tensor]] = {
        GATHER: {"x": x, "weights": w, "biases": columns},
        SCATTER: {"x": x, "w": w, "bias": columns, "residual": shard},
        REDUCE: {"x": x, "w": w, **added},
        tpkernels.all_reduce_rms_norm: {"x": rows, **normed},
        tpkernels.matmul_all_reduce_rms_norm: {"x": x, "w": w, **added, "norm_weight": columns},
        SCALED_GATHER: {"x": scaled["x"], "scale_x": scale, **listed},
        SCALED_SCATTER: scaled,
        SCALED_REDUCE: scaled,
    }
    for op, tensors in arguments.items():
        for name in tensors:
            wrong = {**tensors, name: tensors[name].to("meta")}
            pattern = f"is on {'cpu but x is on meta' if name == 'x' else 'meta but x is on cpu'}"
            yield Refusal(
                ValueError, pattern, lambda group, op=op, wrong=wrong: op(group=group, **wrong)
            )
    for weight in (w, tpkernels.CustomMatmul(lambda x: x @ w, (6, 8), torch.float32)):
        pattern = "w is on|x is on meta"
        yield Refusal(
            ValueError if weight is w else NotImplementedError,
            pattern,
            lambda group, w=weight: REDUCE(x.to("meta"), w, group),
        )
        pattern = "residual is on meta but x is on cpu"
        yield bad_value(pattern, REDUCE, x, weight, residual=rows.to("meta"))
    pattern = r"biases\[0\] is nested; the ops support dense tensors only"
    yield unsupported(
        pattern, GATHER, x, w, biases=torch.nested.nested_tensor([w], layout=torch.jagged)
    )
    pattern = "x has layout torch._mkldnn; the ops support dense tensors only"
    yield unsupported(pattern, tpkernels.all_reduce_rms_norm, rows.to_mkldnn(), columns)
    for layer, layer_input in (
        (tpkernels.nn.ColumnParallelLinear, x),
        (tpkernels.nn.RowParallelLinear, x[:, :3]),
        (tpkernels.nn.VocabParallelEmbedding, torch.ones(2, dtype=torch.int64)),
    ):
        yield Refusal(
            ValueError,
            "w.* is on meta but x is on cpu",
            lambda group, layer=layer, x=layer_input: layer(6, 8, group, device="meta")(x),
        )


# Outcomes of the calls.


def wrong_answer(refusal: Refusal, group: dist.ProcessGroup) -> str | None:
    """Return a description of a wrong outcome, or None."""
    expected = f"{refusal.error.__name__}: {refusal.pattern}"
    try:
        refusal.call(group)
    except Exception as error:
        message = str(error)
        if type(error) is not refusal.error or not re.search(refusal.pattern, message):
            return f"expected {expected}\ngot {type(error).__name__}: {message}"
        if "\n" in message:
            return f"more than one line: {message}"
        return None
    return f"not refused; expected {expected}"


def works(group: dist.ProcessGroup) -> bool:
    result = tpkernels.all_reduce(torch.ones(3), group)
    return torch.equal(result, torch.full((3,), float(group.size())))


@pytest.mark.parametrize(
    "table",
    [
        matmul_operands,
        packed_weights,
        custom_matmuls,
        epilogues,
        shards,
        collectives,
        arguments,
        group_arguments,
        options,
        normed_matmuls,
        normed_sums,
        scaled_operands,
        scaled_scales,
        scaled_options,
        placements,
    ],
    ids=lambda table: table.__name__,
)
@on_ranks(2)
def test_refusals(table: Callable[[], Iterator[Refusal]]) -> None:
    """Make each wrong call on every rank. No data is sent: the epoch of the group does not
    change."""
    with fresh_group() as group:
        workspace = faults.get_workspace(group)
        for refusal in table():
            epoch = workspace.epoch
            wrong = wrong_answer(refusal, group)
            assert wrong is None, wrong
            assert workspace.epoch == epoch, refusal.pattern
        assert works(group), "the group does not work any more"


# Jobs, run in the ranks.


@on_ranks(2)
def test_on_an_unused_group() -> list[str]:
    """A wrong first call does not set up the group. The next call does."""
    group = dist.new_group()
    assert group is not None
    tables = (matmul_operands, epilogues, shards)
    errors = [wrong_answer(refusal, group) for table in tables for refusal in table()]
    if not works(group):
        errors.append("the group does not work")
    dist.destroy_process_group(group)
    return [wrong for wrong in errors if wrong is not None]


@on_ranks(2)
def test_on_one_rank_only() -> None:
    """Rank 0 makes wrong calls. Its peers do not notice, because no data is sent. Then all ranks
    meet in a call."""
    with fresh_group() as group:
        for refusal in [*matmul_operands(), *shards()]:
            assert group.rank() != 0 or not (wrong := wrong_answer(refusal, group)), wrong
        assert works(group), "the group does not work any more"


@on_ranks(3)
def test_a_group_without_this_rank() -> list[str]:
    """The group is passed as torch returns it, and by its name on its ranks."""
    rank, created = dist.get_rank(), [dist.new_group([0]), dist.new_group([1, 2])]
    local_group, remote_group = created if rank == 0 else created[::-1]
    names: list[Any] = [None] * 3
    dist.all_gather_object(names, local_group.group_name)
    outside, name = f"global rank {rank} is not in this group", names[rank == 0]
    refused = [
        make_refusal(ValueError, outside, lambda _: tpkernels.init(remote_group)),
        make_refusal(
            ValueError, outside, lambda _: tpkernels.all_reduce(torch.ones(3), remote_group)
        ),
        make_refusal(
            ValueError,
            f"process group '{name}' does not exist on this rank; .* does not contain this rank",
            lambda _: tpkernels.all_reduce(torch.ones(3), name),
        ),
    ]
    return [
        wrong for refusal in refused if (wrong := wrong_answer(refusal, local_group)) is not None
    ]


@pytest.mark.parametrize("total,world", [(-1, 2), (4, 0), (4, -1)])
def test_impossible_splits(total: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split {total} rows over {world} ranks"):
        tpkernels.shard_sizes(total, world)


@pytest.mark.parametrize("unit", [0, 3])
def test_impossible_units(unit: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split 4 rows at multiples of {unit}"):
        tpkernels.shard_sizes(4, 2, unit)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("total,world", [(0, 3), (1, 4), (7, 3), (12, 4), (1023, 5)])
def test_splits_are_balanced(total: int, world: int, unit: int) -> None:
    sizes = tpkernels.shard_sizes(unit * total, world, unit)
    assert (len(sizes), sum(sizes)) == (world, unit * total)
    assert max(sizes) - min(sizes) <= unit and sizes == sorted(sizes, reverse=True)
    assert not any(size % unit for size in sizes)


def test_no_default_group() -> None:
    with pytest.raises(ValueError, match="the default process group does not exist; call"):
        tpkernels.init()
