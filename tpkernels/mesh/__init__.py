"""Sharded matrix products and collectives on device meshes: a thin layer over the ops; sharded
operands are DTensors."""

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
    """Import the names on first use: DTensor's import takes half as long as torch itself."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tpkernels.mesh import collectives, planner, products

    homes = (products, collectives, planner)
    found = next(getattr(home, name) for home in homes if hasattr(home, name))
    globals()[name] = found  # the next access comes without this function
    return found
