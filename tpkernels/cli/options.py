"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from tpkernels.launch.terminal import DTYPES, UsageError, number_in, read_input

Ranks = Annotated[
    int | None,
    Option("--nproc", "--tp", help="Number of ranks. Default: 2, or WORLD_SIZE under torchrun."),
]
Tp = Annotated[int, Option("--tp", "--nproc", help="Number of ranks.")]
Dtype = Annotated[str, Option(help=f"Element type of the tensors: {' | '.join(DTYPES)}.")]
Device = Annotated[
    str | None, Option(help="Device: cpu | cuda. Default: cuda if a GPU is available.")
]
Threads = Annotated[int, Option(help="Threads per rank.")]
Sizes = Annotated[
    str, Option("--bytes", help="Tensor size of a collective, over all ranks, such as 64K or 32M.")
]
Timeout = Annotated[int, Option(help="Time limit of a case, in seconds.")]
Checkpoint = Annotated[
    str, Option(help="Model: folder with config.json and *.safetensors, or a GGUF file.")
]
CheckpointDtype = Annotated[
    str | None,
    Option(help="Parameter dtype: fp32 | fp16 | bf16. Default: the dtype of the checkpoint."),
]
Weights = Annotated[
    str | None,
    Option(help="Weight format: int8, on CPUs only. Default: the parameter dtype."),
]
FfnOnly = Annotated[bool, Option("--ffn-only", help="Shard only the feed-forward layers.")]
ExpertParallel = Annotated[
    bool,
    Option(
        "--expert-parallel",
        help="Expert parallelism: each rank holds some experts. Default: a shard of each expert.",
    ),
]
PlanFile = Annotated[
    Path | None,
    Option(
        "--plan", help="JSON file that maps module names to styles. Default: the plan of the model."
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")]


def split(values: Iterable[str] | None) -> list[str]:
    """Return the parts of comma-separated values."""
    return [part.strip() for value in values or () for part in value.split(",")]


def numbers(name: str, values: Iterable[str] | None) -> list[int]:
    """Return the positive numbers of an option without repetitions. ``UsageError`` if one is
    not."""
    for part in (parts := split(values)):
        if not number_in(part):
            raise UsageError(f"--{name}: '{part}' is not a positive integer")
    return list(dict.fromkeys(map(number_in, parts)))


def checked_weights(text: str | None, device: str) -> Literal["int8"] | None:
    """Return what --weights says for ranks on a type of ``device``. Raise UsageError if it is no
    dtype that they take."""
    if text is None:
        return None
    if text != "int8" or device != "cpu":
        raise UsageError(f"--weights is {text!r} on device {device}; expected int8 on device cpu")
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
            f"'{path}' is not a plan; expected an object that maps module names to styles, such as "
            '{"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}'
        )
    return plan
