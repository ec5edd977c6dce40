"""Problems of ParallelKernelBench (github.com/togethercomputer/ParallelKernelBench), solved in few
lines of tpkernels and compared with references in torch.distributed.

    python -m examples.parallel_kernel_bench
    python -m examples.parallel_kernel_bench --tp 4 --only 13 54_ring_attention --size small

The references follow the definitions of the problems. Problems keep their number and name. Each
file covers one topic.
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
