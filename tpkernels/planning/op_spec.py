"""What each op does: one record per op, and the options on which the ranks of a call must agree.

Registration, planning, benchmarks, verification and tests read these records. No code asks an op's
name for its nature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tpkernels.common import dtypes


@dataclass(frozen=True)
class OpSpec:
    """What an op does. Each family of ops has a class, whose fields tell its ops apart.

    Attributes:
        gathers: gathers its input along a dim, before the matmul if it has one.
        reduces: sums over the ranks, after the matmul if it has one.
        exchanges: exchanges shards along one dim for shards along another.
        routed: moves rows of tokens by their routes to experts.
        dispatches: brings tokens to the experts that they are routed to.
        combines: brings what the experts made of them back, and sums each token's.
        scatters: each rank keeps its shard of the sum, or of what is exchanged.
        has_matmul: multiplies as well as communicates.
        normed: also returns the rows of the sum normalised.
        scaled: multiplies operands with scales.
    """

    name: str
    gathers = reduces = exchanges = routed = dispatches = combines = False
    scatters = has_matmul = normed = scaled = False

    @property
    def keeps_sum(self) -> bool:
        """Return whether every rank keeps the whole sum."""
        return self.reduces and not self.scatters


@dataclass(frozen=True)
class Gather(OpSpec):
    gathers = True
    has_matmul: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Reduce(OpSpec):
    reduces = True
    scatters: bool = False
    has_matmul: bool = False
    normed: bool = False
    scaled: bool = False


class Exchange(OpSpec):
    exchanges = scatters = True


@dataclass(frozen=True)
class Routed(OpSpec):
    routed = True
    dispatches: bool = False
    combines: bool = False


_RECORDS = (
    Gather("all_gather_matmul", has_matmul=True),
    Reduce("matmul_reduce_scatter", scatters=True, has_matmul=True),
    Reduce("matmul_all_reduce", has_matmul=True),
    Reduce("matmul_all_reduce_rms_norm", has_matmul=True, normed=True),
    Gather("all_gather"),
    Reduce("reduce_scatter", scatters=True),
    Reduce("all_reduce"),
    Reduce("all_reduce_rms_norm", normed=True),
    Exchange("all_to_all"),
    Routed("moe_dispatch", dispatches=True),
    Routed("moe_combine", combines=True),
    Gather("all_gather_scaled_matmul", has_matmul=True, scaled=True),
    Reduce("scaled_matmul_reduce_scatter", scatters=True, has_matmul=True, scaled=True),
    Reduce("scaled_matmul_all_reduce", has_matmul=True, scaled=True),
)
OPS: Mapping[str, OpSpec] = {spec.name: spec for spec in _RECORDS}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the ranks of a call must agree on besides its `Problem`'s shape and dtype. ``texts`` is
    part of the call's signature. Each family of ops has a class; this one has no options."""

    def texts(self) -> tuple[str, ...]:
        """Return one text per option that is set."""
        return ()

    def that_cost_time(self) -> Options:
        """Return these options without the ones that do not change how long a call takes."""
        return self


NO_OPTIONS = Options()


class Scales(NamedTuple):
    """Of rows that travel with their scales."""

    k: int  #: numbers in a row, whose packed form has another length
    x_dtype: torch.dtype
    kind: str

    def texts(self) -> tuple[str, ...]:
        return f"K {self.k}", f"x {dtypes.name(self.x_dtype)}", f"scale_x {self.kind}"


@dataclass(frozen=True, kw_only=True)
class GatherOptions(Options):
    """Options of an all-gather with a matmul."""

    scales: Scales | None = None
    out_dtype: torch.dtype | None = None  #: of the result; None: that on the wire
    return_gathered: bool = False
    local_product: bool = False  #: a product is the caller's own

    def texts(self) -> tuple[str, ...]:
        scales = self.scales.texts() if self.scales else ()
        out = [f"out {dtypes.name(self.out_dtype)}"] if self.out_dtype else []
        flags = _set(return_gathered=self.return_gathered, local_product=self.local_product)
        return (*scales, *out, *flags)


@dataclass(frozen=True, kw_only=True)
class ReduceOptions(Options):
    """Options of a reduction."""

    x_dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool = False
    residual: bool = False
    local_product: bool = False  #: the product is the caller's own
    norm: tuple[float, torch.dtype] | None = None  #: eps, and the dtype of the weight

    def texts(self) -> tuple[str, ...]:
        texts = [f"x {dtypes.name(self.x_dtype)}", f"out {dtypes.name(self.out_dtype)}"]
        texts += _set(bias=self.bias, residual=self.residual, local_product=self.local_product)
        if self.norm is not None:
            eps, weight_dtype = self.norm
            texts.append(f"rms_norm eps {float(eps)}, weight {dtypes.name(weight_dtype)}")
        return tuple(texts)

    def that_cost_time(self) -> ReduceOptions:
        """Every algorithm adds a bias and a residual, and normalises rows, while it sums."""
        return replace(self, bias=False, residual=False, norm=None)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Options):
    """Options of an exchange: the scattered dim, and each rank's rows along it."""

    dim: int
    sizes: tuple[int, ...]

    def texts(self) -> tuple[str, ...]:
        return (f"scatter dim {self.dim}: {list(self.sizes)}",)


@dataclass(frozen=True, kw_only=True)
class RoutedOptions(Options):
    """Options of an op on tokens with routes."""

    experts: int  #: of all ranks
    top_k: int  #: experts that a token is routed to
    max_rows: int | None = None  #: of each rank's experts, whatever the routes are
    scales: Scales | None = None

    def texts(self) -> tuple[str, ...]:
        scales = self.scales.texts() if self.scales else ()
        most = [] if self.max_rows is None else [f"max_rows {self.max_rows}"]
        return (*scales, f"{self.experts} experts, {self.top_k} per token", *most)


def _set(**flags: bool) -> list[str]:
    return [name for name, is_set in flags.items() if is_set]
