"""Existing models made tensor-parallel."""

from tpkernels.parallel.parallelize import parallelize

__all__ = ["parallelize"]
