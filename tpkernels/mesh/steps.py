"""One step of a plan: a collective, or a slice, that changes one operand's placement on one mesh
dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpkernels.mesh.layout import Placements, held_elements


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of one tensor's placement on one mesh dim.

    Attributes:
        kind: "all_gather" (Shard to Replicate), "reduce_scatter" (Partial to Shard), "all_reduce"
            (Partial to Replicate) or "slice" (Replicate to Shard, without communication).
        operand: "x", "w" or "out".
        mesh_dim: the mesh dim whose ranks take part.
        tensor_dim: the dim that is gathered, scattered or sliced; None for an all-reduce.
        nbytes: received by all ranks of the mesh together. An all-reduce counts as a
            reduce-scatter and an all-gather.
    """

    kind: str
    operand: str
    mesh_dim: int
    tensor_dim: int | None
    nbytes: int

    @property
    def communicates(self) -> bool:
        return self.kind != "slice"

    def after(self, placements: Placements) -> Placements:
        """The placements that the step leaves behind."""
        to: Placement = Replicate()
        if self.kind in ("reduce_scatter", "slice"):
            assert self.tensor_dim is not None  # these have one
            to = Shard(self.tensor_dim)
        return (*placements[: self.mesh_dim], to, *placements[self.mesh_dim + 1 :])

    def __str__(self) -> str:
        name = self.kind.replace("_", "-")
        dim = "" if self.tensor_dim is None else f" dim {self.tensor_dim}"
        return f"{name} {self.operand}{dim} over mesh dim {self.mesh_dim}"


def steps_from(
    operand: str,
    shape: Sequence[int],
    placements: Placements,
    mesh_shape: Sequence[int],
    itemsize: int,
    partial_itemsize: int,
) -> list[Step]:
    """Every step that can be taken. An element has ``itemsize`` bytes, or ``partial_itemsize`` as
    long as the tensor is Partial anywhere.

    A mesh dim can gather or split a tensor dim only if no later mesh dim splits it: mesh dims
    split from left to right, so the later one's shards are shards of this one's.
    """
    steps = []
    options: list[tuple[str, int | None]]
    for mesh_dim, placement in enumerate(placements):
        free = [dim for dim in range(len(shape)) if Shard(dim) not in placements[mesh_dim + 1 :]]
        if isinstance(placement, Shard):
            options = [("all_gather", placement.dim)] if placement.dim in free else []
        elif isinstance(placement, Replicate):
            options = [("slice", dim) for dim in free]
        else:
            options = [("all_reduce", None), *(("reduce_scatter", dim) for dim in free)]
        rest = list(placements)
        rest[mesh_dim] = Shard(0)  # its ranks hold the whole once, together
        moved = held_elements(shape, tuple(rest), mesh_shape) * (mesh_shape[mesh_dim] - 1)
        before = partial_itemsize if Partial() in placements else itemsize
        after = partial_itemsize if Partial() in rest else itemsize
        each = {"slice": 0, "all_reduce": before + after}
        steps += [
            Step(
                kind=kind,
                operand=operand,
                mesh_dim=mesh_dim,
                tensor_dim=dim,
                nbytes=moved * each.get(kind, before),
            )
            for kind, dim in options
        ]
    return steps
