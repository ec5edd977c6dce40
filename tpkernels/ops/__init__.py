"""The ops, one file each: schema, execution, gradient, documented function."""

from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from tpkernels.ops.all_reduce import all_reduce, all_reduce_
from tpkernels.ops.all_reduce_rms_norm import all_reduce_rms_norm
from tpkernels.ops.all_to_all import all_to_all
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.moe_combine import moe_combine
from tpkernels.ops.moe_dispatch import moe_dispatch
from tpkernels.ops.reduce_scatter import reduce_scatter
from tpkernels.ops.scaled_matmul_all_reduce import scaled_matmul_all_reduce
from tpkernels.ops.scaled_matmul_reduce_scatter import scaled_matmul_reduce_scatter

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_gather_scaled_matmul",
    "all_reduce",
    "all_reduce_",
    "all_reduce_rms_norm",
    "all_to_all",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
    "moe_combine",
    "moe_dispatch",
    "reduce_scatter",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]

_OF_ALL = """
    ``group`` is a ProcessGroup, a one-dimensional DeviceMesh, ``(mesh, dim)`` or a group's name.
    ``algorithm`` is "auto" or the name of one, which `tpkernels info` lists.

    Raises:
        ValueError, TypeError: invalid arguments; nothing has been sent.
        NotImplementedError: valid but not supported: a dtype, the requested algorithm, or a
            gradient.
        PeerLostError, CollectiveTimeoutError, CollectiveMismatchError, GroupBrokenError.
    """
for _name in __all__:
    if _text := globals()[_name].__doc__:  # none with -OO
        globals()[_name].__doc__ = _text + _OF_ALL
