"""Public ops. Each file defines the schema, the gradient and the documented function of an op."""

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

# Appended to the docstring of every op.
_COMMON_DOC = """
    ``group`` is a ``ProcessGroup``, a one-dimensional ``DeviceMesh``, a ``(mesh, dim)`` tuple or a
    group name. ``algorithm`` is ``"auto"`` or an algorithm name listed by ``tpkernels info``.

    Raises:
        ValueError, TypeError: An argument is invalid. No data was sent.
        NotImplementedError: The dtype, the requested algorithm or the gradient is not supported.
            No data was sent.
        PeerLostError: A peer process ended or left the call.
        CollectiveTimeoutError: A peer did not make the call within the timeout of the group.
        CollectiveMismatchError: A peer made a different call.
        GroupBrokenError: An earlier call of the group failed.
    """
for _name in __all__:
    if _doc := globals()[_name].__doc__:  # python -OO strips docstrings
        globals()[_name].__doc__ = _doc + _COMMON_DOC
