"""What a run measures: options and a file become cases, all of them checked before any rank starts.

Options mean the same on the command line and in a YAML file, where a list may stand for values with
commas between them; those of the command line count.
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

from tpkernels.backends import OPS
from tpkernels.bench.cases import MATMUL_OPS, Spec
from tpkernels.bench.models import LAYER, MODELS, PROJECTIONS, projection
from tpkernels.bench.options import (
    UsageError,
    algorithms_named,
    at_least,
    check_workers,
    dtype_named,
    number_in,
    ops_named,
    read_input,
)
from tpkernels.bench.specs import check_algorithm, check_split, specs_of
from tpkernels.text import shown

ROWS = ("16", "256", "2048")  # of a model, where --m says nothing
SHAPES = ("16,2048,2048", "1024,2048,2048")
BYTES = ("64K", "1M", "32M")
_LAYER_OPS = ["all_gather_matmul", "matmul_reduce_scatter"]
QUICK_REPEAT, QUICK_SECONDS = 10, 2.0
REPEAT = 20
_MOST_BYTES = 1 << 20  # of a YAML file
_IN_WORDS = {  # the types of settings
    "tuple[str, ...]": "list of values",
    "int | None": "whole number",
    "float | None": "number",
    "bool | None": "true or false",
}


@dataclass(frozen=True)
class Settings:
    """The options of a sweep by their names; empty and None: not given."""

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
        """These settings, and those of a file where nothing is said here."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        merged = {}
        for name, value in file.items():
            if name not in fields:
                raise UsageError(
                    f"'{path}': unknown key {shown(name)}; there are {', '.join(fields)}"
                )
            kind = str(fields[name].type)
            found = _converted(value, kind)
            if found is None:
                raise UsageError(f"'{path}': {name}: {shown(value)} is no {_IN_WORDS[kind]}")
            if getattr(self, name) in ((), None):
                merged[name] = found
        return dataclasses.replace(self, **merged)


def _converted(value: object, kind: str) -> Any:
    """A value of a YAML file as a field of that type has it; None if it cannot be."""
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
    """A whole number, and no larger than Python writes out."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


class _Loader(yaml.SafeLoader):
    """Without aliases, of which a few lines can stand for more than fits into memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    content = read_input(path, most=_MOST_BYTES)
    try:
        found = yaml.load(content, _Loader)
    except Exception as error:  # of any class where the text for a tag, or the nesting, is odd
        text = " ".join(str(error).split())
        raise UsageError(f"'{path}' is no YAML: {text}") from error
    if not isinstance(found, dict):
        raise UsageError(f"'{path}' holds no mapping of options to values, as in 'tp: [2, 4]'")
    return found


@dataclass(frozen=True)
class Effort:
    """How a case is measured.

    ``repeat`` repetitions of all variants by turns, fewer (three at the least) once they have taken
    ``seconds``; baselines by torch.matmul that would take longer than these seconds for three
    are left out. ``cold``: inputs are not in the cache, if memory allows. ``baselines``: there are
    some that use torch.matmul.
    """

    repeat: int
    seconds: float | None
    cold: bool
    baselines: bool


@dataclass(frozen=True)
class Item:
    """A case: an op on global data over ``world`` ranks, and which models have it."""

    spec: Spec
    world: int
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """All that a run measures."""

    items: tuple[Item, ...]
    algorithms: tuple[str, ...]
    effort: Effort
    threads: int
    device: str

    def facts(self) -> dict[str, Any]:
        """What two runs must share to be one, as JSON has it; the cases aside."""
        return {
            "algorithms": list(self.algorithms),
            "threads": self.threads,
            "device": self.device,
            **dataclasses.asdict(self.effort),
        }


def plan_sweep(given: Settings, *, ranks: int | None, device: str) -> Sweep:
    """The cases and how to measure them.

    Args:
        ranks: that a launcher has started; None: as many as are asked for are started.

    Raises:
        UsageError: something of it cannot be measured.
    """
    effort = _effort(given)
    threads = 1 if given.threads is None else given.threads
    at_least(1, repeat=effort.repeat)
    check_workers(threads=threads)
    if effort.seconds is not None and not 0 < effort.seconds < math.inf:
        raise UsageError(f"--seconds is {effort.seconds:g}; it must be more than 0, and finite")
    types = [dtype_named(name) for name in _split(given.dtype) or ["bf16"]]
    algorithms = algorithms_named(_split(given.algorithm) or ["auto"])
    found: dict[tuple[Spec, int], Item] = {}
    for world in _worlds(given, ranks):
        for dtype in dict.fromkeys(types):
            for item in _items(given, world, dtype):
                same = found.setdefault((item.spec, world), item)
                labels = tuple(dict.fromkeys((*same.labels, *item.labels)))
                found[item.spec, world] = dataclasses.replace(item, labels=labels)
    for item in found.values():
        _check(item, algorithms, device, uneven=bool(given.uneven))
    return Sweep(tuple(found.values()), tuple(algorithms), effort, threads, device)


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
            raise UsageError(f"--{name}: '{part}' is not a number of 1 or more")
    return list(dict.fromkeys(map(number_in, parts)))


def _worlds(given: Settings, ranks: int | None) -> list[int]:
    worlds = _numbers("tp", given.tp) or [2 if ranks is None else ranks]
    for world in worlds:
        check_workers(tp=world)
        if ranks is not None and world != ranks:
            raise UsageError(
                f"--tp is {world} but torchrun started {ranks} ranks (WORLD_SIZE); leave it out"
            )
    return worlds


def _named(what: str, names: Sequence[str], known: Sequence[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} '{name}'; there are {', '.join(known)}")
    return list(dict.fromkeys(names))


def _items(given: Settings, world: int, dtype: torch.dtype) -> Iterator[Item]:
    models = _named("model", _split(given.model), tuple(MODELS))
    rows = _numbers("m", given.m)
    if not models and (rows or given.projection):
        option = "m" if rows else "projection"
        raise UsageError(f"--{option} goes with --model; a --shape is M,N,K")
    shapes = given.shape or (() if models else SHAPES)
    ops = ops_named(_split(given.op) or (_LAYER_OPS if models else list(OPS)))
    names = _named("projection", _split(given.projection) or LAYER, PROJECTIONS)
    for model in models:
        for name in names:
            product = projection(MODELS[model], name, world)
            for m in rows or map(int, ROWS):
                spec_shape = (m, product.n, product.k)
                for op in ops:
                    if op in MATMUL_OPS and (op == "all_gather_matmul") == product.column:
                        yield Item(Spec(op, spec_shape, dtype), world, (f"{model} {name}",))
    for op in ops:
        for spec in specs_of(op, shapes, ",".join(given.bytes or BYTES), dtype):
            yield Item(spec, world)


def _check(item: Item, algorithms: list[str], device: str, *, uneven: bool) -> None:
    """A case that the ranks could not run."""
    spec, world = item.spec, item.world
    check_split(spec, world, label=" ".join(item.labels[:1]), uneven=uneven)
    for name in algorithms:
        check_algorithm(spec, world, name, device)
