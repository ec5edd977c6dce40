"""``tpkernels shard``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from tpkernels.cli import options
from tpkernels.launch.terminal import (
    UsageError,
    byte_size,
    check_workers,
    console,
    parse_dtype,
    table,
)
from tpkernels.nn import MoE
from tpkernels.parallel.pretrained import Slot
from tpkernels.parallel.shard_files import ShardPlan, plan_shards, write_shards


def shard(
    model: options.Checkpoint,
    ranks: options.Tp = 2,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Show how the model is sharded, without writing files.")
    ] = False,
    out: Annotated[Path | None, Option(help="Folder for the files of the shards.")] = None,
    ffn_only: options.FfnOnly = False,
    expert_parallel: options.ExpertParallel = False,
    plan_file: options.PlanFile = None,
    dtype: options.CheckpointDtype = None,
    force: Annotated[
        bool, Option("--force", help="Overwrite a model that is already in the output folder.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show how a model is sharded over ranks, or write one file per rank.

    `tpkernels.from_pretrained` reads the files on any number of ranks. No ranks are started.
    """
    check_workers(tp=ranks)
    if not dry_run and out is None:
        raise UsageError("pass --out DIR to write the shards to, or --dry-run")
    torch_dtype = None if dtype is None else parse_dtype(dtype)
    styles = options.read_plan(plan_file)
    screen = console()
    try:
        plan = plan_shards(
            model,
            ranks,
            plan=styles,
            ffn_only=ffn_only,
            expert_parallel=expert_parallel,
            dtype=torch_dtype,
        )
        if as_json:
            typer.echo(json.dumps(plan.to_json(), indent=2))
        else:
            _show(plan, screen)
        if not dry_run and out is not None:
            with screen.status("writing the shards") as status:
                files = write_shards(
                    plan,
                    out,
                    force=force,
                    progress=lambda rank: status.update(f"writing the shard of rank {rank}"),
                )
            if not as_json:
                screen.print(f"Wrote {len(files)} shards to {out}", markup=False)
    except (OSError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise UsageError(str(error)) from error


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # layer number in a parameter name

_LEGEND = "Linear weights are shown as input x output features; checkpoints store the transpose."


def _show(plan: ShardPlan, out: Console) -> None:
    grid = table("parameter", ("full",), "on each rank")
    grid.add_column("sharded by")
    # Parameters with equal rows and names that differ only in numbers share a row.
    names_by_row: dict[tuple[str, ...], list[str]] = {}
    for slot in plan.slots:
        shapes = _by_rank([_size(slot, shape) for shape in plan.shapes(slot)])
        cells = _size(slot, slot.shape), shapes, _split(slot, plan.ranks)
        names_by_row.setdefault((_NUMBER.sub("*", slot.name), *cells), []).append(slot.name)
    for (_, *row), names in names_by_row.items():
        grid.add_row(escape(_merge_names(names)), *row)
    out.print(grid)
    out.print(_LEGEND, markup=False)
    sizes = [plan.nbytes(rank) for rank in range(plan.ranks)]
    for line in _by_rank([f"{size} bytes ({byte_size(size)})" for size in sizes]).split("; "):
        out.print(f"Parameters on each rank: {line}", markup=False)
    heads = plan.blueprint.model.config.num_attention_heads
    for rank, names in plan.empty_parameters().items():
        modules = sorted({name.split(".")[-2] for name in names})
        note = f"Rank {rank} holds no shard of {', '.join(modules)} and contributes zeros there."
        if modules != ["experts"]:
            note += f" Attention is sharded by heads, and this model has {heads} heads."
        if "experts" in modules:
            note += " With --expert-parallel, each expert is on one rank."
        out.print(note, markup=False)


def _merge_names(names: list[str]) -> str:
    """Merge names that differ only in numbers. Each number becomes the range from the first to the
    last name."""
    if len(names) == 1:
        return names[0]
    first, last = (_NUMBER.findall(name) for name in (names[0], names[-1]))
    spans = iter([a if a == b else f"{a}..{b}" for a, b in zip(first, last, strict=True)])
    return f"{_NUMBER.sub(lambda _: next(spans), names[0])} ({len(names)})"


def _size(slot: Slot, shape: Sequence[int]) -> str:
    return "x".join(map(str, reversed(shape) if slot.linear else shape))


def _split(slot: Slot, ranks: int) -> str:
    if slot.sharding is None or ranks == 1:
        return "replicated"
    if isinstance(slot.owners[0][0], MoE):
        features = "input features" if slot.name.endswith("down_proj") else "output features"
        return features if slot.sharding.dim else "experts"
    if not slot.linear:
        return "vocabulary" if len(slot.shape) == 2 else "output features"
    return "input features" if slot.sharding.dim else "output features"


def _by_rank(values: list[str]) -> str:
    """Join the values of the ranks, such as "2x4 on rank 0; 1x4 on ranks 1-3". If all values are
    equal, return the value."""
    if len(set(values)) == 1:
        return values[0]
    items = []
    for value, pairs in groupby(enumerate(values), key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in pairs]
        first, last = ranks[0], ranks[-1]
        items.append(f"{value} on {f'rank {first}' if first == last else f'ranks {first}-{last}'}")
    return "; ".join(items)
