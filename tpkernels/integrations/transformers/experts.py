"""Importing this module registers "tpkernels" as an experts implementation of transformers. Models
loaded with ``experts_implementation="tpkernels"`` compute their experts with
`tpkernels.grouped_matmul`, in one process. `tpkernels.parallelize` does not need this option."""

from __future__ import annotations

from typing import Any

import torch

from tpkernels.ops.experts import permute_tokens, reduce_by_token, sort_assignments
from tpkernels.ops.grouped_matmul import grouped_matmul


def experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Forward of an experts module. Raise NotImplementedError if its weights are sharded by the
    expert parallelism of transformers."""
    if experts._is_expert_parallel:
        raise NotImplementedError(
            "experts_implementation='tpkernels' does not support the expert parallelism of "
            "transformers; call tpkernels.parallelize(model, mesh, expert_parallel=True) instead"
        )
    assignments = sort_assignments(top_k_index, top_k_weights, experts.num_experts)

    def project(rows: torch.Tensor, name: str) -> torch.Tensor:
        w = getattr(experts, name)
        w = w if experts.is_transposed else w.transpose(1, 2)
        return grouped_matmul(rows, w, assignments.counts, getattr(experts, f"{name}_bias", None))

    rows = permute_tokens(hidden_states, assignments)
    if experts.has_gate:
        inner = experts._apply_gate(project(rows, "gate_up_proj"))
    else:
        inner = experts.act_fn(project(rows, "up_proj"))
    y = project(inner, "down_proj")
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    return reduce_by_token(y, assignments)


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("tpkernels", experts_forward)


_register()
