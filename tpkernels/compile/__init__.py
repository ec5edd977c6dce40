"""``torch.compile`` puts the ops into models that were written without them.

    model = torch.compile(model, options=tpkernels.compile.fuse_collectives().options)

The pass looks in inductor's graphs, forward and backward, for functional collectives beside
matmuls, such as those that DTensor's tensor parallelism makes, and puts the fused ops in their
place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpkernels import groups
from tpkernels.compile.report import LeftAlone, Report, Rewritten, Site
from tpkernels.groups import GroupLike

if TYPE_CHECKING:
    from tpkernels.compile.fusion import CollectiveFusion

__all__ = ["LeftAlone", "Report", "Rewritten", "Site", "fuse_collectives"]


def fuse_collectives(*only: GroupLike) -> CollectiveFusion:
    """A compiler pass that has all-gather -> matmul, matmul -> reduce-scatter and matmul ->
    all-reduce run as one op each.

    Args:
        only: the groups whose collectives it may rewrite; none given: all. Name the
            tensor-parallel group where collectives of others, such as FSDP's, are to stay.

    Returns:
        The pass, with its ``report``. It is on for one model with
        ``torch.compile(model, options=fusion.options)``, and for all that is compiled within
        ``with fusion as report:`` (when the compiled function runs, not when ``torch.compile``
        returns), which goes with ``mode=`` too. ``print(report)`` tells what it rewrote, and why it
        left the rest alone.

    - An all-gather is fused with all products that have the gathered tensor as their left factor
      and the ranks among its rows, along any dim. Where other ops read the gathered tensor, the op
      returns it too.
    - A reduce-scatter or all-reduce ("sum", "avg") is fused with the product that it reduces, or
      with the sum of products, if nothing else reads that. Sums are those of the ops: in fp32, in
      the order of the ranks.
    - Views, transpositions and chunks between the two are understood, also with symbolic sizes.
    - Each rank rewrites its own graph, and all do so alike, also where some have less of a weight
      than others, or none.
    - The ops of a graph, also those that the model calls itself, run in the graph's order. Without
      the pass inductor may move them, on ranks with uneven shards each in its own way, which is a
      ``CollectiveMismatchError``, or a wrong sum where two calls have one shape. Graphs within a
      graph (``torch.compiler.nested_compile_region``, ``torch.cond``) keep the order of their own
      ops, but may be moved as a whole.

    Raises:
        ValueError, TypeError: ``only`` names no group.
    """
    from tpkernels.compile.fusion import CollectiveFusion

    return CollectiveFusion([groups.name_of(group) for group in only] or None)
