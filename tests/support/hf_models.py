"""Small transformers models with random weights, and checks of their parallel copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode

import tpkernels
from tests.support.nn_reference import find_mismatch, shard

VOCAB, TOKENS = 47, 7
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]  # one batch of requests
#: World sizes. The 3 key-value groups are not divisible by 2, and 1 of 4 ranks gets no group.
SWEEP = (2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 3, 4)))


def make(model_type: str, *, tied: bool = False, attention: str = "sdpa", **options: Any) -> Any:
    """Create a causal model of 2 layers with 9 heads in 3 key-value groups, equal on all ranks."""
    import transformers

    torch.manual_seed(9)
    sizes = dict(
        hidden_size=36,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=4,
        intermediate_size=22,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attn_implementation=attention,
        pad_token_id=0,
        eos_token_id=None,
    )
    if not hasattr(transformers.CONFIG_MAPPING[model_type](), "num_key_value_heads"):
        del sizes["num_key_value_heads"]
    config = transformers.AutoConfig.for_model(model_type, **sizes | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    stored = model.state_dict().keys()
    buffers = [(name, value) for name, value in model.named_buffers() if name in stored]
    with torch.no_grad():  # norms of ones and biases of zeros would hide mix-ups
        for name, value in (*model.named_parameters(), *buffers):
            if value.dim() == 1 or name.endswith("_bias"):
                value.uniform_(0.5, 1.5)
            else:
                value.mul_(5)
    model.config._experts_implementation = "eager"  # the only implementation with float64
    return model.train()


def make_world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def batch(tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Create two sentences, the second shorter.

    The default length is not divisible by 2, 3 or 4.
    """
    torch.manual_seed(2)
    ids = torch.randint(1, VOCAB, (2, tokens))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class UpcastToFloat64(TorchFunctionMode):
    """Compute in float64 what a float64 model computes in float32, such as norms.

    This reduces rounding errors, so that wrong results are detected.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def run(
    model: Any, *lengths: int, call: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Run batches of these lengths in one backward pass.

    Args:
        call: the compiled model, if it is compiled.

    Returns:
        The logits of the last batch, the loss, and the gradients by name.
    """
    call = model if call is None else call
    outs = [call(**batch(tokens), use_cache=False) for tokens in lengths or (TOKENS,)]
    loss = torch.stack([out.loss for out in outs]).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return outs[-1].logits.detach(), loss.detach(), grads


def relative_error(got: torch.Tensor, want: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest error relative to the largest value of ``reference``.

    ``want`` is ``reference`` or a slice of it.
    """
    max_error = (got.double() - want).abs().max() if want.numel() else torch.zeros(())
    return float(max_error / reference.abs().max())


def find_logit_error(got: torch.Tensor, model: Any, ids: torch.Tensor) -> str | None:
    """Describe wrong logits, or return None.

    The error may be twice the error of transformers in fp32.
    """
    with torch.no_grad():
        fp32_logits = model(ids).logits
        exact = copy.deepcopy(model).double()(ids).logits
    error = relative_error(got, exact, exact)
    limit = 2 * relative_error(fp32_logits, exact, exact)
    return None if error <= limit else f"logits are off by {error:.3g}, allowed {limit:.3g}"


def find_differences(
    model: Any, sequence: bool | str, mesh: DeviceMesh, *, tokens: int = TOKENS, **options: Any
) -> list[str]:
    """Compare a parallel copy of ``model`` with the unsharded model in float64.

    Both must agree up to rounding. `test_loading` bounds the error of logits in float32.
    ``options``: options of `tpkernels.parallelize`.
    """
    failures: dict[str, str | None] = {}
    exact = copy.deepcopy(model).double()
    parallel = tpkernels.parallelize(
        copy.deepcopy(model).double(), mesh, sequence_parallel=sequence, **options
    )
    with UpcastToFloat64():
        logits, loss, grads = run(exact, tokens)
        got_logits, got_loss, got = run(parallel, tokens)
    failures |= {
        "logits": find_mismatch(got_logits, logits, 1e-11),
        "loss": find_mismatch(got_loss, loss, 1e-11),
    }
    for name, grad in grads.items():
        failures[name] = find_mismatch(got.get(name), shard(parallel, name, grad), 1e-11)
    if set(got) != set(grads):
        failures["parameters"] = f"{sorted(set(got) ^ set(grads))} are in only one of the two"
    return [f"{name}: {failure}" for name, failure in failures.items() if failure is not None]


def _inventory(model: torch.nn.Module) -> list[object]:
    """Return the ids of all modules and parameters, and the number of hooks of each module."""
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return [*map(id, model.modules()), *map(id, model.parameters()), *hooks]


def attempt(model: torch.nn.Module, mesh: Any, **options: Any) -> Callable[[], None]:
    """Return a call of `parallelize` that must leave the model unchanged."""

    def call() -> None:
        before = _inventory(model)
        try:
            tpkernels.parallelize(model, mesh, **options)
        finally:
            assert _inventory(model) == before, "changed the model"

    return call


def generate_tokens(model: Any) -> dict[str, list[int]]:
    """Generate tokens for each prompt. ``page_size`` is small enough for a second block."""
    import transformers

    outputs = model.generate_batch(
        PROMPTS,
        transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1),
        transformers.ContinuousBatchingConfig(
            num_blocks=16, page_size=64, max_batch_tokens=32, disable_nccl_graph_mixing=False
        ),
    )
    errors = {name: output.error for name, output in outputs.items() if output.error}
    assert not errors, errors
    return {name: output.generated_tokens for name, output in outputs.items()}


def expected_tokens(model: Any) -> list[list[int]]:
    """Return the expected result of `generate_tokens`, from ``generate``."""
    settings = {"max_new_tokens": 6, "do_sample": False}
    return [model.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in PROMPTS]
