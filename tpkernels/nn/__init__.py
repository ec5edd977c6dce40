"""Layers that are sharded over the ranks of a group, built from the ops.

All take these arguments:

- ``group``: a ProcessGroup, a DeviceMesh (dimension) or a group's name.
- ``sequence_parallel``: whether the activations between layers are split, so that each rank has its
  rows of the sequence. By default all ranks have all rows.
- ``sequence_dim``: the dim of the sequence, 0 by default.
- ``device``, ``dtype``: of the parameters, as torch's layers take them.

Calls take ``shard_sizes``, the rows of each rank along ``sequence_dim``, unless they are all equal.

With the same random state on all ranks, the initial values are those of the unsharded layers. State
dicts have their names and shapes: ``torch.distributed.checkpoint`` takes them as they are,
``torch.save`` through `full_state_dict`.
"""

from tpkernels.nn.blocks import ParallelAttention, ParallelMLP, RMSNorm
from tpkernels.nn.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from tpkernels.nn.moe import MoE
from tpkernels.nn.packing import pack_
from tpkernels.nn.regions import copy_to_ranks, gather_from_ranks, split_over_ranks
from tpkernels.nn.sharding import ShardTensor, full_state_dict
from tpkernels.nn.torch_tools import clip_grad_norm_
from tpkernels.nn.vocabulary import (
    ParallelLMHead,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "MoE",
    "ParallelAttention",
    "ParallelLMHead",
    "ParallelMLP",
    "QKVParallelLinear",
    "RMSNorm",
    "RowParallelLinear",
    "ShardTensor",
    "VocabParallelEmbedding",
    "clip_grad_norm_",
    "column_parallel",
    "copy_to_ranks",
    "full_state_dict",
    "gather_from_ranks",
    "pack_",
    "split_over_ranks",
    "vocab_parallel_cross_entropy",
]
