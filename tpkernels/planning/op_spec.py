"""What each op does: one record per op, and the options on which the ranks of a call must agree.

Registration, planning, benchmarks, verification and tests read these records. No code asks an op's
name for its nature.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tpkernels.common import dtypes


@dataclass(frozen=True)
class OpSpec:
    """What an op does.

    Attributes:
        gathers: gathers its input along a dim, before the matmul if it has one.
        reduces: sums over the ranks, after the matmul if it has one.
        scatters: each rank keeps its shard of the sum, or of what is exchanged.
        has_matmul: multiplies as well as communicates.
        normed: also returns the rows of the sum normalised.
        scaled: multiplies operands with scales.
        dispatches: brings tokens to the experts that they are routed to.
        combines: brings what the experts made of them back, and sums each token's.
    """

    name: str
    gathers: bool = False
    reduces: bool = False
    scatters: bool = False
    has_matmul: bool = False
    normed: bool = False
    scaled: bool = False
    dispatches: bool = False
    combines: bool = False

    @functools.cached_property
    def exchanges(self) -> bool:
        """Return whether the op exchanges shards along one dim for shards along another."""
        return self.scatters and not self.reduces

    @functools.cached_property
    def routed(self) -> bool:
        """Return whether the op moves rows of tokens by their routes to experts."""
        return self.dispatches or self.combines

    @functools.cached_property
    def keeps_sum(self) -> bool:
        """Return whether every rank keeps the whole sum."""
        return self.reduces and not self.scatters


_gather = functools.partial(OpSpec, gathers=True)
_sum = functools.partial(OpSpec, reduces=True)
_RECORDS = (
    _gather("all_gather_matmul", has_matmul=True),
    _sum("matmul_reduce_scatter", scatters=True, has_matmul=True),
    _sum("matmul_all_reduce", has_matmul=True),
    _sum("matmul_all_reduce_rms_norm", has_matmul=True, normed=True),
    _gather("all_gather"),
    _sum("reduce_scatter", scatters=True),
    _sum("all_reduce"),
    _sum("all_reduce_rms_norm", normed=True),
    OpSpec("all_to_all", scatters=True),
    OpSpec("moe_dispatch", dispatches=True),
    OpSpec("moe_combine", combines=True),
    _gather("all_gather_scaled_matmul", has_matmul=True, scaled=True),
    _sum("scaled_matmul_reduce_scatter", scatters=True, has_matmul=True, scaled=True),
    _sum("scaled_matmul_all_reduce", has_matmul=True, scaled=True),
)
OPS: Mapping[str, OpSpec] = {spec.name: spec for spec in _RECORDS}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the ranks of a call must agree on besides its `Problem`'s shape and dtype. ``str`` is
    part of the call's signature.

    Attributes:
        k: numbers in a row of a scaled x, whose packed rows have another length.
        x_dtype, out_dtype: of the input and the result, where the dtype on the wire implies
            neither.
        scale_x: the kind of scales that x has.
        bias, residual: whether one is added.
        return_gathered: whether the gathered x is returned, too.
        local_product: whether a product is the caller's own.
        norm: eps, and the dtype of the weight, of an RMS norm.
        scattered: the scattered dim of an exchange, and each rank's rows along it.
        routes: the number of experts, and of those that a token is routed to.
        max_rows: the rows of its experts that each rank has, whatever the routes are.
    """

    k: int | None = None
    x_dtype: torch.dtype | None = None
    scale_x: str | None = None
    out_dtype: torch.dtype | None = None
    bias: bool = False
    residual: bool = False
    return_gathered: bool = False
    local_product: bool = False
    norm: tuple[float, torch.dtype] | None = None
    scattered: tuple[int, tuple[int, ...]] | None = None
    routes: tuple[int, int] | None = None
    max_rows: int | None = None

    def texts(self) -> tuple[str, ...]:
        """Return one text per option that is set."""
        texts = []
        if self.k is not None:
            texts.append(f"K {self.k}")
        if self.x_dtype is not None:
            texts.append(f"x {dtypes.name(self.x_dtype)}")
        if self.scale_x is not None:
            texts.append(f"scale_x {self.scale_x}")
        if self.out_dtype is not None:
            texts.append(f"out {dtypes.name(self.out_dtype)}")
        for name in ("bias", "residual", "return_gathered", "local_product"):
            if getattr(self, name):
                texts.append(name)
        if self.norm is not None:
            eps, weight_dtype = self.norm
            texts.append(f"rms_norm eps {float(eps)}, weight {dtypes.name(weight_dtype)}")
        if self.scattered is not None:
            dim, sizes = self.scattered
            texts.append(f"scatter dim {dim}: {list(sizes)}")
        if self.routes is not None:
            texts.append("{} experts, {} per token".format(*self.routes))
        if self.max_rows is not None:
            texts.append(f"max_rows {self.max_rows}")
        return tuple(texts)

    def that_cost_time(self) -> Options:
        """Return these options without the ones that do not change how long a call takes: every
        algorithm adds a bias and a residual, and normalises rows, while it sums."""
        return replace(self, bias=False, residual=False, norm=None)


NO_OPTIONS = Options()
