"""One record per op with its properties, and the options that must match on all ranks of a call.

Registration, planning, benchmarks, verification and tests read these records instead of comparing
op names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tpkernels.common import dtypes


@dataclass(frozen=True)
class OpSpec:
    """Properties of an op. Each family of ops has a subclass. The fields of the subclass are the
    properties that differ within the family.

    Attributes:
        gathers: gathers the input along a dim, before the matmul if any.
        reduces: reduces (sums) over the ranks, after the matmul if any.
        exchanges: all-to-all: exchanges shards along one dim for shards along a second dim.
        routed: moves token rows according to their (token, expert) assignments.
        dispatches: sends tokens to the ranks that hold their experts.
        combines: returns expert outputs to the ranks of the tokens and reduces them per token.
        scatters: each rank keeps a shard of the result.
        has_matmul: contains a matmul.
        normed: also returns the RMSNorm of the rows of the sum.
        scaled: operands of the matmul have scales.
    """

    name: str
    gathers = reduces = exchanges = routed = dispatches = combines = False
    scatters = has_matmul = normed = scaled = False

    @property
    def keeps_sum(self) -> bool:
        """Return whether every rank keeps the full sum."""
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
    """Options that must match on all ranks of a call, in addition to shape and dtype of the
    `Problem`. The call signature contains ``describe()``. Each family of ops has a subclass; the
    base class has no options."""

    def describe(self) -> tuple[str, ...]:
        """Return a string for each option that is set."""
        return ()

    def timing_key(self) -> Options:
        """Return the options that affect the time of a call."""
        return self


NO_OPTIONS = Options()


class Scales(NamedTuple):
    """Scales of operands whose rows are sent in packed form, with row or block scales if any."""

    k: int  #: elements per row before packing
    x_dtype: torch.dtype
    kind: str  #: such as "row-wise"

    def describe(self) -> tuple[str, ...]:
        return f"K {self.k}", f"x {dtypes.name(self.x_dtype)}", f"scale_x {self.kind}"


@dataclass(frozen=True, kw_only=True)
class GatherOptions(Options):
    """Options of an all-gather with a matmul."""

    scales: Scales | None = None
    out_dtype: torch.dtype | None = None  #: dtype of the result, by default the communication dtype
    return_gathered: bool = False
    local_product: bool = False  #: whether the caller supplies the matmul (`CustomMatmul`)

    def describe(self) -> tuple[str, ...]:
        scales = self.scales.describe() if self.scales else ()
        out = [f"out {dtypes.name(self.out_dtype)}"] if self.out_dtype else []
        flags = _list_set(return_gathered=self.return_gathered, local_product=self.local_product)
        return (*scales, *out, *flags)


class SumUnits(NamedTuple):
    """The units of K that are summed by a tree."""

    size: int  #: elements of K per unit
    k_sizes: tuple[int, ...]  #: K of each rank

    def describe(self) -> str:
        return f"K {list(self.k_sizes)} in units of {self.size}"


@dataclass(frozen=True, kw_only=True)
class ReduceOptions(Options):
    """Options of a reduction."""

    x_dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool = False
    residual: bool = False
    local_product: bool = False  #: whether the caller supplies the matmul (`CustomMatmul`)
    norm: tuple[float, torch.dtype] | None = None  #: eps, dtype of the norm weight
    sum_units: SumUnits | None = None

    def describe(self) -> tuple[str, ...]:
        descriptions = [f"x {dtypes.name(self.x_dtype)}", f"out {dtypes.name(self.out_dtype)}"]
        descriptions += _list_set(
            bias=self.bias, residual=self.residual, local_product=self.local_product
        )
        if self.norm is not None:
            eps, weight_dtype = self.norm
            descriptions.append(f"rms_norm eps {float(eps)}, weight {dtypes.name(weight_dtype)}")
        if self.sum_units is not None:
            descriptions.append(self.sum_units.describe())
        return tuple(descriptions)

    def timing_key(self) -> ReduceOptions:
        """Return the options without bias, residual and norm: every algorithm applies them while it
        reduces."""
        return replace(self, bias=False, residual=False, norm=None)


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions(Options):
    """Options of an exchange: the scattered dim, and the rows per rank along it."""

    dim: int
    sizes: tuple[int, ...]

    def describe(self) -> tuple[str, ...]:
        return (f"scatter dim {self.dim}: {list(self.sizes)}",)


@dataclass(frozen=True, kw_only=True)
class RoutedOptions(Options):
    """Options of an op on routed tokens."""

    experts: int  #: number of experts over all ranks
    top_k: int  #: experts per token
    max_rows: int | None = None  #: capacity per rank; the output then has this many rows
    scales: Scales | None = None

    def describe(self) -> tuple[str, ...]:
        scales = self.scales.describe() if self.scales else ()
        capacity = [] if self.max_rows is None else [f"max_rows {self.max_rows}"]
        return (*scales, f"{self.experts} experts, {self.top_k} per token", *capacity)


def _list_set(**flags: bool) -> list[str]:
    """Return the names of the flags that are set."""
    return [name for name, is_set in flags.items() if is_set]
