"""Tensor-parallel layers, built from the fused ops and sharded over the ranks of a group.

All layers accept these arguments:

- ``group``: a ProcessGroup, a DeviceMesh (dimension) or a group name.
- ``sequence_parallel``: if True, activations between layers are sharded along the sequence, and
  each rank holds only the local rows. By default every rank holds all rows.
- ``sequence_dim``: sequence dim of the activations, 0 by default.
- ``device``, ``dtype``: device and dtype of the parameters, as for ``torch.nn`` layers.

Calls accept ``shard_sizes``, the number of rows of each rank along ``sequence_dim``. It is required
if the ranks hold different numbers of rows.

With the same random state on all ranks, each rank gets its shard of the initial values of the
unsharded layer. State dicts have the names and shapes of the unsharded layers.
``torch.distributed.checkpoint`` accepts them unchanged; for ``torch.save``, call `full_state_dict`.
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
