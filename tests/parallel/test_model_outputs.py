"""Hidden states, attention weights and routers' logits of a parallel model are those of the
unsharded one."""

from __future__ import annotations

import copy

import pytest

import tpkernels
from tests.support import hf_models
from tests.support.nn_reference import far
from tests.support.ranked import on_ranks

pytest.importorskip("transformers")


@pytest.mark.parametrize("world", hf_models.SWEEP)
@on_ranks()
def test_hidden_states_and_attentions_are_whole() -> list[str]:
    """All of them, and chosen ones; as an output object and as a tuple; and their gradients."""
    failures: dict[str, str | None] = {}
    single = hf_models.make(
        "qwen2_moe",
        attention="eager",
        num_experts=4,
        moe_intermediate_size=10,
        mlp_only_layers=[1],
        qkv_bias=False,
    )
    names = ("router_logits", "hidden_states", "attentions")
    for sequence in (True, False):
        parallel = tpkernels.parallelize(
            copy.deepcopy(single), hf_models.mesh_of_all(), sequence_parallel=sequence
        )
        for chosen in (True, [1]):
            options = {"output_hidden_states": chosen, "output_attentions": True}
            options["output_router_logits"] = True
            want, got = (
                model(**hf_models.batch(), **options, use_cache=False)
                for model in (single, parallel)
            )
            as_tuple = parallel.model(
                hf_models.batch()["input_ids"],
                hf_models.batch()["attention_mask"],
                **options,
                use_cache=False,
                return_dict=False,
            )
            for name in names:
                for i, (mine, theirs) in enumerate(zip(got[name], want[name], strict=True)):
                    if theirs is not None:
                        failures[f"{sequence=} {chosen=} {name} {i}"] = far(mine, theirs, 1e-4)
            for name, values in zip(names, as_tuple[1:], strict=True):
                for i, (mine, theirs) in enumerate(zip(values, want[name], strict=True)):
                    if theirs is not None:
                        failures[f"{sequence=} {chosen=} tuple {name} {i}"] = far(
                            mine, theirs, 1e-4
                        )
        grads = []
        for model in (single, parallel):
            model.zero_grad()
            states = model(**hf_models.batch(), output_hidden_states=True).hidden_states
            sum(state.square().mean() for state in states).backward()
            grads.append(model.model.layers[0].input_layernorm.weight.grad)
        failures[f"{sequence=} gradient"] = far(grads[1], grads[0], 1e-4)
    return [f"{name}: {failure}" for name, failure in failures.items() if failure is not None]
