"""Calls of one kernel: all-reduces, also with rows that are normalised, gathers and scatters of
rows, the sum of partials, a barrier.

Sums follow the numerics contract: fp32, in rank order, then bias, then residual, one rounding. All
variants give the same bits. Gathers and scatters are one launch in which every rank pushes to all
others: by ``ll`` (NCCL's protocol LL) or ``one_shot``. For few bytes that should take less time
than starting copy engines (``copies.py``). Not measured. The rows that are normalised are those of
the rounded sum; their bits depend on the row alone, not on the variant or on how blocks share it
(csrc/cuda/rms_norm.cuh).

Tensors of all calls in this folder are contiguous, in fp32, fp16 or bf16. A call, or its
preparation, raises ``ValueError`` if an argument does not fit the others, and
``NotImplementedError`` for another dtype. Binding what is prepared raises ``ValueError`` if the
workspace is too small. A launch raises ``NotImplementedError`` without a driver or GPU.
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
from tpkernels.cuda.operands import epilogue, space_of
from tpkernels.planning.cost import all_reduce_variant
from tpkernels.planning.qualification import SHARDS, SUMS, usable
from tpkernels.symm.device import DeviceWorkspace, Prepared

VARIANTS = ("two_shot", "ll", "ll_two_shot")
_SUM_BLOCKS, _SUM_SHARE = 1024, 2048  # most blocks, and fewest elements for each; not measured
_THREADS = 256  # kRowThreads of csrc/cuda
_CLUSTER, _SINCE = 4, 90  # most blocks of a row (not measured); capability of clusters, multicast
_MOST_ROWS = 1024  # at a time, of a normalisation alone, which has the GPU to itself
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
) -> Prepared:
    """Prepare ``out = round(sum_r(x_r) + bias + residual)`` on every rank, bias along the last dim.
    ``out`` may be x; it, bias and residual have dtypes of their own. The launch takes x, out, bias
    and residual.

    Args:
        variant: ``two_shot`` (each rank reduces one segment and sends it to its peers), ``ll``
            (NCCL's LL protocol: no fences, twice the bytes; each rank reduces everything),
            ``ll_two_shot`` (two-shot over LL) or ``auto`` (by size, out of ``variants``).
        early: the kernel may start while the last kernel queued on the stream runs. That must be
            a product which was queued behind the workspace's previous call, on the same stream.
        variants: of the workspace; ``auto`` selects one of them.
    """
    device, count = x.device, x.numel()
    operands.check_summed(device, x=x, out=out, bias=bias, residual=residual)
    operands.check_alike(False, x=x, out=out, residual=residual)
    operands.check_bias(bias, x.shape[-1] if x.dim() else 1)
    if variant == "auto":
        variant = all_reduce_variant(count * x.element_size(), world, usable(variants, SUMS))
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}; it must be auto or one of {', '.join(VARIANTS)}")
    needs = layouts.all_reduce_layout(variant, count, world, x.element_size(), out.element_size())
    out_dtype = out.dtype

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_room(space, device, world, needs.words, needs.nbytes)
        words = space_of(space, signature)

        def run(
            x: torch.Tensor,
            out: torch.Tensor,
            bias: torch.Tensor | None,
            residual: torch.Tensor | None,
        ) -> None:
            after = epilogue(out_dtype, bias, residual)
            call = _all_reduce(x, out, after, needs)
            launch(f"{variant}_all_reduce", device, words, call, blocks=needs.blocks, early=early)

        return run

    return Prepared(needs.words, needs.nbytes, (), bind)


def _all_reduce(
    x: torch.Tensor,
    out: torch.Tensor,
    after: _C.cuda.Epilogue,
    needs: layouts.BufferLayout,
) -> _C.cuda.AllReduce:
    addresses, placed = (x.data_ptr(), out.data_ptr()), (needs.slot_bytes, needs.results_at)
    return _C.cuda.AllReduce(*addresses, x.numel(), CODES[x.dtype], after, needs.segment, *placed)


def sum_partials(
    out: torch.Tensor,
    partials: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    begin: int = 0,
) -> None:
    """Compute ``out = round(partials[0] + partials[1] + ... + bias + residual)``, added in fp32 in
    that order. ``out`` may be a partial. The partials share a dtype. They start at element
    ``begin`` of the whole output: element i gets ``bias[(begin + i) % len(bias)]``."""
    if not 1 <= len(partials) <= _C.cuda.MAX_WORLD:
        raise ValueError(
            f"partials has {len(partials)} tensors; it must have 1 to {_C.cuda.MAX_WORLD}"
        )
    first = partials[0]
    named = {f"partials[{i}]": partial for i, partial in enumerate(partials)}
    operands.check_summed(out.device, **named, out=out, bias=bias, residual=residual)
    operands.check_alike(True, **named)
    operands.check_alike(False, partials=first, out=out, residual=residual)
    operands.check_bias(bias)
    if begin < 0:
        raise ValueError(f"begin is {begin}; it must be at least 0")
    addresses = [partial.data_ptr() for partial in partials]
    after = epilogue(out.dtype, bias, residual)
    of_partials = addresses, CODES[first.dtype]
    call = _C.cuda.SumPartials(out.data_ptr(), *of_partials, begin, out.numel(), after)
    blocks = min(_SUM_BLOCKS, max(1, ceil_div(out.numel(), _SUM_SHARE)))
    launch("sum_of_partials", out.device, call, blocks=blocks)


def barrier(space: DeviceWorkspace, signature: int) -> None:
    """Wait for every rank's barrier: what any rank queued before its own is complete and visible
    then."""
    launch("call_barrier", space.regions.device, space_of(space, signature))


def prepare_all_gather(
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: Sizes,
    variant: str = "auto",
    variants: frozenset[str] = frozenset(),
) -> Prepared:
    """Prepare ``out = concat_r(x_r)``: x [sizes[rank], row], out [sum(sizes), row]. ``auto``
    selects one of the workspace's ``variants``. The launch takes x and out."""
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
) -> Prepared:
    """Prepare ``out = round(rows_rank(sum_r(x_r)) + bias + residual)``, added in fp32 in the order
    of the ranks: x [sum(sizes), row], out and residual [sizes[rank], row], bias [row]. Each has a
    dtype of its own. ``variants`` as for an all-gather. The launch takes x, out, bias, residual."""
    lane_bytes, added = layouts.LANE * x.element_size(), (bias, residual)
    return _prepare_shards("reduce_scatter", lane_bytes, x, out, sizes, *added, variant, variants)


def _prepare_shards(
    kernel: str,
    lane_bytes: int,  # that a thread takes at a time by LL
    x: torch.Tensor,
    out: torch.Tensor,
    sizes: Sizes,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    variant: str,
    variants: frozenset[str],
) -> Prepared:
    if variant not in ("auto", "one_shot", "ll"):
        raise ValueError(f"variant is {variant!r}; it must be auto, one_shot or ll")
    if x.dim() != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it must be a matrix")
    device, row, dtypes = x.device, x.shape[1], (x.dtype, out.dtype)
    operands.check_summed(device, x=x, out=out, bias=bias, residual=residual)
    operands.check_bias(bias, row)
    if residual is not None and residual.shape != out.shape:
        raise ValueError(
            f"residual has shape {list(residual.shape)}; it must have the shape of out, "
            f"{list(out.shape)}"
        )
    row_bytes = row * x.element_size()
    if variant == "auto":
        few = sum(sizes) * row_bytes <= layouts.LL_BYTES
        among = usable(variants, SHARDS)
        variant = "ll" if among == {"ll"} or (few and "ll" in among) else "one_shot"
    needs = layouts.shards_layout(variant, max(sizes) * row_bytes, len(sizes), lane_bytes)
    shapes = list(x.shape), list(out.shape)

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_room(space, device, len(sizes), needs.words, needs.nbytes)
        own, whole = [sizes[space.rank], row], [sum(sizes), row]
        wanted = (own, whole) if kernel == "all_gather" else (whole, own)
        if shapes != wanted:
            raise ValueError(
                f"x has shape {shapes[0]} and out has shape {shapes[1]}; with sizes {list(sizes)} "
                f"they must be {wanted[0]} and {wanted[1]} on rank {space.rank}"
            )
        words, starts, code = space_of(space, signature), space.starts(sizes), CODES[dtypes[0]]

        def run(
            x: torch.Tensor,
            out: torch.Tensor,
            bias: torch.Tensor | None = None,
            residual: torch.Tensor | None = None,
        ) -> None:
            addresses = x.data_ptr(), out.data_ptr(), starts.data_ptr()
            after = epilogue(dtypes[1], bias, residual)
            call = _C.cuda.Shards(*addresses, row, code, needs.slot_bytes, after)
            launch(f"{variant}_{kernel}", device, words, call, blocks=needs.blocks)

        return run

    return Prepared(needs.words, needs.nbytes, sizes, bind)


def prepare_routed(
    x: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    sizes: Sizes,
    weights: torch.Tensor | None = None,
) -> Prepared:
    """Prepare a dispatch: from x [sizes[rank], H], this rank's tokens, to out [most, H], the rows
    of its experts and then zeros. Or, with weights, a combine: from x [R, H], the rows of its
    experts, to ``out = round(sum_j(weights[:, j] * row of route j))`` of its tokens, each product
    and sum rounded to fp32, in the order of j.

    The launch takes x, out, order, edges, most, places and weights:

        order: [sum(sizes) * k] of int64, the route, token * k + slot, of each place.
        edges: [world + 1] of int64, the places at which each rank's rows begin, and the last's end.
        most: rows for which each rank has room. A token with a route beyond, or at a place of no
            rank, is summed to NaN.
        places: of a combine, the inverse of order.
        weights: of a combine, [sizes[rank], k] of fp32.
    """
    device, k, row = x.device, order.numel() // max(sum(sizes), 1), x.shape[1]
    operands.check_summed(device, x=x, out=out, weights=weights)
    combines, code = weights is not None, CODES[x.dtype]
    needs = layouts.routed_layout(max(sizes), k, row, x.element_size(), combines)
    tokens = list((out if combines else x).shape)
    if out.dtype != x.dtype or out.shape[1] != row:
        raise ValueError(
            f"x is {list(x.shape)} {x.dtype} but out is {list(out.shape)} {out.dtype}; they must "
            "have the same number of columns and the same dtype"
        )

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_room(space, device, len(sizes), needs.words, needs.nbytes)
        if tokens != [sizes[space.rank], row]:
            raise ValueError(
                f"{'out' if combines else 'x'} has shape {tokens}; it must be "
                f"{[sizes[space.rank], row]} on rank {space.rank}"
            )
        kernel = "routed_combine" if combines else "routed_dispatch"
        words, starts = space_of(space, signature), space.starts(sizes)

        def run(
            x: torch.Tensor,
            out: torch.Tensor,
            order: torch.Tensor,
            edges: torch.Tensor,
            most: int,
            places: torch.Tensor | None = None,
            weights: torch.Tensor | None = None,
        ) -> None:
            of_routes = _address(places), _address(weights)
            addresses = x.data_ptr(), out.data_ptr(), order.data_ptr(), *of_routes, edges.data_ptr()
            call = _C.cuda.Routed(*addresses, starts.data_ptr(), k, most, row, code)
            launch(kernel, device, words, call, blocks=needs.blocks)

        return run

    return Prepared(needs.words, needs.nbytes, sizes, bind)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def normalises(dtype: torch.dtype, columns: int) -> bool:
    """Return whether the kernels take rows of this dtype and length."""
    return dtype in operands.DTYPES and columns % layouts.LANE == 0


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
) -> Prepared:
    """Prepare ``total = round(sum_r(x_r) + bias + residual)`` on every rank, and its rows
    ``normed = round(total / sqrt(mean(total^2) + eps) * weight)``, in fp32. The launch takes x,
    total, normed, weight, bias and residual.

    x, total and normed are [..., N], of one dtype, N a multiple of 8; ``total`` may be x. weight,
    bias [N] and residual, like x, have dtypes of their own. ``variant`` and ``early`` are as for
    `prepare_all_reduce`; ``variants``: those of the workspace."""
    known = ("auto", *VARIANTS)
    if variant not in known:
        raise ValueError(f"variant is {variant!r}; it must be one of {', '.join(known)}")
    rows, columns = _matrix(x)
    device, dtype, count, x_bytes = x.device, x.dtype, x.numel(), x.element_size()
    operands.check_summed(device, x=x, bias=bias, residual=residual)
    _check_rows(x, weight, total=total, normed=normed)
    operands.check_alike(False, x=x, residual=residual)
    operands.check_bias(bias, columns)
    if variant == "auto":
        variant = all_reduce_variant(count * x_bytes, world, usable(variants, SUMS), rows)
    by_ll = variant in ("ll", "ll_two_shot")
    cluster = _cluster(rows if by_ll else ceil_div(rows, world), columns, device)
    needs = layouts.rows_layout(variant, rows, columns, world, x_bytes, cluster)

    def bind(space: DeviceWorkspace, signature: int) -> Callable[..., None]:
        operands.check_room(space, device, world, needs.words, needs.nbytes)
        words = space_of(space, signature)
        shape = {"blocks": needs.blocks, "cluster": cluster, "early": early}

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
            call = _all_reduce(x, total, epilogue(dtype, bias, residual), needs)
            norm = _norm(normed, scale, eps)
            launch(f"{variant}_all_reduce_rms_norm", device, words, call, norm, **shape)

        return run

    return Prepared(needs.words, needs.nbytes, (), bind)


def rms_norm(rows: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Compute ``normed = round(rows / sqrt(mean(rows^2) + eps) * weight)``: the bits that a
    launch of `prepare_normed_all_reduce` makes of its sum, and the same arguments."""
    _check_rows(rows, weight, normed=normed)
    _check_aligned(normed=normed)
    count, columns = _matrix(rows)
    cluster = _cluster(count, columns, rows.device)
    aligned_rows, scale = _aligned(rows), _aligned(weight)
    call = _C.cuda.Rows(aligned_rows.data_ptr(), rows.numel(), CODES[rows.dtype])
    blocks = cluster * min(max(count, 1), _MOST_ROWS)
    norm = _norm(normed, scale, eps)
    launch("rms_norm_of_rows", rows.device, call, norm, blocks=blocks, cluster=cluster)


def _matrix(x: torch.Tensor) -> tuple[int, int]:
    """Return the numbers of rows and columns."""
    columns = x.shape[-1] if x.dim() else 0
    if columns < 1 or columns % layouts.LANE:
        raise NotImplementedError(
            f"rows have {columns} elements; the RMSNorm kernels need a multiple of {layouts.LANE}"
        )
    return x.numel() // columns, columns


def _check_rows(x: torch.Tensor, weight: torch.Tensor, **outs: torch.Tensor) -> None:
    operands.check_contiguous(x.device, **outs)
    operands.check_summed(x.device, x=x, weight=weight)
    operands.check_alike(True, x=x, **outs)
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {list(weight.shape)}; it must be [{x.shape[-1]}]")


def _check_aligned(**outs: torch.Tensor) -> None:
    for label, out in outs.items():
        if out.data_ptr() % layouts.PACK_BYTES:
            raise ValueError(
                f"{label} is not aligned to {layouts.PACK_BYTES} bytes; pass a new tensor"
            )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy where it does not begin at a multiple of 16 bytes. Ranks may differ."""
    return x if x.data_ptr() % layouts.PACK_BYTES == 0 else x.clone()


def without_multicast(device: torch.device) -> str | None:
    """Return why a GPU whose kernels are loaded has none of multicast; None: it has."""
    capability = _capability(device_and_stream(device)[0])
    if capability >= _SINCE:
        return None
    return f"needs compute capability 9.0 or higher; {device} has {capability / 10:.1f}"


@functools.cache
def _capability(device: int) -> int:
    return _C.cuda.compute_capability(device)


def _cluster(rows: int, columns: int, device: torch.device) -> int:
    """Return the blocks that share a row: as many as leave each of their threads a vector."""
    able, cluster = _capability(device_and_stream(device)[0]) >= _SINCE, 1
    most = min(_CLUSTER, layouts.MOST_BLOCKS // max(rows, 1)) if able else 1
    while 2 * cluster <= most and cluster * _THREADS * layouts.LANE < columns:
        cluster *= 2
    return cluster


def _norm(normed: torch.Tensor, weight: torch.Tensor, eps: float) -> _C.cuda.RmsNorm:
    return _C.cuda.RmsNorm(
        normed.data_ptr(), weight.data_ptr(), weight.numel(), CODES[weight.dtype], eps
    )
