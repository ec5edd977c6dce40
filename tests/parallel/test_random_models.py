"""Random small models of eight families, with random hooks, shared modules and weights, frozen
parameters, dropout and dtypes: a parallel model computes what the unsharded one does, or it is
refused by name and left as it was."""

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
from tests.support.nn_reference import far, shard
from tests.support.ranked import on_ranks

pytest.importorskip("transformers")

CHOSEN = (
    "Llama",
    "Qwen3",
    "Phi-3, Phi-4",
    "Gemma 2",
    "OLMo2",
    "GPT-NeoX",
    "Mixtral",
    "DeepSeek-V3",
)
MODELS, FEW, SEED = 50, 8, 0  #: of a test; of the one that `make test` runs
REFUSED = (NotImplementedError, TypeError, ValueError)
Choice = random.Random
#: What may be changed before, and whether it may be refused.
CHANGES: dict[str, tuple[Callable[[Choice, Any], str], bool]] = {}


def change(refused: bool) -> Callable[[Callable[[Choice, Any], str]], Callable[[Choice, Any], str]]:
    """Register a change, which says what it did."""

    def register(function: Callable[[Choice, Any], str]) -> Callable[[Choice, Any], str]:
        CHANGES[function.__name__] = (function, refused)
        return function

    return register


def _first(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Apply a function to an output, or to the first of several, if it is of floats."""
    if isinstance(output, tuple) and output:
        return (_first(function, output[0]), *output[1:])
    is_float = isinstance(output, torch.Tensor) and output.is_floating_point()
    return function(output) if is_float else output


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _centred(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x - x.mean(dim, keepdim=True)


def _forward(self: nn.Module, *args: Any, **options: Any) -> Any:
    return _first(_doubled, type(self).forward(self, *args, **options))


@change(refused=True)
def hook(choice: Choice, model: Any) -> str:
    name, module = choice.choice([*model.named_modules()][1:])
    kind = choice.choice(["doubled", "columns", "rows", "pre", "backward", "forward"])
    by_columns, by_rows = (functools.partial(_centred, dim=dim) for dim in (-1, -2))
    functions = {"doubled": _doubled, "columns": by_columns, "rows": by_rows}
    if kind in functions:
        function = functions[kind]
        module.register_forward_hook(lambda _, args, output: _first(function, output))
    elif kind == "pre":
        module.register_forward_pre_hook(lambda _, args: tuple(_first(_doubled, x) for x in args))
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
    parameter.register_hook(_doubled)
    return name


def _two(choice: Choice, model: Any, of: Any) -> tuple[str, str]:
    """Names of two places for modules or parameters of one kind and shape."""

    def kind(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return value.shape
        return type(value), [tuple(p.shape) for p in value.parameters()]

    named = dict(of)
    name = choice.choice([*named])
    like = [other for other in named if kind(named[other]) == kind(named[name])]
    return name, choice.choice(like)


def _assign(model: Any, name: str, value: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


@change(refused=True)
def shared_weight(choice: Choice, model: Any) -> str:
    named = list(model.named_parameters(remove_duplicate=False))
    name, other = _two(choice, model, named)
    _assign(model, other, dict(named)[name])
    return f"{name} as {other}"


@change(refused=True)
def shared_module(choice: Choice, model: Any) -> str:
    named = [(name, module) for name, module in model.named_modules() if "layers." in name]
    name, other = _two(choice, model, named)
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


def _differences(model: Any, parallel: Any, wide: Any) -> dict[str, str | None]:
    """Where a model in float64, or the logits of another, are wrong; ``wide`` is its float64
    copy."""
    ids = hf_models.batch()["input_ids"]
    if model.dtype != torch.float64:
        with torch.no_grad():
            logits = parallel(ids, use_cache=False).logits
            single = model(ids, use_cache=False).logits
            want = wide(ids, use_cache=False).logits
        off, limit = (hf_models.error(each, want, want) for each in (logits, single))
        limit = 10 * limit + torch.finfo(logits.dtype).eps  # of bf16, 6 times that was seen
        return {"logits": None if off <= limit else f"off by {off:.3g}, allowed {limit:.3g}"}
    with hf_models.InFull():
        logits, loss, grads = hf_models.run(model)
        got_logits, got_loss, got = hf_models.run(parallel)
    wrong = {"logits": far(got_logits, logits, 1e-11), "loss": far(got_loss, loss, 1e-11)}
    for name, grad in grads.items():
        wrong[name] = far(got.get(name), shard(parallel, name, grad), 1e-11)
    if set(got) != set(grads):
        wrong["parameters"] = f"{sorted(set(got) ^ set(grads))} are in only one of the two"
    return wrong


def draw(seed: int) -> tuple[Any, dict[str, Any], tuple[int, ...], str, bool]:
    """The model of a seed, options of `tpkernels.parallelize`, the mesh's shape, a description, and
    whether it may be refused."""
    choice, world = Choice(seed), dist.get_world_size()
    model_type, options = FAMILIES[choice.choice(CHOSEN)]
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
    how: dict[str, Any] = {"sequence_parallel": choice.choice([None, False, "prefill"])}
    if any("experts" in name for name, _ in model.named_modules()):
        how["expert_parallel"] = choice.random() < 0.5
    elif choice.random() < 0.2:
        how = {"ffn_only": True}
    shape = choice.choice([(world,), (1, world)])
    what = f"seed {seed} on {world} ranks: {model_type} {sizes} {dtype} {how} {shape} {changes}"
    return model, how, shape, what, any(CHANGES[name][1] for name in names)


def one_model(seed: int) -> tuple[str, list[str]]:
    """What became of the model of a seed, and what is wrong with it."""
    single, *_ = draw(seed)
    model, how, shape, what, may_be_refused = draw(seed)  # a copy would lose hooks of parameters
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])["tp"]
    wide = copy.deepcopy(model).double()
    try:
        with hf_models.InFull():
            wide(**hf_models.batch(), use_cache=False).loss.backward()
    except Exception as error:  # what was changed cannot work, or not with a backward
        return "unusable", [] if may_be_refused else [f"{what}: {error!r}"]
    dropped = "'dropout'" in what and model.training and mesh.size() > 1
    before = hf_models._inventory(model)
    try:
        parallel = tpkernels.parallelize(model, mesh, **how)
    except REFUSED as error:
        wrong = [] if may_be_refused else [f"{what}: {error!r}"]
        if not any(
            name in str(error) for name in ("model.", "lm_head", "the embedding", "layers.")
        ):
            wrong.append(f"{what}: no name in {error!r}")
        if hf_models._inventory(model) != before:
            wrong.append(f"{what}: changed by {error!r}")
        return "refused", wrong
    try:
        found = _differences(single, parallel, wide)
    except NotImplementedError as error:
        fits = dropped and "would drop different values" in str(error)
        return "refused when called", [] if fits else [f"{what}: {error!r}"]
    if dropped:
        return "dropping", [f"{what}: dropout is not refused"]
    return "equal", [f"{what}: {name}: {text}" for name, text in found.items() if text]


@pytest.mark.parametrize(
    ("world", "models"),
    [(2, FEW), *(pytest.param(world, MODELS, marks=pytest.mark.slow) for world in (2, 3, 4, 1))],
)
@on_ranks(timeout=3000)
def test_random_models(models: int) -> list[str]:
    """Of many models, at least half are equal to the unsharded model, and some are refused."""
    failures, kinds = [], Counter[str]()
    for seed in range(SEED, SEED + models):
        try:
            kind, wrong = one_model(1000 * dist.get_world_size() + seed)
        except Exception as error:
            raise RuntimeError(f"seed {1000 * dist.get_world_size() + seed}") from error
        kinds[kind] += 1
        failures += wrong
    few = 2 * kinds["equal"] < models or not kinds["refused"]
    return [*failures, *([f"{dict(kinds)}"] if few and models == MODELS else [])]
