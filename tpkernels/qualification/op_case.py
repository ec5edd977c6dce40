"""`OpCase`: an op on data that any rank can make for all ranks; `Operands`: what a rank passes to
the op, and what it must return, by `tpkernels.ops.reference`. `tpkernels qualify`, `bench`, `demo`,
`profile` and `tune` call ops on these.

Small integers have exact sums and products, whatever the order, where bfloat16 holds each: operands
of a matmul are the sparser the more they add up. Random data may differ from float64 by the bound
of `tpkernels.ops.reference`, without an error of the unfused program.

Each rank's data are drawn by generators of their own, on the device: a rank computes what it must
return without communicating. A host would take seconds for the data of a large call on GPUs.
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
from tpkernels.ops.reference import Expected, assignments, moe_combine, moved, summed
from tpkernels.planning.op_spec import OPS, OpSpec

NORM_EPS = 1e-6
SCALED_DTYPE = torch.float8_e4m3fn  #: of an op on scaled operands, with row-wise scales
Outputs = list[torch.Tensor]

_LARGEST_DEVIATION = 32  # of sums of integers: 8 of it is 256, from where on bfloat16 has gaps
_SHARED = -1  # draws what is the same on all ranks


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """An op on data of all ranks.

    Attributes:
        extents: M, N, K of a matmul op over all ranks, else those of the tensor before the split.
            Dim 0 is gathered or scattered. N of an all-gather and K of a reduction are split over
            the ranks, and so is dim 1 by an all-to-all.
        dtype: of the results; scaled operands are `SCALED_DTYPE`.
        integers: all sums are exact; random data have products of the order of 1.
        linear: weights have the layout of ``linear.weight.t()``, else their rows are contiguous.
        residual: one is added to the sum.
        in_place: an all-reduce overwrites x.
        experts, idle, top_k: of routed tokens: the experts, how many of them get no tokens, the
            last, and those of each token.
        static: routed rows have a static number: as many as there may be.
        name: in messages.
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
        """Return what the op does."""
        return OPS[self.op]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return each rank's part of dim 0."""
        return tuple(shard_sizes(self.extents[0], self.world))

    @cached_property
    def columns(self) -> list[int]:
        """Return the columns of each rank after an all-to-all."""
        return shard_sizes(self.extents[1], self.world)

    def rows(self, rank: int) -> slice:
        """Return a rank's part of dim 0."""
        begin = sum(self.sizes[:rank])
        return slice(begin, begin + self.sizes[rank])

    def operands(self, rank: int) -> Operands:
        """Make what a rank passes to the op."""
        if self.spec.routed:
            return self._routed(rank)[0]
        (x, *scale_x), (w, *scale_w) = self._x(rank), self._w(rank)
        residual = self._residual(self.rows(rank) if self.spec.scatters else slice(None))
        norm_weight = self._drawing(_SHARED, 1)(self.extents[1]) if self.spec.normed else None
        return Operands(self, rank, x, w, (*scale_x, *scale_w), norm_weight, residual=residual)

    def _drawing(self, source: int, which: int) -> Callable[..., torch.Tensor]:
        """Return what draws random data or integers of a rank. A factor is -1 or 1 with probability
        2 / (2 * most + 1), else 0."""
        generator = torch.Generator(self.device)
        generator.manual_seed((self.seed * (self.world + 1) + source + 1) * 4 + which)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        added = self.extents[2] if self.spec.has_matmul else 1
        most = max(1, math.ceil((2 * math.sqrt(added) / _LARGEST_DEVIATION - 1) / 2))

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            if not self.integers:
                return (torch.randn(shape, **options) * scale).to(self.dtype)
            drawn = torch.randint(-most, most + 1, shape, dtype=torch.int16, **options)
            return (drawn * (drawn.abs() <= 1)).to(self.dtype)

        return draw

    def _x(self, source: int) -> tuple[torch.Tensor, ...]:
        """Draw a rank's x, and its scales if it has any."""
        spec, extents = self.spec, self.extents
        rows = extents[0] if spec.reduces else self.sizes[source]
        columns = extents[1:]
        if spec.has_matmul:
            k = extents[2]
            columns = (k if spec.gathers else shard_sizes(k, self.world)[source],)
        x = self._drawing(source, 0)(rows, *columns)
        return _quantised(x) if spec.scaled else (x,)

    def _w(self, source: int) -> tuple[Any, ...]:
        """Draw a rank's weight [K, N], and its scales if it has any; None without a matmul."""
        if not self.spec.has_matmul:
            return (None,)
        _, n, k = self.extents
        scale, draw = 1 / math.sqrt(k), self._drawing(source, 1)
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
        draw = self._drawing(_SHARED, 0)
        return draw(*self.extents[:2])[rows].contiguous() if self.residual else None

    def _routed(self, rank: int) -> tuple[Operands, list[Expected]]:
        """Make the tokens of a rank or, of a combine, the rows of its experts; and the result."""
        (m, n), k, dispatches, own = self.extents, self.top_k, self.spec.dispatches, self.rows(rank)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        chance = torch.rand(m, self.experts - self.idle, generator=generator, device=self.device)
        topk_ids = chance.argsort(dim=1, stable=True)[:, :k].contiguous()
        draw = self._drawing(_SHARED, 0)
        order, counts = assignments(topk_ids, self.experts, self.world)
        tokens = draw(m, n) if dispatches else draw(m * k, n)
        rows = tokens[order[rank] // k if dispatches else order[rank]]
        if self.static:
            rows = torch.cat([rows, rows.new_zeros(m * k - len(rows), n)])
        if dispatches:
            given = Operands(self, rank, tokens[own].contiguous(), topk_ids=topk_ids)
            return given, [moved(rows), moved(counts[rank])]
        weights = self._drawing(_SHARED, 1)(m, k).float()[own]
        combined = tokens.view(m, k, n)[own], weights
        result = moe_combine(*combined, dtype=self.dtype, integers=self.integers)
        return Operands(self, rank, rows, topk_weights=weights, topk_ids=topk_ids), [result]


@dataclass(frozen=True, eq=False)
class Operands:
    """What a rank passes to an op: x [rows, K] and w [K, N] of a matmul op; x [elements] of a
    collective, [rows, N] of one that normalises or routes, or of an all-to-all."""

    of: OpCase
    rank: int
    x: torch.Tensor
    w: torch.Tensor | None = None
    scales: tuple[torch.Tensor, ...] = ()  #: of x and the weight, if they are scaled
    norm_weight: torch.Tensor | None = None  #: of an op that normalises
    topk_weights: torch.Tensor | None = None  #: of the local tokens [rows, top_k]
    topk_ids: torch.Tensor | None = None  #: experts of all tokens [all rows, top_k]
    residual: torch.Tensor | None = None

    @property
    def spec(self) -> OpSpec:
        """Return what the op does."""
        return self.of.spec

    @property
    def factors(self) -> list[torch.Tensor]:
        """Return the op's tensors, by position."""
        given = self.x, self.w, *self.scales, self.norm_weight, self.topk_weights, self.topk_ids
        return [one for one in given if one is not None]

    @property
    def options(self) -> dict[str, Any]:
        """Return the op's options besides the group and the algorithm."""
        spec, of, options = self.spec, self.of, dict[str, Any]()
        if spec.exchanges:
            options = {"gather_sizes": of.sizes, "scatter_sizes": of.columns}
        elif not spec.keeps_sum:
            options["shard_sizes"] = of.sizes
        if spec.routed:
            options["num_experts"] = of.experts
        if of.static:
            options["max_rows"] = of.top_k * of.extents[0]
        if spec.scaled:
            options["out_dtype"] = of.dtype
        if spec.normed:
            options["eps"] = NORM_EPS
        return options if self.residual is None else options | {"residual": self.residual}

    def run(self, algorithm: str = "auto", group: dist.ProcessGroup | None = None) -> Outputs:
        """Run the op in a group, by default that of all ranks. Return its results in the order of
        `expected`: normalised rows come last."""
        name = f"{self.of.op}_" if self.of.in_place and self.of.op == "all_reduce" else self.of.op
        function = getattr(torch.ops.tpkernels if self.spec.routed else tpkernels, name)
        group = group or dist.group.WORLD
        assert group is not None  # only ranks run cases
        options = {"group": group.group_name, "algorithm": algorithm, **self.options}
        results = function(*self.factors, **options)
        if isinstance(results, torch.Tensor):
            return [results]
        return list(results)[::-1] if self.spec.normed else list(results)

    def expected(self, part: slice = slice(None), wire_roundings: int = 0) -> list[Expected]:
        """Return what the op must return; of normalised rows, only the sum before.

        Args:
            part: the rows that are wanted of a sum that all ranks keep.
            wire_roundings: how often a partial, and the sum over the ranks, is rounded to the
                dtype in which it travels.
        """
        of, spec = self.of, self.spec
        if spec.routed:
            return of._routed(self.rank)[1]
        derive = partial(
            summed,
            dtype=self.x.dtype,
            out=of.dtype,
            integers=of.integers,
            unfused=False,
            roundings=len(self.scales),
        )
        if not spec.reduces:
            x = torch.cat([_unscaled(*of._x(source)) for source in range(of.world)])
            if spec.has_matmul:
                return [derive([(x, _unscaled(*of._w(self.rank)))])]
            return [moved(x.split(of.columns, 1)[self.rank] if spec.exchanges else x)]
        rows = of.rows(self.rank) if spec.scatters else part
        terms = (
            (_unscaled(*of._x(source))[rows], _unscaled(*of._w(source)))
            for source in range(of.world)
        )
        wire, added = of.dtype if wire_roundings else None, [of._residual(rows)]
        return [derive(terms, added, wire=wire, sum_roundings=wire_roundings - 1)]

    def copy(self) -> Operands:
        """Return these with a copy of ``x``: all_reduce works in place."""
        return replace(self, x=self.x.clone())

    def refill(self, seed: int) -> Operands:
        """Put other values where the operands are, as a replay reads them there; return those."""
        made = replace(self.of, seed=seed).operands(self.rank)
        for old, new in zip(self._tensors(), made._tensors(), strict=True):
            old.copy_(new)
        return made

    def _tensors(self) -> Outputs:
        return self.factors if self.residual is None else [*self.factors, self.residual]


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise row by row: the largest number of a row becomes the largest that there is. Return
    the elements and their scales."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / torch.finfo(SCALED_DTYPE).max
    return (x / scale).to(SCALED_DTYPE), scale


def _unscaled(x: Any, scale: torch.Tensor | None = None) -> Any:
    """Return elements, None if there are none, times their scales, which is exact in float64."""
    return x if scale is None else x.double() * scale.double()
