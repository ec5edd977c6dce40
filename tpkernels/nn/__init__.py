"""Layers that are sharded over the ranks of a group, built from the ops.

Their state dicts have the names and shapes of the unsharded layers.
``torch.distributed.checkpoint`` takes them as they are, ``torch.save`` through `full_state_dict`.
"""

from tpkernels.nn.blocks import ParallelAttention, ParallelMLP
from tpkernels.nn.checkpoint import ShardTensor, full_state_dict
from tpkernels.nn.clipping import clip_grad_norm_
from tpkernels.nn.column import ColumnParallelLinear, column_parallel
from tpkernels.nn.embedding import ParallelLMHead, VocabParallelEmbedding
from tpkernels.nn.linear import pack_
from tpkernels.nn.loss import vocab_parallel_cross_entropy
from tpkernels.nn.merged import MergedColumnParallelLinear, QKVParallelLinear
from tpkernels.nn.norm import RMSNorm
from tpkernels.nn.regions import copy_to_ranks, gather_from_ranks, split_over_ranks
from tpkernels.nn.row import RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
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
