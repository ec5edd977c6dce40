"""Options shared by several commands."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from tpkernels.launch.terminal import DTYPES, UsageError, parse_positive, read_input

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
Invariant = Annotated[
    bool,
    Option(
        "--invariant",
        help="Make the logits of a token independent of the number of ranks, the batch and the "
        "chunks of the prompt, to the bit; on CPUs only.",
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
    """Split comma-separated values."""
    return [item.strip() for value in values or () for item in value.split(",")]


def numbers(name: str, values: Iterable[str] | None) -> list[int]:
    """Return the distinct positive numbers of an option. ``UsageError`` for other values."""
    for item in (items := split(values)):
        if not parse_positive(item):
            raise UsageError(f"--{name}: '{item}' is not a positive integer")
    return list(dict.fromkeys(map(parse_positive, items)))


def checked_weights(weights: str | None, device: str) -> Literal["int8"] | None:
    """Return the weight dtype of --weights. ``UsageError`` if ``device`` does not support it."""
    if weights is None:
        return None
    if weights != "int8" or device != "cpu":
        raise UsageError(
            f"--weights is {weights!r} on device {device}; expected int8 on device cpu"
        )
    return "int8"


_MAX_PLAN_BYTES = 1 << 20  # maximum bytes of a plan file


def read_plan(path: Path | None) -> dict[str, str] | None:
    """Return the plan in a JSON file, a mapping from module names to styles. ``UsageError`` if the
    file does not contain a mapping. `tpkernels.parallelize` checks the styles."""
    if path is None:
        return None
    try:
        plan = json.loads(read_input(path, max_bytes=_MAX_PLAN_BYTES))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' is not JSON: {error}") from error
    if not (plan and isinstance(plan, dict) and all(isinstance(s, str) for s in plan.values())):
        raise UsageError(
            f"'{path}' is not a plan; expected an object that maps module names to styles, such as "
            '{"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}'
        )
    return plan
