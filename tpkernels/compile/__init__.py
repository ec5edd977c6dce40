"""A compiler pass that puts the ops into models written without them::

    model = torch.compile(model, options=tpkernels.compile.fuse_collectives().options)

The pass looks in inductor's graphs, forward and backward, for functional collectives next to
matmuls, such as those from DTensor's tensor parallelism, and replaces them by fused ops.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tpkernels import groups
from tpkernels.groups import GroupLike

if TYPE_CHECKING:
    from tpkernels.compile.fusion import CollectiveFusion

__all__ = ["FusionReport", "LeftAlone", "Rewritten", "Site", "fuse_collectives"]


@dataclass(frozen=True)
class Site:
    """Where a functional collective was found."""

    graph: str  #: number and kind of the graph
    collective: str  #: the node's name in the graph
    group: str  #: name of the process group
    module: str  #: where the node was traced; "" if the compiler has not kept that

    def __str__(self) -> str:
        return f"group '{self.group}'" + (f", {self.module}" if self.module else "")


@dataclass(frozen=True)
class Rewritten:
    """A collective that is now part of an op."""

    site: Site
    op: str  #: name in ``torch.ops.tpkernels``
    matmuls: int  #: how many were fused with the collective
    detail: str  #: shapes and options, in words

    def __str__(self) -> str:
        return f"{self.op}: {self.detail} ({self.site})"


@dataclass(frozen=True)
class LeftAlone:
    """A collective that was not rewritten, and why."""

    site: Site
    reason: str

    def __str__(self) -> str:
        return f"{self.site.collective} not rewritten: {self.reason} ({self.site})"


@dataclass
class FusionReport:
    """What the pass did with the graphs that it saw, in their order.

    A graph from inductor's cache is not compiled again and does not appear here. To see all graphs,
    set ``torch._inductor.config.force_disable_caches = True``.
    """

    graphs: list[str] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Return how many collectives became part of each op, by the op's name."""
        return dict(Counter(site.op for site in self.rewritten))

    def __str__(self) -> str:
        if not self.graphs:
            return (
                "no graph was compiled: either no compiled function has run yet, or all graphs "
                "came from inductor's cache (set torch._inductor.config.force_disable_caches = "
                "True to compile them again)"
            )
        lines = [f"{len(self.rewritten)} rewritten, {len(self.left_alone)} not rewritten"]
        entries: list[Rewritten | LeftAlone] = [*self.rewritten, *self.left_alone]
        for graph in self.graphs:
            here = [f"  {entry}" for entry in entries if entry.site.graph == graph]
            lines += [graph, *(here or ["  no collectives"])]
        return "\n".join(lines)


def fuse_collectives(*only: GroupLike, norms: bool | None = None) -> CollectiveFusion:
    """Return a compiler pass that fuses all-gather -> matmul, matmul -> reduce-scatter and matmul
    -> all-reduce into one op each.

    To compile one model with the pass, use ``torch.compile(model, options=fusion.options)``. To
    compile everything with it, also with ``mode=``, use ``with fusion as report:``; the block must
    cover the first run of the compiled function, which is when it is compiled. ``print(report)``
    shows what was rewritten, and why the rest was left alone.

    - An all-gather is fused with all matmuls whose left factor is the gathered tensor, as long as
      the gathered dim is among its rows. If other ops read the gathered tensor, the fused op
      returns it too.
    - A reduce-scatter or all-reduce ("sum" or "avg") is fused with the matmul that it reduces, or
      with the sum of matmuls, if nothing else reads that. Sums are those of the ops: in fp32, in
      rank order (on CUDA tensors see ``numerics`` of `tpkernels.init`).
    - ``torch._scaled_mm`` of fp8 operands is a matmul here, with tensor-wise or row-wise scales.
      Row-wise scales of gathered rows are gathered with these, or taken to be the same on all
      ranks.
    - With ``norms``, an all-reduce, with or without a matmul, a residual that is added to it and
      the RMS norm of the sum's rows become `matmul_all_reduce_rms_norm` or `all_reduce_rms_norm`,
      also where the model calls `matmul_all_reduce` or `all_reduce` itself. All ranks must read the
      sum and the norm alike (``docs/compile.md`` says which norms, and how they are rounded).
    - Views, transpositions and chunks in between are supported, with static and symbolic sizes.
    - Each rank rewrites its own graph, and all make the same decisions, even if some ranks have
      smaller or empty shards of a weight.
    - Collectives of CUDA tensors stay as they are, unless times measured by `tpkernels tune` on
      rank 0 say that the op is faster, or `tpkernels.autotune` is on for the group. Naming a group
      that moves CUDA tensors by NCCL sends these times to its ranks, so all of them must make the
      pass: it is collective then. For groups that are not named, only times count that an op has
      sent before.
    - The ops of a graph run in the graph's order, including those that the model calls itself.
      Without the pass, inductor may reorder them differently on ranks with uneven shards. The
      result is a ``CollectiveMismatchError``, or a wrong sum if two calls have the same shapes.
      Nested graphs (``torch.compiler.nested_compile_region``, ``torch.cond``) keep the order of
      their own ops, but may be moved as a whole.

    Args:
        only: the groups whose collectives the pass may rewrite; by default all. Name the
            tensor-parallel group to leave other collectives, such as FSDP's, as they are.
        norms: whether norms become part of all-reduces. None: only of CUDA tensors.

    Returns:
        The pass; its ``report`` is a `FusionReport`.

    Raises:
        ValueError: this rank has no group of that name.
        TypeError: an argument is not a group.
    """
    from tpkernels.compile.fusion import CollectiveFusion
    from tpkernels.ops.replacement import read_times

    names = [groups.name_of(group) for group in only]
    for name in names:
        read_times(name)
    return CollectiveFusion(names or None, norms)
