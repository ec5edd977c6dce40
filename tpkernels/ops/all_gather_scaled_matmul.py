"""``y_i = (concat_r(x_r) * scale_x) @ (w_i * scale_w_i)``: the column-parallel layer with sequence
parallelism, on fp8 or fp4 operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tpkernels import validation
from tpkernels.algorithms.parts import Products
from tpkernels.call import Call
from tpkernels.groups import GroupLike, break_if_left, name_of
from tpkernels.groups.group import Group
from tpkernels.local.memory import empty
from tpkernels.local.scales import Packing
from tpkernels.ops import scaled
from tpkernels.ops._library import bias_list, define, define_without_gradient
from tpkernels.ops._shortcut import shortcut
from tpkernels.planning.problem import Problem

SCHEMA = (
    "all_gather_scaled_matmul(Tensor x, Tensor[] weights, Tensor scale_x, Tensor[] scales_w, "
    "str group, int gather_dim=0, Tensor[]? biases=None, *, ScalarType? out_dtype=None, "
    "bool use_fast_accum=False, bool return_gathered=False, SymInt[]? shard_sizes=None, "
    "str algorithm='auto') -> (Tensor gathered, Tensor[] outs)"
)


def _problem(group: Group, given: Any) -> Problem:
    x, scale = given.x, given.scale_x
    scaled.operand(x, "x")
    dim = validation.dim(given.gather_dim, x.dim(), "gather_dim")
    if dim == x.dim() - 1:
        raise NotImplementedError(
            f"gather_dim is {dim}, the last of {list(x.shape)}; x is gathered along its rows"
        )
    sizes = validation.gather_sizes(given.shard_sizes, x.shape[dim], group.rank, group.world)
    lead = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 : -1])
    scaled.input_and_scale(x, scale, [x.shape[:-1], lead])
    scaled.swizzled_rows(scale, x.shape[:-1], dim, sizes)
    weights, scales, biases = given.weights, given.scales_w, given.biases
    if not weights:
        raise ValueError("weights is empty; pass at least one weight")
    if len(scales) != len(weights):
        raise ValueError(f"{len(scales)} scales for {len(weights)} weights")
    if biases is not None and len(biases) != len(weights):
        raise ValueError(f"{len(biases)} biases for {len(weights)} weights")
    out_dtype = scaled.out_dtype(given.out_dtype)
    for i, (w, scale_w) in enumerate(zip(weights, scales, strict=True)):
        scaled.weight_and_scale(w, scale_w, x, scale, f"weights[{i}]")
        if biases is not None and biases[i].shape != (0,):
            scaled.vector(biases[i], x, w.shape[1], out_dtype, f"biases[{i}]")
    return Problem(
        op="all_gather_scaled_matmul",
        device=validation.device(x),
        world=group.world,
        shape=(*lead, Packing.of(x, scale).words),
        dim=dim,
        sizes=sizes,
        dtype=torch.float32,
        options=replace(
            scaled.gather_options(x, scale, out_dtype), return_gathered=given.return_gathered
        ),
    )


def _execute(call: Call, given: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x, weights, problem = given.x, given.weights, call.problem
    scale = scaled.own_scale(given.scale_x, problem, call.group.rank)
    rows = scaled.Rows.of(x, scale, weights, given.scales_w, given.use_fast_accum)
    out_dtype = scaled.out_dtype(given.out_dtype)
    outs = [empty((*problem.shape[:-1], w.shape[1]), out_dtype, x.device) for w in weights]
    biases = [b if b.numel() else None for b in given.biases or [x.new_empty(0)] * len(weights)]
    gathered = None
    if given.return_gathered:
        gathered = empty(problem.shape, problem.dtype, x.device)
    call.function(call, rows.packed, Products(rows.weights, biases, outs, gathered))
    if gathered is None:
        return x.new_empty(0), outs
    return rows.packing.data(gathered).contiguous(), outs


def _fake(group: Group, given: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x, out_dtype = given.x, scaled.out_dtype(given.out_dtype)
    shape = validation.gathered_shape(x.shape, given.gather_dim, given.shard_sizes, group)
    outs = [x.new_empty((*shape[:-1], w.shape[1]), dtype=out_dtype) for w in given.weights]
    return x.new_empty(shape if given.return_gathered else [0]), outs


define(SCHEMA, problem=_problem, execute=_execute, fake=_fake)
define_without_gradient("all_gather_scaled_matmul", instead=scaled.NO_GRADIENT)
_run = shortcut("all_gather_scaled_matmul")


def all_gather_scaled_matmul(
    x: torch.Tensor,
    weights: torch.Tensor | Sequence[torch.Tensor],
    scale_x: torch.Tensor,
    scales_w: torch.Tensor | Sequence[torch.Tensor],
    group: GroupLike,
    gather_dim: int = 0,
    *,
    biases: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    return_gathered: bool = False,
    shard_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
) -> Any:
    """Gather a scaled ``x`` over the ranks of ``group`` and multiply it by each scaled weight,
    as one operation. The bytes of ``x`` travel, each row with its scales.

    Args:
        x: [..., K] of float8_e4m3fn, float8_e5m2, or float4_e2m1fn_x2 (whose last dim is K / 2),
            this rank's shard along ``gather_dim``; any strides.
        weights: [K, N] or several [K, N_i] that share the gather, of the same kinds of dtype; any
            strides (``linear.weight.t()`` is the fast layout). N may differ by rank.
        scale_x: of ``x``. Tensor-wise, float32: [] or [1], the same on all ranks. Row-wise,
            float32: [..., 1], of this rank's rows, or of those of all ranks. Block-wise,
            float8_e8m0fnu for every 32 numbers of K: [..., K / 32], or swizzled (below); for fp4
            float8_e4m3fn for every 16.
        scales_w: of each weight. Tensor-wise: [] or [1]; row-wise: [1, N]; block-wise:
            [N, K / 32], or swizzled. Tensor-wise and row-wise scales mix.
        group: a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
        gather_dim: the dim of ``x`` that is split over the ranks; not the last.
        biases: [N] of ``out_dtype`` for each weight, or None.
        out_dtype: of the result: bfloat16 (default), float16 or float32.
        use_fast_accum: as in ``torch._scaled_mm``; no effect on CPUs.
        return_gathered: also return the gathered ``x``, without scales.
        shard_sizes: rows of each rank along ``gather_dim``; default: all the same.
        algorithm: "auto", or the name of one; "fused" has no kernel for it.

    Swizzled scales have one dim, in the layout of ``SwizzleType.SWIZZLE_32_4_4``. Each rank's rows
    must be a multiple of 128 then.

    Returns:
        y [..., M, ..., N] for one weight, a list for several; ``(gathered, y)`` with
        ``return_gathered``. Products accumulate in fp32 and round once.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, the last dim, the requested
            algorithm, or a gradient.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.

    The arguments mean what they mean in ``torch.ops.symm_mem.fused_all_gather_scaled_matmul`` and
    ``torch._scaled_mm``.
    """
    try:
        single = isinstance(weights, torch.Tensor)
        each_bias = [biases] if isinstance(biases, torch.Tensor) else biases
        gathered, outs = _run(
            x,
            [weights] if isinstance(weights, torch.Tensor) else list(weights),
            scale_x,
            [scales_w] if isinstance(scales_w, torch.Tensor) else list(scales_w),
            name_of(group),
            gather_dim,
            biases=bias_list(x, each_bias),
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            return_gathered=return_gathered,
            shard_sizes=shard_sizes,
            algorithm=algorithm,
        )
        result = outs[0] if single else outs
        return (gathered, result) if return_gathered else result
    except BaseException as error:
        break_if_left(group, error)
        raise
