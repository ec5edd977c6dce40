"""Single-kernel calls: all-reduce (optionally fused with RMSNorm), all-gather, reduce-scatter, MoE
dispatch and combine, the sum of partials, and a barrier.

Sums follow the numerics contract: fp32, in rank order, then bias, then residual, one rounding. All
variants are bitwise identical. RMSNorm is applied to the rows of the rounded sum. The normalised
values of a row depend only on that row, not on the variant or on the number of blocks per row
(csrc/cuda/rms_norm.cuh).

All-gather and reduce-scatter are one launch in which every rank pushes to all peers. The variants
are ``ll`` (the LL protocol of NCCL) and ``one_shot``. For few bytes this should be faster than
starting copy engines (``copies.py``). Not measured.

All tensors in this folder are contiguous, in fp32, fp16 or bf16. Errors:

- Calls and ``prepare_*`` functions raise ``ValueError`` if arguments are inconsistent, and
  ``NotImplementedError`` for unsupported dtypes.
- Binding a prepared call raises ``ValueError`` if the workspace is too small.
- A launch raises ``NotImplementedError`` without a driver or GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tpkernels import _C
from tpkernels.common.dtypes import CODES
from tpkernels.common.integers import ceil_div
from tpkernels.cuda import layouts, operands
from tpkernels.cuda.image import device_and_stream, launch
from tpkernels.cuda.operands import epilogue, kernel_workspace
from tpkernels.planning.cost import all_reduce_variant
from tpkernels.planning.qualification import SHARDS, SUMS, select_variants
from tpkernels.symm.device import DeviceWorkspace, PreparedCall

VARIANTS = ("two_shot", "ll", "ll_two_shot")
# Of `sum_partials`: max blocks, and min elements per block. Not measured.
_MAX_SUM_BLOCKS, _SUM_ELEMENTS_PER_BLOCK = 1024, 2048
_THREADS = 256  # kRowThreads in csrc/cuda
# Max blocks per row (not measured); min compute capability for clusters and multicast.
_MAX_CLUSTER, _CLUSTER_CAPABILITY = 4, 90
_MAX_RMS_NORM_ROWS = 1024  # max concurrent rows of `rms_norm`, which has the GPU to itself
Sizes = tuple[int, ...]


def prepare_all_reduce(
    world: int,
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    variant: str = "auto",
    early: bool = False,
    variants: frozenset[str] = frozenset(),
) -> PreparedCall:
    """Prepare ``out = round(sum_r(x_r) + bias + residual)`` on every rank.

    The bias is added along the last dim. ``out`` may be x. The dtypes of x, out, bias and residual
    may differ. The launch arguments are (x, out, bias, residual).

    Args:
        variant: ``two_shot`` (each rank reduces one segment and sends it to its peers), ``ll`` (LL
            protocol of NCCL: no fences, twice the bytes, each rank reduces all elements),
            ``ll_two_shot`` (two-shot over LL) or ``auto`` (selected by size from ``variants``).
        early: the kernel may start while the preceding kernel of the stream runs. That kernel must
            be a matmul, queued after the previous call of the workspace on the same stream.
        variants: the variants of the workspace, from which ``auto`` selects.
    """
    device, count = x.device, x.numel()
    operands.check_summable(device, x=x, out=out, bias=bias, residual=residual)
    operands.check_matching(False, x=x, out=out, residual=residual)
    operands.check_bias(bias, x.shape[-1] if x.dim() else 1)
    if variant == "auto":
        variant = all_reduce_variant(
            count * x.element_size(), world, select_variants(variants, SUMS)
        )
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}; it must be auto or one of {', '.join(VARIANTS)}")
    layout = layouts.all_reduce_layout(variant, count, world, x.element_size(), out.element_size())
    out_dtype = out.dtype

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_capacity(workspace, device, world, layout.signals, layout.nbytes)
        workspace_args = kernel_workspace(workspace, signature)

        def run(
            x: torch.Tensor,
            out: torch.Tensor,
            bias: torch.Tensor | None,
            residual: torch.Tensor | None,
        ) -> None:
            epilogue_args = epilogue(out_dtype, bias, residual)
            call = _all_reduce(x, out, epilogue_args, layout)
            launch(
                f"{variant}_all_reduce",
                device,
                workspace_args,
                call,
                blocks=layout.blocks,
                early=early,
            )

        return run

    return PreparedCall(layout.signals, layout.nbytes, (), bind)


def _all_reduce(
    x: torch.Tensor,
    out: torch.Tensor,
    epilogue_args: _C.cuda.Epilogue,
    layout: layouts.BufferLayout,
) -> _C.cuda.AllReduce:
    addresses, offsets = (x.data_ptr(), out.data_ptr()), (layout.slot_bytes, layout.results_offset)
    return _C.cuda.AllReduce(
        *addresses, x.numel(), CODES[x.dtype], epilogue_args, layout.segment, *offsets
    )


def sum_partials(
    out: torch.Tensor,
    partials: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    begin: int = 0,
) -> None:
    """Compute ``out = round(partials[0] + partials[1] + ... + bias + residual)``.

    The terms are added in fp32 in this order. All partials have the same dtype, and ``out`` may be
    one of them. The partials start at element ``begin`` of the full output, so element i adds
    ``bias[(begin + i) % len(bias)]``."""
    if not 1 <= len(partials) <= _C.cuda.MAX_WORLD:
        raise ValueError(
            f"partials has {len(partials)} tensors; it must have 1 to {_C.cuda.MAX_WORLD}"
        )
    first = partials[0]
    labeled = {f"partials[{i}]": partial for i, partial in enumerate(partials)}
    operands.check_summable(out.device, **labeled, out=out, bias=bias, residual=residual)
    operands.check_matching(True, **labeled)
    operands.check_matching(False, partials=first, out=out, residual=residual)
    operands.check_bias(bias)
    if begin < 0:
        raise ValueError(f"begin is {begin}; it must be at least 0")
    addresses = [partial.data_ptr() for partial in partials]
    epilogue_args = epilogue(out.dtype, bias, residual)
    partial_args = addresses, CODES[first.dtype]
    call = _C.cuda.SumPartials(out.data_ptr(), *partial_args, begin, out.numel(), epilogue_args)
    blocks = min(_MAX_SUM_BLOCKS, max(1, ceil_div(out.numel(), _SUM_ELEMENTS_PER_BLOCK)))
    launch("sum_of_partials", out.device, call, blocks=blocks)


def barrier(workspace: DeviceWorkspace, signature: int) -> None:
    """Queue a barrier of all ranks. After it, all work that any rank queued before its barrier is
    complete and visible."""
    launch("call_barrier", workspace.regions.device, kernel_workspace(workspace, signature))


def prepare_all_gather(
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: Sizes,
    variant: str = "auto",
    variants: frozenset[str] = frozenset(),
) -> PreparedCall:
    """Prepare ``out = concat_r(x_r)``: x [sizes[rank], columns], out [sum(sizes), columns].

    ``auto`` selects from the ``variants`` of the workspace. The launch arguments are (x, out)."""
    if out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype} but x is {x.dtype}; they must have the same dtype")
    return _prepare_shards(
        "all_gather", layouts.PACK_BYTES, x, out, sizes, None, None, variant, variants
    )


def prepare_reduce_scatter(
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: Sizes,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    variant: str = "auto",
    variants: frozenset[str] = frozenset(),
) -> PreparedCall:
    """Prepare ``out = round(rows_rank(sum_r(x_r)) + bias + residual)``.

    The sum is computed in fp32 in rank order: x [sum(sizes), columns], out and residual
    [sizes[rank], columns], bias [columns]. Their dtypes may differ. ``auto`` selects from the
    ``variants`` of the workspace. The launch arguments are (x, out, bias, residual)."""
    vector_bytes, added = layouts.VECTOR * x.element_size(), (bias, residual)
    return _prepare_shards("reduce_scatter", vector_bytes, x, out, sizes, *added, variant, variants)


def _prepare_shards(
    kernel: str,
    vector_bytes: int,  # bytes per thread and iteration in LL
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: Sizes,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    variant: str,
    variants: frozenset[str],
) -> PreparedCall:
    if variant not in ("auto", "one_shot", "ll"):
        raise ValueError(f"variant is {variant!r}; it must be auto, one_shot or ll")
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be a matrix")
    device, columns, dtypes = x.device, x.shape[1], (x.dtype, out.dtype)
    operands.check_summable(device, x=x, out=out, bias=bias, residual=residual)
    operands.check_bias(bias, columns)
    if residual is not None and residual.shape != out.shape:
        raise ValueError(
            f"residual has shape {list(residual.shape)}; it must have the shape of out, "
            f"{list(out.shape)}"
        )
    row_bytes = columns * x.element_size()
    if variant == "auto":
        small = sum(sizes) * row_bytes <= layouts.LL_BYTES
        candidates = select_variants(variants, SHARDS)
        variant = "ll" if candidates == {"ll"} or (small and "ll" in candidates) else "one_shot"
    layout = layouts.shards_layout(variant, max(sizes) * row_bytes, len(sizes), vector_bytes)
    shapes = list(x.shape), list(out.shape)

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_capacity(workspace, device, len(sizes), layout.signals, layout.nbytes)
        shard_shape, full_shape = [sizes[workspace.rank], columns], [sum(sizes), columns]
        expected_shapes = (
            (shard_shape, full_shape) if kernel == "all_gather" else (full_shape, shard_shape)
        )
        if shapes != expected_shapes:
            raise ValueError(
                f"x has shape {shapes[0]} and out has shape {shapes[1]}; with sizes {list(sizes)} "
                f"they must be {expected_shapes[0]} and {expected_shapes[1]} on rank "
                f"{workspace.rank}"
            )
        workspace_args, starts, code = (
            kernel_workspace(workspace, signature),
            workspace.starts(sizes),
            CODES[dtypes[0]],
        )

        def run(
            x: torch.Tensor,
            out: torch.Tensor,
            bias: torch.Tensor | None = None,
            residual: torch.Tensor | None = None,
        ) -> None:
            addresses = x.data_ptr(), out.data_ptr(), starts.data_ptr()
            epilogue_args = epilogue(dtypes[1], bias, residual)
            call = _C.cuda.Shards(*addresses, columns, code, layout.slot_bytes, epilogue_args)
            launch(f"{variant}_{kernel}", device, workspace_args, call, blocks=layout.blocks)

        return run

    return PreparedCall(layout.signals, layout.nbytes, sizes, bind)


def prepare_routed(
    x: torch.Tensor,
    out: torch.Tensor,
    permutation: torch.Tensor,
    sizes: Sizes,
    weights: torch.Tensor | None = None,
) -> PreparedCall:
    """Prepare an MoE dispatch or, with ``weights``, an MoE combine.

    Dispatch: x [sizes[rank], H] holds the local tokens. out [max_rows, H] receives the rows of the
    local experts, followed by zeros.

    Combine: x [R, H] holds the rows of the local experts. For each local token, ``out`` is
    ``round(sum_j(weights[:, j] * row of assignment j))``. Every multiplication and addition is
    rounded to fp32, in the order of j.

    The launch arguments are (x, out, permutation, rank_offsets, max_rows, inverse_permutation,
    weights):

        permutation: int64 [sum(sizes) * k], the assignment (token * k + slot) at each position of
            the expert-sorted order.
        rank_offsets: int64 [world + 1], the first position of each rank, then the end of the last
            rank.
        max_rows: capacity of each rank in rows. The output of a token is NaN if one of its
            assignments exceeds the capacity or has a position outside all ranks.
        inverse_permutation: inverse of permutation (combine only).
        weights: fp32 [sizes[rank], k] (combine only).
    """
    device, k, columns = x.device, permutation.numel() // max(sum(sizes), 1), x.shape[1]
    operands.check_summable(device, x=x, out=out, weights=weights)
    combines, code = weights is not None, CODES[x.dtype]
    layout = layouts.routed_layout(max(sizes), k, columns, x.element_size(), combines)
    tokens = list((out if combines else x).shape)
    if out.dtype != x.dtype or out.shape[1] != columns:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype} but out is {list(out.shape)} {out.dtype}; they must "
            "have the same number of columns and the same dtype"
        )

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_capacity(workspace, device, len(sizes), layout.signals, layout.nbytes)
        if tokens != [sizes[workspace.rank], columns]:
            raise ValueError(
                f"{'out' if combines else 'x'} has shape {tokens}; it must be "
                f"{[sizes[workspace.rank], columns]} on rank {workspace.rank}"
            )
        kernel = "routed_combine" if combines else "routed_dispatch"
        workspace_args, starts = kernel_workspace(workspace, signature), workspace.starts(sizes)

        def run(
            x: torch.Tensor,
            out: torch.Tensor,
            permutation: torch.Tensor,
            rank_offsets: torch.Tensor,
            max_rows: int,
            inverse_permutation: torch.Tensor | None = None,
            weights: torch.Tensor | None = None,
        ) -> None:
            assignment_args = _address(inverse_permutation), _address(weights)
            addresses = (
                x.data_ptr(),
                out.data_ptr(),
                permutation.data_ptr(),
                *assignment_args,
                rank_offsets.data_ptr(),
            )
            call = _C.cuda.Routed(*addresses, starts.data_ptr(), k, max_rows, columns, code)
            launch(kernel, device, workspace_args, call, blocks=layout.blocks)

        return run

    return PreparedCall(layout.signals, layout.nbytes, sizes, bind)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def supports_rms_norm(dtype: torch.dtype, columns: int) -> bool:
    """Return whether the RMSNorm kernels support rows of this dtype and length."""
    return dtype in operands.DTYPES and columns % layouts.VECTOR == 0


def prepare_normed_all_reduce(
    world: int,
    x: torch.Tensor,
    total: torch.Tensor,
    normed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    variant: str = "auto",
    early: bool = False,
    variants: frozenset[str] = frozenset(),
) -> PreparedCall:
    """Prepare an all-reduce followed by RMSNorm on every rank::

        total = round(sum_r(x_r) + bias + residual)
        normed = round(total / sqrt(mean(total^2) + eps) * weight)  # in fp32

    x, total and normed are [..., N] and have the same dtype; N is a multiple of 8. ``total`` may be
    x. residual has the shape of x; weight and bias are [N]. The dtypes of these three may differ.
    ``variant``, ``early`` and ``variants`` are the options of `prepare_all_reduce`. The launch
    arguments are (x, total, normed, weight, bias, residual)."""
    allowed = ("auto", *VARIANTS)
    if variant not in allowed:
        raise ValueError(f"variant is {variant!r}; it must be one of {', '.join(allowed)}")
    rows, columns = _matrix(x)
    device, dtype, count, x_itemsize = x.device, x.dtype, x.numel(), x.element_size()
    operands.check_summable(device, x=x, bias=bias, residual=residual)
    _check_rows(x, weight, total=total, normed=normed)
    operands.check_matching(False, x=x, residual=residual)
    operands.check_bias(bias, columns)
    if variant == "auto":
        variant = all_reduce_variant(
            count * x_itemsize, world, select_variants(variants, SUMS), rows
        )
    uses_ll = variant in ("ll", "ll_two_shot")
    cluster = _cluster(rows if uses_ll else ceil_div(rows, world), columns, device)
    layout = layouts.rows_layout(variant, rows, columns, world, x_itemsize, cluster)

    def bind(workspace: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_capacity(workspace, device, world, layout.signals, layout.nbytes)
        workspace_args = kernel_workspace(workspace, signature)
        shape = {"blocks": layout.blocks, "cluster": cluster, "early": early}

        def run(
            x: torch.Tensor,
            total: torch.Tensor,
            normed: torch.Tensor,
            weight: torch.Tensor,
            bias: torch.Tensor | None,
            residual: torch.Tensor | None,
        ) -> None:
            _check_aligned(total=total, normed=normed)
            x, scale = _aligned(x), _aligned(weight)
            residual = None if residual is None else _aligned(residual)
            call = _all_reduce(x, total, epilogue(dtype, bias, residual), layout)
            norm = _norm(normed, scale, eps)
            launch(f"{variant}_all_reduce_rms_norm", device, workspace_args, call, norm, **shape)

        return run

    return PreparedCall(layout.signals, layout.nbytes, (), bind)


def rms_norm(rows: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Compute ``normed = round(rows / sqrt(mean(rows^2) + eps) * weight)``. It is bitwise identical
    to ``normed`` of `prepare_normed_all_reduce` with ``total == rows``. The requirements on the
    arguments are equal."""
    _check_rows(rows, weight, normed=normed)
    _check_aligned(normed=normed)
    count, columns = _matrix(rows)
    cluster = _cluster(count, columns, rows.device)
    aligned_rows, scale = _aligned(rows), _aligned(weight)
    call = _C.cuda.Rows(aligned_rows.data_ptr(), rows.numel(), CODES[rows.dtype])
    blocks = cluster * min(max(count, 1), _MAX_RMS_NORM_ROWS)
    norm = _norm(normed, scale, eps)
    launch("rms_norm_of_rows", rows.device, call, norm, blocks=blocks, cluster=cluster)


def _matrix(x: torch.Tensor) -> tuple[int, int]:
    """Return the number of rows and columns."""
    columns = x.shape[-1] if x.dim() else 0
    if columns < 1 or columns % layouts.VECTOR:
        raise NotImplementedError(
            f"rows have {columns} elements; the RMSNorm kernels need a multiple of {layouts.VECTOR}"
        )
    return x.numel() // columns, columns


def _check_rows(x: torch.Tensor, weight: torch.Tensor, **outs: torch.Tensor) -> None:
    operands.check_contiguous(x.device, **outs)
    operands.check_summable(x.device, x=x, weight=weight)
    operands.check_matching(True, x=x, **outs)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [{x.shape[-1]}]")


def _check_aligned(**outs: torch.Tensor) -> None:
    for label, out in outs.items():
        if out.data_ptr() % layouts.PACK_BYTES:
            raise ValueError(
                f"{label} is not aligned to {layouts.PACK_BYTES} bytes; pass a new tensor"
            )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy if x is not aligned to 16 bytes. Ranks may differ."""
    return x if x.data_ptr() % layouts.PACK_BYTES == 0 else x.clone()


def multicast_unsupported(device: torch.device) -> str | None:
    """Return the reason why a GPU does not support multicast, or None. The kernels of the GPU must
    be loaded."""
    capability = _capability(device_and_stream(device)[0])
    if capability >= _CLUSTER_CAPABILITY:
        return None
    return f"needs compute capability 9.0 or higher; {device} has {capability / 10:.1f}"


@functools.cache
def _capability(device: int) -> int:
    return _C.cuda.compute_capability(device)


def _cluster(rows: int, columns: int, device: torch.device) -> int:
    """Return the number of blocks per row, a power of 2: enough for a vector per thread to cover
    the row, within the limits of the GPU and of a call."""
    has_clusters, cluster = _capability(device_and_stream(device)[0]) >= _CLUSTER_CAPABILITY, 1
    max_cluster = min(_MAX_CLUSTER, layouts.MAX_BLOCKS // max(rows, 1)) if has_clusters else 1
    while 2 * cluster <= max_cluster and cluster * _THREADS * layouts.VECTOR < columns:
        cluster *= 2
    return cluster


def _norm(normed: torch.Tensor, weight: torch.Tensor, eps: float) -> _C.cuda.RmsNorm:
    return _C.cuda.RmsNorm(
        normed.data_ptr(), weight.data_ptr(), weight.numel(), CODES[weight.dtype], eps
    )
