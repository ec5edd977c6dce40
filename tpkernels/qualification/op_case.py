"""Test data for ops. `OpCase` describes an op on global data that every rank can reproduce.
`Operands` are the arguments of one rank, with the expected results of `tpkernels.ops.reference`.
`tpkernels qualify`, `bench`, `demo`, `profile` and `tune` use them.

Integer data: sums are exact in any order as long as bfloat16 represents every partial sum. The
larger K is, the sparser are therefore the operands of a matmul. Random data: results may differ
from float64 by the bound of `tpkernels.ops.reference`, without its error term for the unfused
program.

Each source rank has separate random generators on the device. A rank can thus compute the expected
results without communication. Generating the data of a large GPU call on the host would last
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

import tpkernels
from tpkernels.common.shards import shard_sizes
from tpkernels.ops.reference import Expected, assignments, expect_copy, expect_sum, moe_combine
from tpkernels.planning.op_spec import OPS, OpSpec

NORM_EPS = 1e-6
SCALED_DTYPE = torch.float8_e4m3fn  #: dtype of scaled operands, with row-wise scales
Outputs = list[torch.Tensor]

# Maximum standard deviation of integer sums. 8 deviations are 256, and bfloat16 represents all
# integers up to 256.
_MAX_DEVIATION = 32
_SHARED = -1  # source of data that is identical on all ranks


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """An op on data of all ranks.

    Attributes:
        extents: global M, N, K of a matmul op, otherwise the shape of the unsharded tensor. Dim 0
            is gathered or scattered. N of an all-gather, K of a reduction and dim 1 of an
            all-to-all are also split over the ranks.
        dtype: dtype of the results. Scaled operands have `SCALED_DTYPE`.
        integers: integer data with exact sums. Otherwise random data with results of order 1.
        linear: weights have the layout of ``linear.weight.t()``; otherwise their rows are
            contiguous.
        residual: whether a residual is added to the sum.
        in_place: whether an all-reduce overwrites x.
        experts: number of experts.
        idle: number of experts without tokens; these are the last experts.
        top_k: experts per token.
        static: whether routed rows have a static number, the maximum for any routing.
        name: name of the case in messages.
    """

    op: str
    extents: tuple[int, ...]
    dtype: torch.dtype
    world: int
    device: torch.device
    seed: int = 0
    integers: bool = False
    linear: bool = True
    residual: bool = False
    in_place: bool = False
    experts: int = 0
    idle: int = 0
    top_k: int = 0
    static: bool = False
    name: str = ""

    @property
    def spec(self) -> OpSpec:
        """Return the properties of the op."""
        return OPS[self.op]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the rows per rank along dim 0."""
        return tuple(shard_sizes(self.extents[0], self.world))

    @cached_property
    def columns(self) -> list[int]:
        """Return the columns of each rank after an all-to-all."""
        return shard_sizes(self.extents[1], self.world)

    def rows(self, rank: int) -> slice:
        """Return the slice of dim 0 that belongs to a rank."""
        begin = sum(self.sizes[:rank])
        return slice(begin, begin + self.sizes[rank])

    def operands(self, rank: int) -> Operands:
        """Create the operands of a rank."""
        if self.spec.routed:
            return self._routed(rank)[0]
        (x, *scale_x), (w, *scale_w) = self._x(rank), self._w(rank)
        residual = self._residual(self.rows(rank) if self.spec.scatters else slice(None))
        norm_weight = self._make_draw(_SHARED, 1)(self.extents[1]) if self.spec.normed else None
        return Operands(self, rank, x, w, (*scale_x, *scale_w), norm_weight, residual=residual)

    def _make_draw(self, source: int, stream: int) -> Callable[..., torch.Tensor]:
        """Return a function that draws random data or integers for a source rank. An integer is -1
        or 1 with probability 2 / (2 * limit + 1), otherwise 0."""
        generator = torch.Generator(self.device)
        generator.manual_seed((self.seed * (self.world + 1) + source + 1) * 4 + stream)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        terms = self.extents[2] if self.spec.has_matmul else 1
        limit = max(1, math.ceil((2 * math.sqrt(terms) / _MAX_DEVIATION - 1) / 2))

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            if not self.integers:
                return (torch.randn(shape, **options) * scale).to(self.dtype)
            drawn = torch.randint(-limit, limit + 1, shape, dtype=torch.int16, **options)
            return (drawn * (drawn.abs() <= 1)).to(self.dtype)

        return draw

    def _x(self, source: int) -> tuple[torch.Tensor, ...]:
        """Draw x of a rank, and its scales if the op is scaled."""
        spec, extents = self.spec, self.extents
        rows = extents[0] if spec.reduces else self.sizes[source]
        columns = extents[1:]
        if spec.has_matmul:
            k = extents[2]
            columns = (k if spec.gathers else shard_sizes(k, self.world)[source],)
        x = self._make_draw(source, 0)(rows, *columns)
        return _quantised(x) if spec.scaled else (x,)

    def _w(self, source: int) -> tuple[Any, ...]:
        """Draw the weight [K, N] of a rank, and its scales if the op is scaled. None without a
        matmul."""
        if not self.spec.has_matmul:
            return (None,)
        _, n, k = self.extents
        scale, draw = 1 / math.sqrt(k), self._make_draw(source, 1)
        if self.spec.gathers:
            n = shard_sizes(n, self.world)[source]
        else:
            k = shard_sizes(k, self.world)[source]
        if self.spec.scaled:
            w, scale_w = _quantised(draw(n, k))
            return w.t(), scale_w.t() * scale
        w = draw(n, k, scale=scale).t()
        return (w if self.linear else w.contiguous(),)

    def _residual(self, rows: slice) -> torch.Tensor | None:
        draw = self._make_draw(_SHARED, 0)
        return draw(*self.extents[:2])[rows].contiguous() if self.residual else None

    def _routed(self, rank: int) -> tuple[Operands, list[Expected]]:
        """Create the operands of a rank (tokens or, for a combine, expert rows) and the expected
        results."""
        (m, n), k, dispatches, local = (
            self.extents,
            self.top_k,
            self.spec.dispatches,
            self.rows(rank),
        )
        generator = torch.Generator(self.device).manual_seed(self.seed)
        chance = torch.rand(m, self.experts - self.idle, generator=generator, device=self.device)
        topk_ids = chance.argsort(dim=1, stable=True)[:, :k].contiguous()
        draw = self._make_draw(_SHARED, 0)
        order, counts = assignments(topk_ids, self.experts, self.world)
        tokens = draw(m, n) if dispatches else draw(m * k, n)
        rows = tokens[order[rank] // k if dispatches else order[rank]]
        if self.static:
            rows = torch.cat([rows, rows.new_zeros(m * k - len(rows), n)])
        if dispatches:
            operands = Operands(self, rank, tokens[local].contiguous(), topk_ids=topk_ids)
            return operands, [expect_copy(rows), expect_copy(counts[rank])]
        weights = self._make_draw(_SHARED, 1)(m, k).float()[local]
        combined = tokens.view(m, k, n)[local], weights
        result = moe_combine(*combined, dtype=self.dtype, integers=self.integers)
        return Operands(self, rank, rows, topk_weights=weights, topk_ids=topk_ids), [result]


@dataclass(frozen=True, eq=False)
class Operands:
    """Arguments of a rank: x [rows, K] and w [K, N] for a matmul op, x [rows, N] for an op that
    normalises, routes or exchanges, x [elements] for a plain collective."""

    case: OpCase
    rank: int
    x: torch.Tensor
    w: torch.Tensor | None = None
    scales: tuple[torch.Tensor, ...] = ()  #: scales of x and w, if the op is scaled
    norm_weight: torch.Tensor | None = None  #: RMSNorm weight
    topk_weights: torch.Tensor | None = None  #: weights of the local tokens, [tokens, top_k]
    topk_ids: torch.Tensor | None = None  #: experts of the tokens of all ranks, [tokens, top_k]
    residual: torch.Tensor | None = None

    @property
    def spec(self) -> OpSpec:
        """Return the properties of the op."""
        return self.case.spec

    @property
    def tensor_args(self) -> list[torch.Tensor]:
        """Return the tensor arguments of the op, in order."""
        tensors = self.x, self.w, *self.scales, self.norm_weight, self.topk_weights, self.topk_ids
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the op, without group and algorithm."""
        spec, case, options = self.spec, self.case, dict[str, Any]()
        if spec.exchanges:
            options = {"gather_sizes": case.sizes, "scatter_sizes": case.columns}
        elif not spec.keeps_sum:
            options["shard_sizes"] = case.sizes
        if spec.routed:
            options["num_experts"] = case.experts
        if case.static:
            options["max_rows"] = case.top_k * case.extents[0]
        if spec.scaled:
            options["out_dtype"] = case.dtype
        if spec.normed:
            options["eps"] = NORM_EPS
        return options if self.residual is None else options | {"residual": self.residual}

    def run(self, algorithm: str = "auto", group: dist.ProcessGroup | None = None) -> Outputs:
        """Run the op in a group, by default the group of all ranks. Return the results in the order
        of `expected`, with normalised rows last."""
        name = (
            f"{self.case.op}_"
            if self.case.in_place and self.case.op == "all_reduce"
            else self.case.op
        )
        function = getattr(torch.ops.tpkernels if self.spec.routed else tpkernels, name)
        group = group or dist.group.WORLD
        assert group is not None  # only ranks run cases
        options = {"group": group.group_name, "algorithm": algorithm, **self.options}
        results = function(*self.tensor_args, **options)
        if isinstance(results, torch.Tensor):
            return [results]
        return list(results)[::-1] if self.spec.normed else list(results)

    def expected(self, shard: slice = slice(None), wire_roundings: int = 0) -> list[Expected]:
        """Return the expected results, without normalised rows.

        Args:
            shard: rows to compute, if all ranks keep the sum.
            wire_roundings: number of roundings to the communication dtype, of a partial sum and of
                the sum over the ranks.
        """
        case, spec = self.case, self.spec
        if spec.routed:
            return case._routed(self.rank)[1]
        derive = partial(
            expect_sum,
            dtype=self.x.dtype,
            out=case.dtype,
            integers=case.integers,
            unfused=False,
            roundings=len(self.scales),
        )
        if not spec.reduces:
            x = torch.cat([_unscaled(*case._x(source)) for source in range(case.world)])
            if spec.has_matmul:
                return [derive([(x, _unscaled(*case._w(self.rank)))])]
            return [expect_copy(x.split(case.columns, 1)[self.rank] if spec.exchanges else x)]
        rows = case.rows(self.rank) if spec.scatters else shard
        terms = (
            (_unscaled(*case._x(source))[rows], _unscaled(*case._w(source)))
            for source in range(case.world)
        )
        wire, added = case.dtype if wire_roundings else None, [case._residual(rows)]
        return [derive(terms, added, wire=wire, sum_roundings=wire_roundings - 1)]

    def copy(self) -> Operands:
        """Return operands with a copy of ``x``, because all_reduce works in place."""
        return replace(self, x=self.x.clone())

    def refill(self, seed: int) -> Operands:
        """Overwrite the operands with new values, which a graph replay then reads. Return operands
        with the new values."""
        refilled = replace(self.case, seed=seed).operands(self.rank)
        for old, new in zip(self._tensors(), refilled._tensors(), strict=True):
            old.copy_(new)
        return refilled

    def _tensors(self) -> Outputs:
        return self.tensor_args if self.residual is None else [*self.tensor_args, self.residual]


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise row by row: the largest magnitude of a row becomes the largest value of the dtype.
    Return the elements and the scales."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / torch.finfo(SCALED_DTYPE).max
    return (x / scale).to(SCALED_DTYPE), scale


def _unscaled(x: Any, scale: torch.Tensor | None = None) -> Any:
    """Return the elements times their scales, exact in float64. Without scales, return ``x``."""
    return x if scale is None else x.double() * scale.double()
