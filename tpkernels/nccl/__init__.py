"""NCCL without torch: a communicator over the ranks of a process group, with bounded calls.

NCCL is loaded on first use, so this module imports on machines without NCCL and CUDA.
"""

from tpkernels.nccl.communicator import Communicator, Window
from tpkernels.nccl.library import facts, load

__all__ = ["Communicator", "Window", "facts", "load"]
