"""CUDA C++ kernels and copies over symmetric memory: the Python face of ``csrc/cuda``.

Importing this touches no driver. A function that needs one raises ``NotImplementedError`` and says
what is missing. A prepared call is bound to the ``DeviceWorkspace`` of a group and launched on
torch's current stream of its device. A launch returns when its kernels are queued. Once the stream
has caught up, ``space.failure()`` tells whether a wait has failed.
"""

from tpkernels.cuda.calls import (
    VARIANTS,
    barrier,
    normalises,
    prepare_all_gather,
    prepare_all_reduce,
    prepare_normed_all_reduce,
    prepare_reduce_scatter,
    prepare_routed,
    rms_norm,
    sum_partials,
    without_multicast,
)
from tpkernels.cuda.copies import CopyCall, flags_take_kernels
from tpkernels.cuda.image import available, driver_status, image_status, unsupported
from tpkernels.cuda.operands import DTYPES

__all__ = [
    "DTYPES",
    "VARIANTS",
    "CopyCall",
    "available",
    "barrier",
    "driver_status",
    "flags_take_kernels",
    "image_status",
    "normalises",
    "prepare_all_gather",
    "prepare_all_reduce",
    "prepare_normed_all_reduce",
    "prepare_reduce_scatter",
    "prepare_routed",
    "rms_norm",
    "sum_partials",
    "unsupported",
    "without_multicast",
]
