"""The cases that `tpkernels bench` measures, from options and a YAML file, checked before any rank
starts.

Options mean the same on the command line, which takes precedence, and in a YAML file, where a list
may replace comma-separated values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
import yaml

from tpkernels.bench.models import LAYER, MODELS, PROJECTIONS, projection
from tpkernels.bench.specs import (
    Spec,
    algorithms_named,
    check_algorithm,
    check_split,
    ops_named,
    specs_of,
)
from tpkernels.op_spec import OPS
from tpkernels.terminal import (
    UsageError,
    at_least,
    check_known,
    check_workers,
    dtype_named,
    number_in,
    read_input,
)
from tpkernels.text import shown

ROWS = ("16", "256", "2048")  # of a model, without --m
SHAPES = ("16,2048,2048", "1024,2048,2048")
BYTES = ("64K", "1M", "32M")
_LAYER_OPS = ["all_gather_matmul", "matmul_reduce_scatter"]
QUICK_REPEAT, QUICK_SECONDS = 10, 2.0
REPEAT = 20
_MOST_BYTES = 1 << 20  # of a YAML file
_KINDS = {  # names for the types of settings
    "tuple[str, ...]": "a list of values",
    "int | None": "a whole number",
    "float | None": "a number",
    "bool | None": "true or false",
}


@dataclass(frozen=True)
class Settings:
    """The options of a sweep by name; empty or None: not given."""

    op: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    projection: tuple[str, ...] = ()
    m: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()
    bytes: tuple[str, ...] = ()
    tp: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    algorithm: tuple[str, ...] = ()
    repeat: int | None = None
    seconds: float | None = None
    threads: int | None = None
    quick: bool | None = None
    warm: bool | None = None
    uneven: bool | None = None
    baselines: bool | None = None

    def over(self, file: Mapping[str, Any], path: Path) -> Settings:
        """These settings, completed by those of a file."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        merged = {}
        for name, value in file.items():
            if name not in fields:
                raise UsageError(
                    f"'{path}': unknown key {shown(name)}; choose from {', '.join(fields)}"
                )
            kind = str(fields[name].type)
            converted = _converted(value, kind)
            if converted is None:
                raise UsageError(f"'{path}': {name}: {shown(value)} is not {_KINDS[kind]}")
            if getattr(self, name) in ((), None):
                merged[name] = converted
        return dataclasses.replace(self, **merged)


def _converted(value: object, kind: str) -> Any:
    """A value of a YAML file, converted to the type of a field; None if that is impossible."""
    if kind.startswith("tuple"):
        lists = [one if isinstance(one, list) else [one] for one in _list(value)]
        plain = all(_is_number(one) or isinstance(one, str) for each in lists for one in each)
        return tuple(",".join(map(str, each)) for each in lists) if plain else None
    if kind.startswith("bool"):
        return value if isinstance(value, bool) else None
    if isinstance(value, float):
        return value if kind.startswith("float") else None
    if not _is_number(value):
        return None
    return value if kind.startswith("int") else float(value)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_number(value: object) -> TypeGuard[int]:
    """A whole number that Python can print."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them can expand beyond memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    content = read_input(path, most=_MOST_BYTES)
    try:
        options = yaml.load(content, _Loader)
    except Exception as error:  # malformed tags and deep nesting raise errors of any class
        text = " ".join(str(error).split())
        raise UsageError(f"'{path}' is not YAML: {text}") from error
    if not isinstance(options, dict):
        raise UsageError(f"'{path}' has no mapping from options to values, such as 'tp: [2, 4]'")
    return options


@dataclass(frozen=True)
class Effort:
    """How a case is measured.

    Attributes:
        repeat: interleaved repetitions of all variants.
        seconds: after which no further repetition starts, once there are three. Baselines that
            use torch.matmul and need longer for three repetitions are left out.
        cold: inputs are not in the cache, memory permitting.
        baselines: whether to run baselines that use torch.matmul.
    """

    repeat: int
    seconds: float | None
    cold: bool
    baselines: bool


@dataclass(frozen=True)
class Item:
    """A case: a spec on ``world`` ranks, and the models that contain it as labels."""

    spec: Spec
    world: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """Everything that a run measures, and how."""

    items: tuple[Item, ...]
    algorithms: tuple[str, ...]
    effort: Effort
    threads: int
    device: str

    def facts(self) -> dict[str, Any]:
        """What two runs must have in common, besides the cases, to share a file; JSON values."""
        return {
            "algorithms": list(self.algorithms),
            "threads": self.threads,
            "device": self.device,
            **dataclasses.asdict(self.effort),
        }


def plan_sweep(given: Settings, *, ranks: int | None, device: str) -> Sweep:
    """The sweep for the given options.

    Args:
        ranks: the number of ranks that a launcher started; None without a launcher.

    Raises:
        UsageError: some of it cannot be measured.
    """
    effort = _effort(given)
    threads = 1 if given.threads is None else given.threads
    at_least(1, repeat=effort.repeat)
    check_workers(threads=threads)
    if effort.seconds is not None and not 0 < effort.seconds < math.inf:
        raise UsageError(f"--seconds is {effort.seconds:g}; it must be positive and finite")
    types = [dtype_named(name) for name in _split(given.dtype) or ["bf16"]]
    algorithms = algorithms_named(_split(given.algorithm) or ["auto"])
    items: dict[tuple[Spec, int], Item] = {}
    for world in _worlds(given, ranks):
        for dtype in dict.fromkeys(types):
            for item in _items(given, world, dtype):
                same = items.setdefault((item.spec, world), item)
                labels = tuple(dict.fromkeys((*same.labels, *item.labels)))
                items[item.spec, world] = dataclasses.replace(item, labels=labels)
    for item in items.values():
        _check(item, algorithms, device, uneven=bool(given.uneven))
    return Sweep(tuple(items.values()), tuple(algorithms), effort, threads, device)


def _effort(given: Settings) -> Effort:
    repeat, seconds = given.repeat, given.seconds
    if given.quick:
        repeat = QUICK_REPEAT if repeat is None else repeat
        seconds = QUICK_SECONDS if seconds is None else seconds
    return Effort(
        repeat=REPEAT if repeat is None else repeat,
        seconds=seconds,
        cold=not given.warm,
        baselines=given.baselines is not False,
    )


def _split(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",")]


def _numbers(name: str, values: Sequence[str]) -> list[int]:
    """Positive integers, without repetitions."""
    parts = _split(values)
    for part in parts:
        if not number_in(part):
            raise UsageError(f"--{name}: '{part}' is not a positive number")
    return list(dict.fromkeys(map(number_in, parts)))


def _worlds(given: Settings, ranks: int | None) -> list[int]:
    worlds = _numbers("tp", given.tp) or [2 if ranks is None else ranks]
    for world in worlds:
        check_workers(tp=world)
        if ranks is not None and world != ranks:
            raise UsageError(
                f"--tp is {world} but torchrun started {ranks} ranks (WORLD_SIZE); leave --tp out"
            )
    return worlds


def _items(given: Settings, world: int, dtype: torch.dtype) -> Iterator[Item]:
    models = check_known("model", _split(given.model), MODELS)
    rows = _numbers("m", given.m)
    if not models and (rows or given.projection):
        option = "m" if rows else "projection"
        raise UsageError(f"--{option} needs --model; a --shape already contains M")
    shapes = given.shape or (() if models else SHAPES)
    ops = ops_named(_split(given.op) or (_LAYER_OPS if models else list(OPS)))
    names = check_known("projection", _split(given.projection) or LAYER, PROJECTIONS)
    for model in models:
        for name in names:
            matmul = projection(MODELS[model], name, world)
            for m in rows or map(int, ROWS):
                spec_shape = (m, matmul.n, matmul.k)
                for op in ops:
                    if OPS[op].has_matmul and OPS[op].gathers == matmul.column:
                        yield Item(Spec(op, spec_shape, dtype), world, (f"{model} {name}",))
    for op in ops:
        for spec in specs_of(op, shapes, ",".join(given.bytes or BYTES), dtype):
            yield Item(spec, world)


def _check(item: Item, algorithms: list[str], device: str, *, uneven: bool) -> None:
    """``UsageError`` if the ranks cannot run a case."""
    spec, world = item.spec, item.world
    check_split(spec, world, label=" ".join(item.labels[:1]), uneven=uneven)
    for name in algorithms:
        check_algorithm(spec, world, name, device)
