"""Problems of ParallelKernelBench (github.com/togethercomputer/ParallelKernelBench), each in a few
lines with tpkernels beside a reference in torch.distributed.

    python -m examples.parallel_kernel_bench
    python -m examples.parallel_kernel_bench --tp 4 --only 13 54_ring_attention --size small

The references are written from the definitions of the problems. A problem is found by its number
and name; its file says what it is about.
"""

from examples.parallel_kernel_bench import (
    attention,
    collectives,
    experts,
    lookups,
    losses,
    products,
    training,
)

__all__ = ["attention", "collectives", "experts", "lookups", "losses", "products", "training"]
