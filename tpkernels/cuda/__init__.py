"""CUDA C++ kernels and copies over symmetric memory: the Python API of ``csrc/cuda``.

Importing this module does not load the driver. Functions that need the driver raise
``NotImplementedError`` and report the missing component. A prepared call is bound to the
``DeviceWorkspace`` of a group and launched on the current torch stream of its device. A launch
returns as soon as its kernels are queued. After the stream has completed them,
``workspace.failure()`` reports failed waits.
"""

from tpkernels.cuda.calls import (
    VARIANTS,
    barrier,
    multicast_unsupported,
    prepare_all_gather,
    prepare_all_reduce,
    prepare_normed_all_reduce,
    prepare_reduce_scatter,
    prepare_routed,
    rms_norm,
    sum_partials,
    supports_rms_norm,
)
from tpkernels.cuda.copies import CopyCall, flags_need_kernels
from tpkernels.cuda.image import available, driver_status, image_status, unsupported
from tpkernels.cuda.operands import DTYPES

__all__ = [
    "DTYPES",
    "VARIANTS",
    "CopyCall",
    "available",
    "barrier",
    "driver_status",
    "flags_need_kernels",
    "image_status",
    "multicast_unsupported",
    "prepare_all_gather",
    "prepare_all_reduce",
    "prepare_normed_all_reduce",
    "prepare_reduce_scatter",
    "prepare_routed",
    "rms_norm",
    "sum_partials",
    "supports_rms_norm",
    "unsupported",
]
