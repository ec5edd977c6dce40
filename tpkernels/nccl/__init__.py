"""NCCL by itself: a communicator over the ranks of a process group, in which every call is bounded.

Nothing is loaded before it is asked for: this imports on a machine with neither NCCL nor CUDA.
"""

from tpkernels.nccl.communicator import Communicator, Window
from tpkernels.nccl.library import facts, load, unique_id, version

__all__ = ["Communicator", "Window", "facts", "load", "unique_id", "version"]
