"""How a checkpoint is split over ranks, without any ranks; and files with each rank's shard.

A parameter that is not split is in the file of rank 0 alone, and tied weights are stored once, so
the files have together the size of the model. They are written next to their final place and moved
when all are complete, the index last: a folder that was left half-way has no index, and is not
loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpkernels.common import dtypes
from tpkernels.common.shards import shard_sizes
from tpkernels.nn.sharding import Box, Sharding, planned
from tpkernels.parallel import plans
from tpkernels.parallel.checkpoints import FORMAT, INDEX, SINGLE, open_checkpoint, package
from tpkernels.parallel.options import ModelOptions
from tpkernels.parallel.pretrained import Blueprint, Slot, draw

_COPIED = {".json", ".model", ".txt", ".jinja"}  # of a folder: tokenizer, generation config
_OLD = "model-*-of-*.safetensors"  # ours and those of transformers


@dataclass(frozen=True)
class ShardPlan:
    """How the parameters of the checkpoint at ``path`` are split over ``ranks`` ranks."""

    path: Path
    ranks: int
    blueprint: Blueprint

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return the parameters, tied ones once."""
        return self.blueprint.slots

    def shapes(self, slot: Slot) -> list[tuple[int, ...]]:
        """Return the shape of a parameter on each rank."""
        return [slot.local_shape(rank) for rank in range(self.ranks)]

    def nbytes(self, rank: int) -> int:
        """Count the bytes of the parameters that a rank holds."""
        return sum(
            prod(slot.local_shape(rank)) * slot.parameter.dtype.itemsize for slot in self.slots
        )

    def without(self) -> dict[int, list[str]]:
        """Name the parameters of which a rank has nothing, by the rank."""
        names = {
            rank: [slot.name for slot in self.slots if not prod(slot.local_shape(rank))]
            for rank in range(self.ranks)
        }
        return {rank: missing for rank, missing in names.items() if missing}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values; shapes and dims as in the checkpoint."""
        return {
            "model": str(self.path),
            "tp": self.ranks,
            "parameters": [
                {
                    "name": slot.name,
                    "dtype": dtypes.name(slot.parameter.dtype),
                    "shape": list(slot.shape),
                    "split_dim": None if slot.split is None else slot.split.dim,
                    "local_shapes": [list(shape) for shape in self.shapes(slot)],
                }
                for slot in self.slots
            ],
            "bytes": [self.nbytes(rank) for rank in range(self.ranks)],
        }


def plan_shards(
    path: str | os.PathLike[str],
    ranks: int,
    *,
    plan: Mapping[str, str] | None = None,
    ffn_only: bool = False,
    expert_parallel: bool = False,
    dtype: torch.dtype | None = None,
) -> ShardPlan:
    """Plan how `tpkernels.from_pretrained` splits a checkpoint, without weights or ranks. The
    arguments are its own, and so are the errors."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; pass at least 1")
    options = ModelOptions(
        plan=plan, sequence_parallel=False, ffn_only=ffn_only, expert_parallel=expert_parallel
    )

    def split(model: nn.Module) -> nn.Module:
        plans.apply(model, planned(ranks), options)
        return model

    blueprint = draw(open_checkpoint(path), dtype, split, any_architecture=plan is not None)
    return ShardPlan(Path(path), ranks, blueprint)


def write_shards(
    plan: ShardPlan,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda rank: None,
) -> list[Path]:
    """Write each rank's shard to a file in the folder ``out``, with an index, the configuration and
    the tokenizer's files, and return the files with weights. `tpkernels.from_pretrained` reads the
    folder on any number of ranks. Needs memory for one shard. ``progress`` gets each rank before
    its file is written.

    Raises:
        FileExistsError: there is a model in ``out``, and ``force`` is not set.
        ValueError: ``out`` is where the checkpoint is, or a file of that is truncated.
        OSError: writing failed.
    """
    folder = Path(out)
    package("safetensors.torch")
    if plan.path.is_dir() and folder.exists() and folder.samefile(plan.path):
        raise ValueError(
            f"{folder} is the folder of the checkpoint; choose a different output folder"
        )
    present = [name for name in (INDEX, SINGLE, "config.json") if (folder / name).exists()]
    if present and not force:
        raise FileExistsError(
            f"{folder} already contains {' and '.join(present)}; choose a different folder, or "
            "overwrite it with --force (force=True)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as temporary:
        partial = Path(temporary)
        _copy_other_files(plan, partial)
        files = _write_weights(plan, partial, progress)
        (folder / INDEX).unlink(missing_ok=True)
        for old in (folder / SINGLE, *folder.glob(_OLD)):
            old.unlink(missing_ok=True)
        for new in sorted(partial.iterdir(), key=lambda path: path.name == INDEX):
            os.replace(new, folder / new.name)
    return [folder / file for file in files]


def _copy_other_files(plan: ShardPlan, partial: Path) -> None:
    if plan.path.is_dir():
        for file in plan.path.iterdir():
            if file.is_file() and file.suffix in _COPIED and not file.name.endswith(".index.json"):
                shutil.copyfile(file, partial / file.name)
    else:
        tokenizers, path = package("transformers").AutoTokenizer, plan.path
        with contextlib.suppress(OSError, ValueError, KeyError, ImportError):  # it has none
            tokenizers.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(partial)
    plan.blueprint.model.config.save_pretrained(partial)  # with the dtype that is written


def _write_weights(plan: ShardPlan, partial: Path, progress: Callable[[int], None]) -> list[str]:
    """Write the shards and the index; return the names of the files with weights."""
    save_file = package("safetensors.torch").save_file
    model, buffers = plan.blueprint.model, plan.blueprint.buffers
    tensors = [(slot.name, slot.stored, slot.parameter.dtype, slot.split) for slot in plan.slots]
    tensors += [
        (name, stored, model.get_buffer(name).dtype, None) for name, stored in buffers.items()
    ]
    places: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in tensors}
    files, total = [], 0
    for rank in range(plan.ranks):
        progress(rank)
        file = f"model-rank-{rank:05}-of-{plan.ranks:05}.safetensors"
        shard: dict[str, torch.Tensor] = {}
        for name, stored, dtype, split in tensors:
            part = _share(stored.shape, split, rank)
            if part is not None:
                shard[name] = torch.empty(part.shape, dtype=dtype)
                stored.read(part, shard[name])
                places[name].append({"file": file, "offsets": list(part.offsets)})
        save_file(shard, partial / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in shard.values())
        files.append(file)
    index = {
        "metadata": {"format": FORMAT, "ranks": plan.ranks, "total_size": total},
        "weight_map": places,
        "shapes": {name: list(stored.shape) for name, stored, *_ in tensors},
    }
    (partial / INDEX).write_text(json.dumps(index, indent=1))
    return files


def _share(shape: tuple[int, ...], split: Sharding | None, rank: int) -> Box | None:
    """Return the part of a tensor that is in the file of a rank: what the rank holds if that is one
    range of its own, else a share of a balanced split. None if a split leaves the rank nothing, or
    if the tensor is not split and the rank not 0."""
    if split is None:
        return None if rank else Box.full(shape)
    if not split.in_order:
        sizes = shard_sizes(split.total, len(split.ranges))
        split = Sharding.packed(split.dim, [sizes])
    [part] = split.boxes(shape, rank)
    return part if part.size else None
