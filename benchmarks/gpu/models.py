"""Whole layers and models for the GPU suite: eager, and a layer in a CUDA graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import tpkernels
from benchmarks.gpu.stage import (
    Result,
    Setting,
    captured,
    nccl_worlds,
    over_ranks,
    stage,
    synchronize,
)

HIDDEN, FFN, HEADS, SEQUENCE = 256, 688, 8, 64


class Block(nn.Module):
    """The two halves of a transformer block, rows of the sequence split or not."""

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, **options: Any) -> None:
        super().__init__()
        options["sequence_parallel"] = sequence_parallel
        kind = {name: options[name] for name in ("device", "dtype")}
        self.norm1, self.norm2 = (nn.RMSNorm(HIDDEN, **kind) for _ in range(2))
        head = HIDDEN // HEADS
        self.attention = tpkernels.nn.ParallelAttention(
            HIDDEN, HEADS, HEADS, head, group, **options
        )
        self.mlp = tpkernels.nn.ParallelMLP(HIDDEN, FFN, group, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, 1, HIDDEN]."""
        x = self.attention(self.norm1(x), residual=x)
        y: torch.Tensor = self.mlp(self.norm2(x), residual=x)
        return y


def _layer_job(device: str, replays: int) -> list[tuple[str, float]]:
    """(what, error relative to the block on one rank in float64), on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(place)
    group, alone = dist.new_group(), dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup) and isinstance(alone, dist.ProcessGroup)
    torch.manual_seed(7)
    whole = Block(alone, False, device=place, dtype=torch.float64)
    inputs = [torch.randn(SEQUENCE, 1, HIDDEN, dtype=torch.float64) for _ in range(replays + 1)]
    rows = slice(rank * SEQUENCE // world, (rank + 1) * SEQUENCE // world)
    results = []
    for split in (True, False):
        block = Block(group, split, device=place, dtype=torch.bfloat16)
        _copy_shards(whole, block, rank, world)
        mine = [(x[rows] if split else x).to(place, torch.bfloat16) for x in inputs]
        wanted = [whole(x.to(place))[rows if split else slice(None)] for x in inputs]
        with torch.no_grad():
            error = _error(block(mine[0]), wanted[0])
        kind = "rows split" if split else "rows on every rank"
        results.append((f"a block, {kind}", error))
        if device == "cuda" and replays:
            results.append((f"a block in a graph, {kind}", _replayed(block, mine, wanted)))
    synchronize(device)
    return results


def _copy_shards(whole: nn.Module, block: nn.Module, rank: int, world: int) -> None:
    """Gives a rank its part of the unsharded weights."""
    sources = dict(whole.named_parameters())
    for name, target in block.named_parameters():
        source = sources[name]
        dims = [i for i, size in enumerate(target.shape) if size != source.shape[i]]
        for dim in dims:
            source = source.chunk(world, dim)[rank]
        with torch.no_grad():
            target.copy_(source)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error relative to the largest value."""
    error: torch.Tensor = (got.double() - want).abs().max() / want.abs().max()
    return error.item()


def _replayed(block: Block, inputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest error of a captured layer, replayed with new input. Between two replays a call
    of many more rows makes the workspace grow, which the graph must outlive."""
    x = inputs[0].clone()
    with torch.no_grad():
        recorded, y = captured(lambda: block(x))
    worst = 0.0
    for i, (new, want) in enumerate(zip(inputs, wanted, strict=True)):
        x.copy_(new)
        recorded.replay()
        torch.cuda.synchronize()
        worst = max(worst, _error(y, want))
        if i == 0:
            with torch.no_grad():
                block(new.repeat(64, 1, 1))
    return worst


@stage()
def layer_check(setting: Setting) -> Iterator[Result]:
    """A transformer block of `tpkernels.nn` in bf16 compared with itself on one rank in float64:
    eager, and captured whole in a CUDA graph."""
    for world in nccl_worlds(setting)[0]:
        ranks = over_ranks(setting, world, _layer_job, 10, backend="nccl")
        for what, _ in ranks[0]:
            worst = max(dict(rank)[what] for rank in ranks)
            # bf16 has 8 bits; a dozen roundings follow each other.
            right = worst < 12 * 2**-8
            value = f"error {worst:.1e} of the largest value"
            yield Result(f"{what}, {world} ranks", value, right)


def _llama_job(device: str) -> tuple[float, bool]:
    """The error of a parallelized Llama's logits, and whether greedy tokens agree."""
    import transformers

    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, vocab_size=512, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    ids = torch.arange(24, device=device).view(2, 12)
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        logits, tokens = model(ids).logits, model.generate(ids, **greedy)
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
        tpkernels.parallelize(model, mesh["tp"])
        got, again = model(ids).logits, model.generate(ids, **greedy)
    synchronize(device)
    return _error(got, logits.double()), torch.equal(tokens, again)


@stage()
def model_check(setting: Setting) -> Iterator[Result]:
    """A Llama of transformers in fp32, parallelized: logits, and greedy tokens."""
    if importlib.util.find_spec("transformers") is None:
        yield Result("a Llama", "needs transformers", ok=None)
        return
    for world in nccl_worlds(setting)[0]:
        ranks = over_ranks(setting, world, _llama_job, backend="nccl")
        worst, same = max(error for error, _ in ranks), all(same for _, same in ranks)
        value = f"error {worst:.1e} of the largest logit, tokens {'equal' if same else 'differ'}"
        # TF32, if it is on, keeps 10 bits.
        yield Result(f"a Llama, {world} ranks", value, worst < 2e-3 and same)
