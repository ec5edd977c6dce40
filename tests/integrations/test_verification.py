"""`tpkernels.integrations.transformers.verification`: right models pass, and planted faults are
found in the right layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import hf_folders
from tests.support.cases import RanksFixture
from tests.support.tiers import thorough
from tpkernels.integrations.transformers import verification
from tpkernels.integrations.transformers.loading import LoadOptions

pytest.importorskip("transformers")

PROMPT = torch.arange(1, 41).view(1, 40)
Reference = Callable[..., tuple[LoadOptions, Any, Path]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a function that runs the unsharded model, once for each model and dtype."""
    base, known = tmp_path_factory.mktemp("models"), dict[Any, Any]()

    def run(model_type: str, dtype: torch.dtype, **changes: Any) -> tuple[LoadOptions, Any, Path]:
        attention = {"attention": "eager"} if model_type == "gemma2" else {}
        path = hf_folders.folder(base, model_type, **attention)
        options = LoadOptions(path, dtype=dtype, **changes)
        key = model_type, dtype, *changes.items()
        if key not in known:
            file = base / f"{len(known)}.pt"
            model = verification.load_unsharded(options)
            int8 = options.weights is not None
            known[key] = verification.write_reference(model, [PROMPT], int8, file), file
        return options, *known[key]

    return run


def check(
    ranks: RanksFixture,
    world: int,
    reference: tuple[LoadOptions, Any, Path],
    sabotage: Callable[[nn.Module], None] | None = None,
) -> verification.Result:
    options, expected, file = reference
    found = ranks(world).run(verification.check_rank, options, str(file), 4, sabotage)
    return verification.judge(expected, found)


@pytest.mark.parametrize(
    ("model_type", "dtype", "world"),
    [
        ("qwen3", torch.bfloat16, 2),
        thorough("qwen2", torch.float32, 3),
        thorough("mixtral", torch.float16, 2),
        thorough("gemma2", torch.bfloat16, 3),
        *(
            pytest.param(model_type, dtype, world, marks=pytest.mark.slow)
            for model_type in ("llama", "qwen2", "qwen3", "gemma2", "mixtral", "qwen3_moe")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for world in (1, 2, 3)
        ),
    ],
)
def test_a_right_model_passes(
    ranks: RanksFixture, reference: Reference, model_type: str, dtype: torch.dtype, world: int
) -> None:
    result = check(ranks, world, reference(model_type, dtype))
    assert result.passed, result
    assert [check.name for check in result.checks] == [
        *("layers", "logits", "loss", "gradients", "gradient norm", "logits, decode", "tokens")
    ]
    assert result.ranks == world


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["qwen2", "mixtral"])
def test_int8_weights_pass_without_gradients(
    ranks: RanksFixture, reference: Reference, model_type: str
) -> None:
    result = check(ranks, 2, reference(model_type, torch.float32, weights="int8"))
    assert result.passed, result
    assert "gradients" not in [check.name for check in result.checks]


def test_partial_sums_extend_the_bound(ranks: RanksFixture, reference: Reference) -> None:
    """Partial sums may cancel. Their rounding errors then exceed those of the result."""
    options, expected, file = reference("qwen3", torch.bfloat16)
    found = ranks(2).run(verification.check_rank, options, str(file), 4, None)
    point = "model.layers.0.self_attn.o_proj output"
    _, norm, partials, differs = found[1]["layers"][0][point]
    assert partials > 0.1 * norm  # of the projection of the local heads
    error = verification.ERROR_FACTOR * expected["sequences"][0]["errors"][point]
    limit = error + 2**-7 / 12**0.5 * (norm + 10 * norm)  # 6 and 8: the partial sums of the ranks
    for factor, passed in ((0.99, True), (1.01, False)):
        for rank, size in enumerate((6, 8)):
            distance = factor * limit if rank == 1 else 0.0
            found[rank]["layers"][0][point] = (distance, norm, size * norm, differs)
        assert verification.judge(expected, found).passed == passed


def get_layer(model: nn.Module, name: str) -> Any:
    return model.get_submodule(f"model.layers.{name}")


def swap_shards(model: nn.Module) -> None:
    """Exchange the shards of ranks 0 and 1 of a row-parallel projection."""
    weight = get_layer(model, "1.mlp.down_proj").weight
    if weight.dim() > 2:  # packed
        return
    shards = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(shards, weight.detach().contiguous())
    weight.data.copy_(shards[1 - dist.get_rank()])


def swap_key_shards(model: nn.Module) -> None:
    """Exchange two key heads of rank 0."""
    weight = get_layer(model, "0.self_attn.k_proj").weight
    if dist.get_rank() == 0 and weight.dim() == 2:
        weight.data.copy_(weight.data.roll(4, 0))


def lose_bias(model: nn.Module) -> None:
    """Zero the bias of a row-parallel projection on all ranks."""
    nn.init.zeros_(get_layer(model, "1.mlp.c_proj").bias)


def lose_bias_on_one_rank(model: nn.Module) -> None:
    """Zero the bias of the key projection on rank 1."""
    if dist.get_rank() == 1:
        nn.init.zeros_(get_layer(model, "0.self_attn.k_proj").bias)


def normalize_over_local_heads(model: nn.Module) -> None:
    norm = get_layer(model, "1.self_attn.q_norm")

    def forward(x: torch.Tensor) -> torch.Tensor:
        squares = x.float().square().mean((-2, -1), keepdim=True)
        return (x.float() * (squares + norm.eps).rsqrt() * norm.weight).to(x.dtype)

    norm.forward = forward


def scale_slightly(model: nn.Module) -> None:
    """Scale a weight by 1 + 2^-6, which is two units in the last place of bf16."""
    weight = get_layer(model, "0.self_attn.o_proj").weight
    weight.data.mul_(1 + 2**-6)


def double_gradient(model: nn.Module) -> None:
    """Sum a gradient over the ranks once too often."""
    parameter = get_layer(model, "1.input_layernorm").weight

    def add(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

    if parameter.requires_grad:
        parameter.register_hook(add)


@pytest.mark.parametrize(
    ("model_type", "dtype", "sabotage", "name", "where"),
    [
        ("qwen3", torch.bfloat16, swap_shards, "layers", "1.mlp.down_proj output"),
        thorough("qwen3", torch.bfloat16, swap_key_shards, "layers", "0.self_attn.k_proj output"),
        ("qwen3", torch.bfloat16, scale_slightly, "layers", "0.self_attn.o_proj output"),
        ("qwen3", torch.bfloat16, double_gradient, "gradients", "1.input_layernorm.weight"),
        thorough(
            *("qwen3", torch.bfloat16),
            *(normalize_over_local_heads, "layers", "1.self_attn.q_norm output"),
        ),
        thorough("starcoder2", torch.float32, lose_bias, "layers", "1.mlp.c_proj output"),
        thorough(
            *("qwen2", torch.float32),
            *(lose_bias_on_one_rank, "layers", "0.self_attn.k_proj output, rank 1"),
        ),
    ],
)
def test_a_fault_is_found(
    ranks: RanksFixture,
    reference: Reference,
    model_type: str,
    dtype: torch.dtype,
    sabotage: Callable[[nn.Module], None],
    name: str,
    where: str,
) -> None:
    result = check(ranks, 2, reference(model_type, dtype), sabotage)
    failed = {check.name: check.where for check in result.checks if not check.passed}
    assert f"model.layers.{where}" in failed[name], result
    if name == "layers":
        assert result.first_difference == result.checks[0]  # more than rounding
    else:
        assert {*failed} <= {"gradients", "gradient norm"}


def run_ways(ranks: RanksFixture, world: int, path: Path, sabotage: Any = None) -> Any:
    options = LoadOptions(path, dtype=torch.float32)
    return ranks(world).run(verification.check_ways, options, [PROMPT], sabotage)


def test_ways_that_round_differently_are_named(ranks: RanksFixture, tmp_path: Path) -> None:
    """Without invariant numerics, one rank and two ranks differ in the first layer whose sums
    differ. The same way on the same ranks is bitwise identical."""
    path = hf_folders.folder(tmp_path, "gemma2", attention="eager")
    one, two = (run_ways(ranks, world, path) for world in (1, 2))
    names = ["prefill", "decode", "chunks of 7", "chunks of 64", "batch of 8"]
    again = list(verification.compare_ways(two, two))
    assert [check.name for check in again] == names and again[0].passed and again[3].passed
    checks = list(verification.compare_ways(one, two))
    assert not checks[0].passed and 0 < checks[0].difference < 1e-5
    assert checks[0].where.startswith("model.layers.0.self_attn.o_proj output of token 0, rank")
    # Embeddings and norms do not depend on other rows, in any way.
    assert all("layers.0.self_attn." in check.where for check in checks if not check.passed)
    assert not checks[-1].passed


def test_the_first_different_layer_is_named(ranks: RanksFixture, tmp_path: Path) -> None:
    """All ways return the prefill, and then one of them differs in one layer of one token."""
    found = run_ways(ranks, 1, hf_folders.folder(tmp_path, "gemma2", attention="eager"))
    [[ways]] = found
    for way in ways:
        logits, rows = ways["prefill"]
        ways[way] = logits.clone(), {point: dict(digests) for point, digests in rows.items()}
    reference = copy.deepcopy(found)
    assert all(check.passed for check in verification.compare_ways(reference, found))
    logits, rows = ways["batch of 8"]
    logits[5, 0] += 1
    for point in ("model.norm output", "model.layers.1.mlp.down_proj output"):
        assert len(rows[point]) == PROMPT.numel()
        rows[point][5] = b"different"
    failed = [c for c in verification.compare_ways(reference, found) if not c.passed]
    assert [(check.name, check.where) for check in failed] == [
        ("batch of 8", "model.layers.1.mlp.down_proj output of token 5, rank 0")
    ]
