"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from tpkernels.launch.terminal import DTYPES, UsageError, number_in, read_input

Ranks = Annotated[
    int | None, Option("--nproc", "--tp", help="Number of ranks; default 2, or torchrun's.")
]
Tp = Annotated[int, Option("--tp", "--nproc", help="Number of ranks.")]
Dtype = Annotated[str, Option(help=" | ".join(DTYPES))]
Device = Annotated[str | None, Option(help="cpu | cuda; by default cuda if there is a GPU.")]
Threads = Annotated[int, Option(help="Threads per rank.")]
Sizes = Annotated[str, Option("--bytes", help="Size(s) of a collective's tensor, over all ranks.")]
Timeout = Annotated[int, Option(help="Abort a case that takes longer than this many seconds.")]
Checkpoint = Annotated[
    str, Option(help="Folder with config.json and *.safetensors, or a GGUF file.")
]
CheckpointDtype = Annotated[
    str | None, Option(help="fp32 | fp16 | bf16; by default the checkpoint's.")
]
Weights = Annotated[
    str | None,
    Option(help="int8: half of bf16's bytes, on CPUs; by default the parameters' dtype."),
]
FfnOnly = Annotated[bool, Option("--ffn-only", help="Split the feed-forward layers only.")]
ExpertParallel = Annotated[
    bool,
    Option("--expert-parallel", help="Split mixtures by whole experts, not by width."),
]
PlanFile = Annotated[
    Path | None,
    Option("--plan", help="JSON file with a style for each module; by default the model's plan."),
]
AsJson = Annotated[bool, Option("--json", help="One JSON object instead of tables.")]


def split(values: Iterable[str] | None) -> list[str]:
    """Return the parts of comma-separated values."""
    return [part.strip() for value in values or () for part in value.split(",")]


def numbers(name: str, values: Iterable[str] | None) -> list[int]:
    """Return the positive numbers of an option without repetitions. ``UsageError`` if one is
    not."""
    for part in (parts := split(values)):
        if not number_in(part):
            raise UsageError(f"--{name}: '{part}' is not a positive number")
    return list(dict.fromkeys(map(number_in, parts)))


def checked_weights(text: str | None, device: str) -> Literal["int8"] | None:
    """Return what --weights says for ranks on a type of ``device``. Raise UsageError if it is no
    dtype that they take."""
    if text is None:
        return None
    if text != "int8" or device != "cpu":
        raise UsageError(f"--weights is {text!r} on {device}; it can be int8, on cpu")
    return "int8"


_MOST_PLAN = 1 << 20  # bytes of its file


def plan_in(path: Path | None) -> dict[str, str] | None:
    """Return the plan in a file: styles by names of modules, which `tpkernels.parallelize` checks.
    Raise UsageError if the file has none."""
    if path is None:
        return None
    try:
        plan = json.loads(read_input(path, most=_MOST_PLAN))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' is not JSON: {error}") from error
    if not (plan and isinstance(plan, dict) and all(isinstance(s, str) for s in plan.values())):
        raise UsageError(
            f"'{path}' is not a plan: one object with a style for each module, such as "
            '{"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}'
        )
    return plan
