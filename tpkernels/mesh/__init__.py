"""Sharded matmul and collectives on device meshes, built from the ops.

Sharded operands are DTensors.
"""

from typing import Any

__all__ = [
    "MatmulPlan",
    "Step",
    "all_gather",
    "all_reduce",
    "explain",
    "plans",
    "reduce_scatter",
    "sharded_matmul",
    "sharded_mean",
    "sharded_sum",
]


def __getattr__(name: str) -> Any:
    """Import the names on first use: importing DTensor costs half as long as importing torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tpkernels.mesh import collectives, matmul, planner

    modules = (matmul, collectives, planner)
    value = next(getattr(module, name) for module in modules if hasattr(module, name))
    globals()[name] = value  # later accesses skip this function
    return value
