"""Fused communication and compute for tensor parallelism in PyTorch.

The ops are ``torch.ops.tpkernels.*``. The functions of the same names here take a ProcessGroup, a
DeviceMesh (dimension) or a group's name.
"""

from tpkernels import compile, nccl, nn, numerics
from tpkernels.bench.benchmark import benchmark
from tpkernels.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupBrokenError,
    PeerLostError,
    TpkernelsError,
)
from tpkernels.groups import empty, finalize, init
from tpkernels.ops import (
    all_gather,
    all_gather_matmul,
    all_reduce,
    all_reduce_,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)
from tpkernels.parallel import parallelize
from tpkernels.shards import shard_sizes
from tpkernels.version import VERSION

__version__ = VERSION

__all__ = [
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "GroupBrokenError",
    "PeerLostError",
    "TpkernelsError",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_",
    "benchmark",
    "compile",
    "empty",
    "finalize",
    "init",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "nccl",
    "nn",
    "numerics",
    "parallelize",
    "reduce_scatter",
    "shard_sizes",
]
