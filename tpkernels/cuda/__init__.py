"""CUDA C++ kernels and copies over symmetric memory: the Python face of ``csrc/cuda``.

Importing this touches no driver. What needs one raises ``NotImplementedError`` that says what is
missing. The calls take the ``DeviceWorkspace`` of a group and run on torch's current stream of its
device; they return when they are queued, and ``space.failure()`` tells, once the stream has caught
up, whether a wait has failed.
"""

from tpkernels.cuda.calls import (
    ONE_SHOT_BYTES,
    WAYS,
    all_reduce,
    all_reduce_way,
    barrier,
    layout,
    paced_copy,
    sum_partials,
)
from tpkernels.cuda.copies import CopyCall
from tpkernels.cuda.image import driver_status, image_status, unsupported
from tpkernels.cuda.shards import all_gather, reduce_scatter

__all__ = [
    "ONE_SHOT_BYTES",
    "WAYS",
    "CopyCall",
    "all_gather",
    "all_reduce",
    "all_reduce_way",
    "barrier",
    "driver_status",
    "image_status",
    "layout",
    "paced_copy",
    "reduce_scatter",
    "sum_partials",
    "unsupported",
]
