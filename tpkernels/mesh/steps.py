"""One step of a plan: a collective, or a slice, that changes one operand's placement on one mesh
dim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from tpkernels.mesh.layout import Placements, exchanged_elements, held_elements


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change of one tensor's placement on one mesh dim.

    Attributes:
        kind: "all_gather" (Shard to Replicate), "reduce_scatter" (Partial to Shard), "all_reduce"
            (Partial to Replicate), "all_to_all" (Shard to Shard) or "slice" (Replicate to Shard,
            without communication).
        operand: "x", "w" or "out".
        mesh_dim: the mesh dim whose ranks take part.
        tensor_dim: the dim that is gathered, scattered or sliced; None for an all-reduce. Of an
            all-to-all the dim that is gathered, and ``scatter_dim`` the other one.
        nbytes: received by all ranks of the mesh together. An all-reduce counts as a
            reduce-scatter and an all-gather.
    """

    kind: str
    operand: str
    mesh_dim: int
    tensor_dim: int | None
    nbytes: int
    scatter_dim: int | None = None

    @property
    def communicates(self) -> bool:
        return self.kind != "slice"

    def after(self, placements: Placements) -> Placements:
        """The placements that the step leaves behind."""
        to: Placement = Replicate()
        split = self.tensor_dim if self.kind in ("reduce_scatter", "slice") else self.scatter_dim
        if split is not None:
            to = Shard(split)
        return (*placements[: self.mesh_dim], to, *placements[self.mesh_dim + 1 :])

    def __str__(self) -> str:
        name = self.kind.replace("_", "-")
        dim = "" if self.tensor_dim is None else f" dim {self.tensor_dim}"
        dim += "" if self.scatter_dim is None else f" for dim {self.scatter_dim}"
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
    for mesh_dim in range(len(placements)):
        for kind, dim, scatter_dim in _changes(placements, mesh_dim, len(shape)):
            step = Step(
                kind=kind,
                operand=operand,
                mesh_dim=mesh_dim,
                tensor_dim=dim,
                scatter_dim=scatter_dim,
                nbytes=0,
            )
            after = step.after(placements)
            sizes = [
                partial_itemsize if Partial() in one else itemsize for one in (placements, after)
            ]
            if step.communicates:
                nbytes = _nbytes(step, tuple(shape), placements, tuple(mesh_shape), sizes)
                step = replace(step, nbytes=nbytes)
            steps.append(step)
    return steps


def _changes(
    placements: Placements, mesh_dim: int, ndim: int
) -> Iterator[tuple[str, int | None, int | None]]:
    """(kind, tensor_dim, scatter_dim) of the steps on a mesh dim."""
    free = [dim for dim in range(ndim) if Shard(dim) not in placements[mesh_dim + 1 :]]
    placement = placements[mesh_dim]
    if isinstance(placement, Replicate):
        yield from (("slice", dim, None) for dim in free)
    elif not isinstance(placement, Shard):
        yield "all_reduce", None, None
        yield from (("reduce_scatter", dim, None) for dim in free)
    elif placement.dim in free:
        yield "all_gather", placement.dim, None
        yield from (("all_to_all", placement.dim, dim) for dim in free if dim != placement.dim)


def _nbytes(
    step: Step,
    shape: tuple[int, ...],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    itemsizes: Sequence[int],
) -> int:
    """What all ranks receive together in a step. ``itemsizes``: of an element before and after."""
    before, after = itemsizes
    if step.scatter_dim is not None:
        moved = exchanged_elements(shape, placements, mesh_shape, step.mesh_dim, step.scatter_dim)
        return moved * before
    rest = list(placements)
    rest[step.mesh_dim] = Shard(0)  # its ranks hold the whole once, together
    moved = held_elements(shape, tuple(rest), mesh_shape) * (mesh_shape[step.mesh_dim] - 1)
    return moved * (before + after if step.kind == "all_reduce" else before)
