"""Random small models of eight families, with random hooks, shared modules and weights, frozen
parameters, dropout and dtypes. A parallel model matches the unsharded model, or it is refused with
a module name and left unchanged."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from tests.parallel.test_plans import FAMILIES
from tests.support import hf_models
from tests.support.nn_reference import find_mismatch, shard
from tests.support.ranked import on_ranks

pytest.importorskip("transformers")

SELECTED = (
    "Llama",
    "Qwen3",
    "Phi-3, Phi-4",
    "Gemma 2",
    "OLMo2",
    "GPT-NeoX",
    "Mixtral",
    "DeepSeek-V3",
)
MODELS, FEW, SEED = 50, 8, 0  #: models per test, models in `make test`, first seed
REFUSED = (NotImplementedError, TypeError, ValueError)
Choice = random.Random
#: Changes before `parallelize`, and whether the changed model may be refused.
CHANGES: dict[str, tuple[Callable[[Choice, Any], str], bool]] = {}


def change(refused: bool) -> Callable[[Callable[[Choice, Any], str]], Callable[[Choice, Any], str]]:
    """Register a change. The function returns a description of the change."""

    def register(function: Callable[[Choice, Any], str]) -> Callable[[Choice, Any], str]:
        CHANGES[function.__name__] = (function, refused)
        return function

    return register


def _first(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Apply ``function`` to a floating-point output, or to the first output of a tuple."""
    if isinstance(output, tuple) and output:
        return (_first(function, output[0]), *output[1:])
    is_float = isinstance(output, torch.Tensor) and output.is_floating_point()
    return function(output) if is_float else output


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _centre(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x - x.mean(dim, keepdim=True)


def _forward(self: nn.Module, *args: Any, **options: Any) -> Any:
    return _first(_double, type(self).forward(self, *args, **options))


@change(refused=True)
def hook(choice: Choice, model: Any) -> str:
    name, module = choice.choice([*model.named_modules()][1:])
    kind = choice.choice(["doubled", "columns", "rows", "pre", "backward", "forward"])
    by_columns, by_rows = (functools.partial(_centre, dim=dim) for dim in (-1, -2))
    functions = {"doubled": _double, "columns": by_columns, "rows": by_rows}
    if kind in functions:
        function = functions[kind]
        module.register_forward_hook(lambda _, args, output: _first(function, output))
    elif kind == "pre":
        module.register_forward_pre_hook(lambda _, args: tuple(_first(_double, x) for x in args))
    elif kind == "backward":
        module.register_full_backward_hook(
            lambda _, before, after: tuple(None if x is None else 2 * x for x in before)
        )
    else:
        module.forward = types.MethodType(_forward, module)
    return f"{kind} of {name}"


@change(refused=True)
def hook_of_parameter(choice: Choice, model: Any) -> str:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    name, parameter = choice.choice(trained)
    parameter.register_hook(_double)
    return name


def _matching_pair(choice: Choice, model: Any, candidates: Any) -> tuple[str, str]:
    """Return two names of modules or parameters with equal types and shapes."""

    def kind(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return value.shape
        return type(value), [tuple(p.shape) for p in value.parameters()]

    named = dict(candidates)
    name = choice.choice([*named])
    matching = [candidate for candidate in named if kind(named[candidate]) == kind(named[name])]
    return name, choice.choice(matching)


def _assign(model: Any, name: str, value: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


@change(refused=True)
def shared_weight(choice: Choice, model: Any) -> str:
    named = list(model.named_parameters(remove_duplicate=False))
    name, other = _matching_pair(choice, model, named)
    _assign(model, other, dict(named)[name])
    return f"{name} as {other}"


@change(refused=True)
def shared_module(choice: Choice, model: Any) -> str:
    named = [(name, module) for name, module in model.named_modules() if "layers." in name]
    name, other = _matching_pair(choice, model, named)
    _assign(model, other, dict(named)[name])
    return f"{name} as {other}"


@change(refused=False)
def layers_twice(choice: Choice, model: Any) -> str:
    base = model.base_model
    order = choice.choice([(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 0, 0)])
    base.layers = nn.ModuleList([base.layers[i] for i in order])
    return str(order)


@change(refused=True)
def extra(choice: Choice, model: Any) -> str:
    name, module = choice.choice([*model.named_modules()][1:])
    kind = choice.choice(["child", "buffer"])
    if kind == "child":
        module.added_child = nn.Linear(2, 2)
    else:
        module.register_buffer("added_buffer", torch.ones(2))
    return f"{kind} of {name}"


@change(refused=False)
def frozen(choice: Choice, model: Any) -> str:
    for parameter in model.parameters():
        parameter.requires_grad_(choice.random() < 0.7)
    model.get_input_embeddings().weight.requires_grad_(True)
    return ""


def _differences(model: Any, parallel: Any, reference: Any) -> dict[str, str | None]:
    """Return the errors of a parallel model in float64.

    In lower precision only logits are compared. ``reference`` is the float64 copy of the model."""
    ids = hf_models.batch()["input_ids"]
    if model.dtype != torch.float64:
        with torch.no_grad():
            logits = parallel(ids, use_cache=False).logits
            single = model(ids, use_cache=False).logits
            want = reference(ids, use_cache=False).logits
        error, limit = (hf_models.relative_error(x, want, want) for x in (logits, single))
        limit = 10 * limit + torch.finfo(logits.dtype).eps  # bf16 had 6 times the unsharded error
        return {"logits": None if error <= limit else f"off by {error:.3g}, allowed {limit:.3g}"}
    with hf_models.UpcastToFloat64():
        logits, loss, grads = hf_models.run(model)
        got_logits, got_loss, got = hf_models.run(parallel)
    failures = {
        "logits": find_mismatch(got_logits, logits, 1e-11),
        "loss": find_mismatch(got_loss, loss, 1e-11),
    }
    for name, grad in grads.items():
        failures[name] = find_mismatch(got.get(name), shard(parallel, name, grad), 1e-11)
    if set(got) != set(grads):
        failures["parameters"] = f"{sorted(set(got) ^ set(grads))} are in only one of the two"
    return failures


def draw(seed: int) -> tuple[Any, dict[str, Any], tuple[int, ...], str, bool]:
    """Return the model for a seed, the options of `tpkernels.parallelize`, the mesh shape, a
    description, and whether the model may be refused."""
    choice, world = Choice(seed), dist.get_world_size()
    model_type, options = FAMILIES[choice.choice(SELECTED)]
    heads, kv_heads = choice.choice([(9, 3), (6, 1), (6, 2), (6, 6)])
    sizes = {"num_attention_heads": heads, "intermediate_size": choice.randint(4, 24)}
    if model_type != "gpt_neox":
        sizes["num_key_value_heads"] = heads if model_type == "deepseek_v3" else kv_heads
    model = hf_models.make(model_type, **options | sizes | {"tied": choice.random() < 0.3})
    dtype = choice.choice([torch.float64] * 4 + [torch.float32, torch.bfloat16])
    model.to(dtype)
    names = [choice.choice([*CHANGES]) for _ in range(choice.choice([0, 1, 1, 1, 2, 3]))]
    changes = [f"{name} {CHANGES[name][0](choice, model)}" for name in names]
    if choice.random() < 0.1:
        owner = choice.choice([m for m in model.modules() if hasattr(m, "attention_dropout")])
        owner.attention_dropout = 0.5
        changes.append("dropout")
    if choice.random() < 0.2:
        model.eval()
    args: dict[str, Any] = {"sequence_parallel": choice.choice([None, False, "prefill"])}
    if any("experts" in name for name, _ in model.named_modules()):
        args["expert_parallel"] = choice.random() < 0.5
    elif choice.random() < 0.2:
        args = {"ffn_only": True}
    shape = choice.choice([(world,), (1, world)])
    case = f"seed {seed} on {world} ranks: {model_type} {sizes} {dtype} {args} {shape} {changes}"
    return model, args, shape, case, any(CHANGES[name][1] for name in names)


def one_model(seed: int) -> tuple[str, list[str]]:
    """Return the outcome for the model of a seed, and its failures."""
    single, *_ = draw(seed)
    # Drawn twice, because a copy would lose parameter hooks.
    model, args, shape, case, may_be_refused = draw(seed)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])["tp"]
    reference = copy.deepcopy(model).double()
    try:
        with hf_models.UpcastToFloat64():
            reference(**hf_models.batch(), use_cache=False).loss.backward()
    except Exception as error:  # the changed model cannot run, or has no backward
        return "unusable", [] if may_be_refused else [f"{case}: {error!r}"]
    dropped = "'dropout'" in case and model.training and mesh.size() > 1
    before = hf_models._inventory(model)
    try:
        parallel = tpkernels.parallelize(model, mesh, **args)
    except REFUSED as error:
        wrong = [] if may_be_refused else [f"{case}: {error!r}"]
        if not any(
            name in str(error) for name in ("model.", "lm_head", "the embedding", "layers.")
        ):
            wrong.append(f"{case}: no name in {error!r}")
        if hf_models._inventory(model) != before:
            wrong.append(f"{case}: changed by {error!r}")
        return "refused", wrong
    try:
        failures = _differences(single, parallel, reference)
    except NotImplementedError as error:
        fits = dropped and "would drop different values" in str(error)
        return "refused when called", [] if fits else [f"{case}: {error!r}"]
    if dropped:
        return "dropping", [f"{case}: dropout is not refused"]
    return "equal", [f"{case}: {name}: {failure}" for name, failure in failures.items() if failure]


@pytest.mark.parametrize(
    ("world", "models"),
    [(2, FEW), *(pytest.param(world, MODELS, marks=pytest.mark.slow) for world in (2, 3, 4, 1))],
)
@on_ranks(timeout=3000)
def test_random_models(models: int) -> list[str]:
    """Of `MODELS` models, at least half match the unsharded model and some are refused."""
    failures, kinds = [], Counter[str]()
    for seed in range(SEED, SEED + models):
        try:
            kind, wrong = one_model(1000 * dist.get_world_size() + seed)
        except Exception as error:
            raise RuntimeError(f"seed {1000 * dist.get_world_size() + seed}") from error
        kinds[kind] += 1
        failures += wrong
    too_few = 2 * kinds["equal"] < models or not kinds["refused"]
    return [*failures, *([f"{dict(kinds)}"] if too_few and models == MODELS else [])]
