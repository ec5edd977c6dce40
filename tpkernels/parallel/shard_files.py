"""Plan how a checkpoint is split over ranks, without starting ranks, and write one file per rank.

The file of rank 0 also holds the replicated parameters, and tied weights are stored once. All files
together are therefore as large as the model. They are written to a temporary folder inside the
output folder and moved when complete, the index last. After an interruption the folder contains no
index, so it cannot be loaded.
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
from tpkernels.nn.sharding import Box, Sharding, placeholder_group
from tpkernels.parallel import plans
from tpkernels.parallel.checkpoints import FORMAT, INDEX, SINGLE, import_package, open_checkpoint
from tpkernels.parallel.options import ModelOptions
from tpkernels.parallel.pretrained import Blueprint, Slot, make_blueprint

_COPIED = {".json", ".model", ".txt", ".jinja"}  # copied files: tokenizer, generation config
_OLD_FILES = "model-*-of-*.safetensors"  # weight files of tpkernels and of transformers


@dataclass(frozen=True)
class ShardPlan:
    """Split of the parameters of the checkpoint at ``path`` over ``ranks`` ranks."""

    path: Path
    ranks: int
    blueprint: Blueprint

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return the parameters; tied parameters appear once."""
        return self.blueprint.slots

    def shapes(self, slot: Slot) -> list[tuple[int, ...]]:
        """Return the shape of a parameter on each rank."""
        return [slot.local_shape(rank) for rank in range(self.ranks)]

    def nbytes(self, rank: int) -> int:
        """Return the size in bytes of the parameters on a rank."""
        return sum(
            prod(slot.local_shape(rank)) * slot.parameter.dtype.itemsize for slot in self.slots
        )

    def empty_parameters(self) -> dict[int, list[str]]:
        """Return the parameters with empty shards, by rank."""
        names = {
            rank: [slot.name for slot in self.slots if not prod(slot.local_shape(rank))]
            for rank in range(self.ranks)
        }
        return {rank: missing for rank, missing in names.items() if missing}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values. Shapes and dims are those of the checkpoint tensors."""
        return {
            "model": str(self.path),
            "tp": self.ranks,
            "parameters": [
                {
                    "name": slot.name,
                    "dtype": dtypes.name(slot.parameter.dtype),
                    "shape": list(slot.shape),
                    "split_dim": None if slot.sharding is None else slot.sharding.dim,
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
    """Plan how `tpkernels.from_pretrained` splits a checkpoint, without reading weights or starting
    ranks. Arguments and errors are described there."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; pass at least 1")
    options = ModelOptions(
        plan=plan, sequence_parallel=False, ffn_only=ffn_only, expert_parallel=expert_parallel
    )

    def split(model: nn.Module) -> nn.Module:
        plans.apply(model, placeholder_group(ranks), options)
        return model

    blueprint = make_blueprint(
        open_checkpoint(path), dtype, split, any_architecture=plan is not None
    )
    return ShardPlan(Path(path), ranks, blueprint)


def write_shards(
    plan: ShardPlan,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda rank: None,
) -> list[Path]:
    """Write the shard of each rank to a file in the folder ``out``, with an index, the
    configuration and the tokenizer files.

    `tpkernels.from_pretrained` reads the folder on any number of ranks. Needs memory for one shard.

    Args:
        progress: called with each rank before its file is written.

    Returns:
        The files with weights.

    Raises:
        FileExistsError: ``out`` contains a model, and ``force`` is not set.
        ValueError: ``out`` is the folder of the checkpoint, or a file of the checkpoint is
            truncated.
        OSError: writing failed.
    """
    folder = Path(out)
    import_package("safetensors.torch")
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
        staging = Path(temporary)
        _copy_metadata(plan, staging)
        files = _write_weights(plan, staging, progress)
        (folder / INDEX).unlink(missing_ok=True)
        for old in (folder / SINGLE, *folder.glob(_OLD_FILES)):
            old.unlink(missing_ok=True)
        for new in sorted(staging.iterdir(), key=lambda path: path.name == INDEX):
            os.replace(new, folder / new.name)
    return [folder / file for file in files]


def _copy_metadata(plan: ShardPlan, staging: Path) -> None:
    if plan.path.is_dir():
        for file in plan.path.iterdir():
            if file.is_file() and file.suffix in _COPIED and not file.name.endswith(".index.json"):
                shutil.copyfile(file, staging / file.name)
    else:
        tokenizers, path = import_package("transformers").AutoTokenizer, plan.path
        # The GGUF file may contain no tokenizer.
        with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
            tokenizers.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(staging)
    plan.blueprint.model.config.save_pretrained(staging)  # with the written dtype


def _write_weights(plan: ShardPlan, staging: Path, progress: Callable[[int], None]) -> list[str]:
    """Write the shards and the index. Returns the names of the files with weights."""
    save_file = import_package("safetensors.torch").save_file
    model, buffers = plan.blueprint.model, plan.blueprint.buffers
    tensors = [(slot.name, slot.stored, slot.parameter.dtype, slot.sharding) for slot in plan.slots]
    tensors += [
        (name, stored, model.get_buffer(name).dtype, None) for name, stored in buffers.items()
    ]
    weight_map: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in tensors}
    files, total = [], 0
    for rank in range(plan.ranks):
        progress(rank)
        file = f"model-rank-{rank:05}-of-{plan.ranks:05}.safetensors"
        shard: dict[str, torch.Tensor] = {}
        for name, stored, dtype, sharding in tensors:
            box = _file_box(stored.shape, sharding, rank)
            if box is not None:
                shard[name] = torch.empty(box.shape, dtype=dtype)
                stored.read(box, shard[name])
                weight_map[name].append({"file": file, "offsets": list(box.offsets)})
        save_file(shard, staging / file, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in shard.values())
        files.append(file)
    index = {
        "metadata": {"format": FORMAT, "ranks": plan.ranks, "total_size": total},
        "weight_map": weight_map,
        "shapes": {name: list(stored.shape) for name, stored, *_ in tensors},
    }
    (staging / INDEX).write_text(json.dumps(index, indent=1))
    return files


def _file_box(shape: tuple[int, ...], sharding: Sharding | None, rank: int) -> Box | None:
    """Return the box of a tensor in the file of a rank, or None if the file does not contain it.

    Replicated tensors are in the file of rank 0. If the ranks' shards are consecutive ranges, a
    file holds the shard of its rank, otherwise a balanced slice.
    """
    if sharding is None:
        return None if rank else Box.full(shape)
    if not sharding.in_order:
        sizes = shard_sizes(sharding.total, len(sharding.ranges))
        sharding = Sharding.packed(sharding.dim, [sizes])
    [box] = sharding.boxes(shape, rank)
    return box if box.size else None
