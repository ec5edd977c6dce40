"""Fused communication and compute for tensor parallelism in PyTorch.

The ops are ``torch.ops.tpkernels.*``. Their ``group`` is the name of a group. The functions with
the same names in this module also accept a ProcessGroup, a DeviceMesh or a (mesh, dim) tuple.
"""

from typing import TYPE_CHECKING, Any

import tpkernels_autoload
from tpkernels import compile, mesh, nccl, nn, numerics, ops
from tpkernels.common.shards import shard_sizes
from tpkernels.common.version import VERSION
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupBrokenError,
    PeerLostError,
    RoutingError,
    TpkernelsError,
    WorkspaceMemoryError,
)
from tpkernels.groups import check, empty, finalize
from tpkernels.launch.initialization import init
from tpkernels.launch.spmd import spmd
from tpkernels.local.packed import pack, unpack
from tpkernels.local.weight import CustomMatmul
from tpkernels.ops import *  # noqa: F403
from tpkernels.ops.grouped_matmul import grouped_matmul
from tpkernels.ops.scaled_grouped_matmul import scaled_grouped_matmul
from tpkernels.ops.tuner import autotune
from tpkernels.parallel import from_pretrained, parallelize
from tpkernels.qualification import qualify
from tpkernels.timing import benchmark

__version__ = VERSION
tpkernels_autoload.register()

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CustomMatmul",
    "GroupBrokenError",
    "PeerLostError",
    "RoutingError",
    "TpkernelsError",
    "WorkspaceMemoryError",
    "autotune",
    "benchmark",
    "check",
    "compile",
    "empty",
    "finalize",
    "from_pretrained",
    "grouped_matmul",
    "init",
    "mesh",
    "nccl",
    "nn",
    "numerics",
    "pack",
    "parallelize",
    "qualify",
    "scaled_grouped_matmul",
    "shard_sizes",
    "sharded_matmul",
    "spmd",
    "unpack",
]
__all__ += ops.__all__

if TYPE_CHECKING:
    from tpkernels.mesh.matmul import sharded_matmul


def __getattr__(name: str) -> Any:
    """Import `sharded_matmul` on first access. It needs DTensor, and the import of DTensor costs
    half as much time as the import of torch."""
    if name != "sharded_matmul":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = function = mesh.sharded_matmul  # the next access does not call __getattr__
    return function
