"""Tensor parallelism for existing models: `parallelize`, `from_pretrained`, and styles for
``parallelize_module`` of torch."""

from typing import Any

from tpkernels.parallel.parallelize import parallelize
from tpkernels.parallel.pretrained import from_pretrained

__all__ = ["FusedColwiseParallel", "FusedRowwiseParallel", "from_pretrained", "parallelize"]


def __getattr__(name: str) -> Any:
    """Import the styles lazily: they import DTensor, and that takes half as long as importing
    torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tpkernels.parallel import styles

    return getattr(styles, name)
