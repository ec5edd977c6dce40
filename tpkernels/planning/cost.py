"""Flops and bytes of a call, from which rooflines follow."""

from __future__ import annotations

from dataclasses import dataclass

from tpkernels.planning.problem import Problem


@dataclass(frozen=True)
class Cost:
    """What a call costs the rank with the most work.

    Attributes:
        flops: of the local matmul.
        traffic: bytes received from peers. An all-reduce counts as a reduce-scatter and an
            all-gather: 2 (W - 1) / W times the tensor. An all-to-all brings (W - 1) / W^2 of it.
        touched: bytes read or written, ``traffic`` included: x, weights and results once each.
    """

    flops: int
    traffic: int
    touched: int

    @classmethod
    def of(cls, problem: Problem, other: int) -> Cost:
        """Return the cost of an evenly split ``problem``.

        Args:
            other: the extent of the matmul that is not part of the problem, over all ranks: N of a
                column-parallel weight, K of a row-parallel one. Ignored without a matmul.
        """
        traffic = problem.nbytes * (problem.world - 1) // problem.world
        if problem.dim is None:
            traffic *= 2
        if problem.spec.exchanges:  # of which a rank has a part before, and a part after
            part, traffic = problem.nbytes // problem.world, traffic // problem.world
            return cls(0, traffic, 2 * part + traffic)
        if not problem.spec.has_matmul:
            return cls(0, traffic, (2 + problem.spec.normed) * problem.nbytes + traffic)
        rows, width, local = problem.rows, problem.shape[-1], other // problem.world
        elements = (1 + problem.spec.normed) * rows * width + width * local + rows * local
        return cls(
            flops=2 * rows * width * local,
            traffic=traffic,
            touched=elements * problem.dtype.itemsize + traffic,
        )
