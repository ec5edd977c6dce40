"""Continuous batching of transformers on a sharded model.

transformers (generation/continuous_batching) looks for the ranks in ``model._device_mesh``, and for
their key-value heads in ``model.tp_plan``, whose splits it takes to be equal. Here splits may
differ, and with ``ffn_only`` there are none. So the cache of each rank is made for the heads that
its attention computes.

Invariant: all ranks schedule alike, each on its own cache. Blocks must therefore hold the same
number of tokens on all ranks; they do, because blocks are counted in tokens and their number is
reduced over the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn.column import ColumnParallelLinear


def attach(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let ``generate_batch`` and ``init_continuous_batching`` of a model of transformers run on
    all ranks of ``mesh``, a mesh of one dim. Does nothing to other models. Does not communicate."""
    start = getattr(type(model), "init_continuous_batching", None)
    if start is None:
        return
    sharded: Any = model
    # transformers finds the dim by this name, whatever the user calls it.
    sharded._device_mesh = DeviceMesh.from_group(
        mesh.get_group(), mesh.device_type, mesh_dim_names=("tp",)
    )
    sharded.init_continuous_batching = functools.partial(_init, start, sharded)


def _init(start: Callable[..., Any], model: Any, *args: Any, **options: Any) -> Any:
    """Run ``model.init_continuous_batching``.

    Raises:
        NotImplementedError: this version of transformers makes its cache in another way.
    """
    manager = start(model, *args, **options)
    ranks: Any = getattr(manager, "distributed_helper", None)
    create = getattr(manager, "_create_batch_processor", None)
    if not hasattr(ranks, "tp_plan") or create is None:
        import transformers

        raise NotImplementedError(
            f"continuous batching of transformers {transformers.__version__} is not known to "
            "tpkernels, which was tested with 5.23; use model.generate"
        )
    ranks.tp_plan = {}  # of which it would derive the heads of a rank
    if not isinstance(create, _ForOwnHeads):  # transformers may keep a manager for later calls
        manager._create_batch_processor = _ForOwnHeads(model, create)
    return manager


class _ForOwnHeads:
    """Makes a batch processor, and its cache, with the heads of this rank."""

    def __init__(self, model: Any, create: Callable[[], Any]) -> None:
        self._model, self._create = model, create

    def __call__(self) -> Any:
        with _own_heads(self._model):
            return self._create()


@contextlib.contextmanager
def _own_heads(model: Any) -> Iterator[None]:
    """Give ``model.config`` the heads of this rank within the block."""
    whole = model.config
    own = copy.copy(whole)
    attention = model.base_model.layers[0].self_attn
    own.head_dim = attention.head_dim
    own.num_key_value_heads = _features(attention.k_proj) // attention.head_dim
    own.num_attention_heads = _features(attention.q_proj) // attention.head_dim
    model.config = own
    try:
        yield
    finally:
        model.config = whole


def _features(projection: nn.Module) -> int:
    """Return the output features on this rank."""
    if not isinstance(projection, ColumnParallelLinear):
        return int(projection.out_features)  # type: ignore[arg-type]
    return projection.out_sizes[projection.rank] or projection.stand_in
