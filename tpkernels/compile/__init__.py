"""Compiler pass that inserts the fused ops into models written without them::

    model = torch.compile(model, options=tpkernels.compile.fuse_collectives().options)

The pass finds functional collectives next to matmuls in the inductor graphs, forward and backward,
and replaces them with fused ops. DTensor tensor parallelism, for example, creates such collectives.
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
    """Location of a functional collective."""

    graph: str  #: number and kind of the graph
    collective: str  #: node name in the graph
    group: str  #: name of the process group
    module: str  #: module in which the node was traced; "" if not recorded

    def __str__(self) -> str:
        return f"group '{self.group}'" + (f", {self.module}" if self.module else "")


@dataclass(frozen=True)
class Rewritten:
    """A collective that was fused into an op."""

    site: Site
    op: str  #: name in ``torch.ops.tpkernels``
    matmuls: int  #: number of matmuls that were fused with the collective
    detail: str  #: shapes and options, as text

    def __str__(self) -> str:
        return f"{self.op}: {self.detail} ({self.site})"


@dataclass(frozen=True)
class LeftAlone:
    """A collective that was not rewritten, and the reason."""

    site: Site
    reason: str

    def __str__(self) -> str:
        return f"{self.site.collective} not rewritten: {self.reason} ({self.site})"


@dataclass
class FusionReport:
    """Rewrites of the pass, for all graphs that it processed, in order.

    The report lacks graphs from the inductor cache, because they are not compiled again. To include
    all graphs, set ``torch._inductor.config.force_disable_caches = True``.
    """

    graphs: list[str] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of rewritten collectives per op, by op name."""
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
            graph_entries = [f"  {entry}" for entry in entries if entry.site.graph == graph]
            lines += [graph, *(graph_entries or ["  no collectives"])]
        return "\n".join(lines)


def fuse_collectives(*only: GroupLike, norms: bool | None = None) -> CollectiveFusion:
    """Return a compiler pass that fuses collectives and matmuls into single ops.

    The pass fuses all-gather -> matmul, matmul -> reduce-scatter and matmul -> all-reduce.

    To compile one model with the pass, use ``torch.compile(model, options=fusion.options)``. To
    compile all code with the pass, also with ``mode=``, use ``with fusion as report:``. The block
    must include the first run of the compiled function, because torch compiles at that run.
    ``print(report)`` lists the rewritten collectives, and the reasons against the rest.

    - An all-gather is fused with all matmuls whose left operand is the gathered tensor, if the
      gathered dim is one of its row dims. If other nodes read the gathered tensor, the op returns
      it as well.
    - A reduce-scatter or all-reduce ("sum" or "avg") is fused with the matmul, or sum of matmuls,
      that it reduces, if no other node reads the sum. Reductions are in fp32 and in rank order, as
      in the ops (on CUDA tensors see ``numerics`` of `tpkernels.init`).
    - ``torch._scaled_mm`` of fp8 operands is a matmul too, with tensor-wise or row-wise scales.
      Row-wise scales of gathered rows are gathered with the rows, or assumed to be equal on all
      ranks.
    - With ``norms``, an all-reduce and the RMSNorm of its result are fused, with the matmul before
      and the residual in between, if any. They become `matmul_all_reduce_rms_norm` or
      `all_reduce_rms_norm`. Calls of `matmul_all_reduce` and `all_reduce` in the model are fused as
      well. All ranks must read the sum and the norm in the same way. ``docs/compile.md`` describes
      the norms and their rounding.
    - Views, transpositions and chunks in between are supported, with static and symbolic sizes.
    - Each rank rewrites the local graph. All ranks make the same decisions, even if some ranks have
      smaller or empty shards of a weight.
    - Collectives of CUDA tensors are rewritten only if times measured by `tpkernels tune` on rank 0
      show that the op is faster, or if `tpkernels.autotune` is enabled for the group. If a named
      group moves CUDA tensors with NCCL, this function sends the times to its ranks, so all of them
      must call it. Groups that are not named use only the times that an op has sent before.
    - Ops run in graph order, including ops that the model calls. Without the pass, inductor may
      reorder them differently on ranks with uneven shards. The result is a
      ``CollectiveMismatchError``, or a wrong sum if two calls have the same shapes. Nested graphs
      (``torch.compiler.nested_compile_region``, ``torch.cond``) keep the order of their ops, but
      inductor may move a nested graph as a unit.

    Args:
        only: groups whose collectives the pass may rewrite; by default all. Name the
            tensor-parallel group to exclude other collectives, such as FSDP collectives.
        norms: whether to fuse norms into all-reduces. None: only for CUDA tensors.

    Returns:
        The pass. Its ``report`` is a `FusionReport`.

    Raises:
        ValueError: this rank has no group with that name.
        TypeError: an argument is not a group.
    """
    from tpkernels.compile.fusion import CollectiveFusion
    from tpkernels.ops.replacement import read_times

    names = [groups.group_name(group) for group in only]
    for name in names:
        read_times(name)
    return CollectiveFusion(names or None, norms)
