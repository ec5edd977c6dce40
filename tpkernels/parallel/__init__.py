"""Tensor parallelism for models that exist: styles for ``parallelize_module``."""

from tpkernels.parallel.styles import FusedColwiseParallel, FusedRowwiseParallel

__all__ = ["FusedColwiseParallel", "FusedRowwiseParallel"]
