"""The ops, one file each: schema, checks, fake kernel, gradient, documented function."""

from tpkernels.ops.all_gather import all_gather
from tpkernels.ops.all_gather_matmul import all_gather_matmul
from tpkernels.ops.all_gather_scaled_matmul import all_gather_scaled_matmul
from tpkernels.ops.all_reduce import all_reduce, all_reduce_
from tpkernels.ops.all_reduce_rms_norm import all_reduce_rms_norm
from tpkernels.ops.all_to_all import all_to_all
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
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
    "reduce_scatter",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]
