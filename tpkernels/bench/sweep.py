"""The cases that `tpkernels bench` measures, from options and a YAML file, checked before any rank
starts.

Options mean the same on the command line, which takes precedence, and in a YAML file, where a list
may replace comma-separated values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import yaml

from tpkernels import dtypes
from tpkernels.bench.specs import (
    Spec,
    algorithms_named,
    check_algorithm,
    check_split,
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
from tpkernels.text import counted, printable, shown

PROJECTIONS = ("qkv", "out", "gate_up", "down", "lm_head")
LAYER = PROJECTIONS[:4]  # those of a layer; a model has one lm_head
ROWS = ("16", "256", "2048")  # of a model, without --m
SHAPES = ("16,2048,2048", "1024,2048,2048")
BYTES = ("64K", "1M", "32M")
REPEAT, QUICK_REPEAT, QUICK_SECONDS = 20, 10, 2.0
_LAYER_OPS = ["all_gather_matmul", "matmul_reduce_scatter"]
_MOST_BYTES = 1 << 20  # of a YAML file


@dataclass(frozen=True)
class Model:
    """Widths of a transformer, before the split. ``ffn`` is the inner width of the MLP, or of each
    of ``experts``, of which a token takes ``top_k``; a ``gated`` MLP has two matrices of that
    width, gate and up."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 128
    gated: bool = True
    experts: int = 0
    top_k: int = 0


# From the models' configuration files.
MODELS = {
    "gemma2-9b": Model(3584, 14336, heads=16, kv_heads=8, vocab=256000, head_dim=256),
    "gemma2-27b": Model(4608, 36864, heads=32, kv_heads=16, vocab=256000),
    "gpt3-175b": Model(12288, 49152, heads=96, kv_heads=96, vocab=50257, gated=False),
    "llama2-7b": Model(4096, 11008, heads=32, kv_heads=32, vocab=32000),
    "llama3-8b": Model(4096, 14336, heads=32, kv_heads=8, vocab=128256),
    "llama3-70b": Model(8192, 28672, heads=64, kv_heads=8, vocab=128256),
    "llama3-405b": Model(16384, 53248, heads=128, kv_heads=8, vocab=128256),
    "mixtral-8x7b": Model(4096, 14336, heads=32, kv_heads=8, vocab=32000, experts=8, top_k=2),
    "qwen2-72b": Model(8192, 29568, heads=64, kv_heads=8, vocab=152064),
    "qwen3-30b-a3b": Model(2048, 768, heads=32, kv_heads=4, vocab=151936, experts=128, top_k=8),
    "qwen3-32b": Model(5120, 25600, heads=64, kv_heads=8, vocab=151936),
    "smollm2-135m": Model(576, 1536, heads=9, kv_heads=3, vocab=49152, head_dim=64),
}


@dataclass(frozen=True)
class Projection:
    """A matmul over all ranks: x [M, K] by a weight [K, N], column-parallel or row-parallel."""

    column: bool
    n: int
    k: int


def projection(model: Model, name: str, world: int) -> Projection:
    """Return one of `PROJECTIONS`. Q, K and V form one weight, and so do gate and up. If there are
    more ranks than KV heads, each rank holds a copy of one, so N depends on ``world``."""
    if name not in PROJECTIONS:
        raise ValueError(f"unknown projection '{name}'; choose from {', '.join(PROJECTIONS)}")
    hidden, queries = model.hidden, model.heads * model.head_dim
    pairs = max(model.kv_heads, world) * model.head_dim
    return {
        "qkv": Projection(True, queries + 2 * pairs, hidden),
        "out": Projection(False, hidden, queries),
        "gate_up": Projection(True, model.ffn * (2 if model.gated else 1), hidden),
        "down": Projection(False, hidden, model.ffn),
        "lm_head": Projection(True, model.vocab, hidden),
    }[name]


Many: TypeAlias = Sequence[str] | None


@dataclass(frozen=True)
class Settings:
    """The options of a sweep by name; None: not given."""

    op: Many = None
    model: Many = None
    projection: Many = None
    m: Many = None
    shape: Many = None
    bytes: Many = None
    tp: Many = None
    dtype: Many = None
    algorithm: Many = None
    repeat: int | None = None
    seconds: float | None = None
    threads: int | None = None
    quick: bool | None = None
    warm: bool | None = None
    uneven: bool | None = None
    baselines: bool | None = None


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them can expand beyond memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)


def read_file(path: Path) -> dict[str, list[str]]:
    """Read `Settings` by name from a YAML file, as text that stands for them on a command line: a
    list has an item for each time that its option is given, and an inner list is joined by
    commas."""
    content = read_input(path, most=_MOST_BYTES)
    known = [field.name for field in dataclasses.fields(Settings)]
    try:
        options = yaml.load(content, _Loader)
    except Exception as error:  # malformed tags and deep nesting raise errors of any class
        text = " ".join(str(error).split())
        raise UsageError(f"'{path}' is not YAML: {text}") from error
    if not isinstance(options, dict):
        raise UsageError(f"'{path}' has no mapping from options to values, such as 'tp: [2, 4]'")
    texts = {}
    for name, value in options.items():
        if name not in known:
            raise UsageError(f"'{path}': unknown key {shown(name)}; choose from {', '.join(known)}")
        items = [
            item if isinstance(item, list) else [item]
            for item in (value if isinstance(value, list) else [value])
        ]
        try:
            if not all(isinstance(part, (str, int, float)) for item in items for part in item):
                raise ValueError(value)
            texts[name] = [",".join(printable(str(part)) for part in item) for item in items]
        except ValueError as error:  # also an integer with more digits than Python converts
            raise UsageError(f"'{path}': {name}: {shown(value)} is no value of it") from error
    return texts


@dataclass(frozen=True, kw_only=True)
class Method:
    """How all cases are measured.

    Attributes:
        repeat: interleaved repetitions of all variants.
        seconds: after which no further repetition starts, once there are three. Baselines that
            use torch.matmul and need longer for three repetitions are left out.
        cold: inputs are not in the cache, memory permitting.
        baselines: whether to run baselines that use torch.matmul.
    """

    algorithms: list[str]
    threads: int = 1
    device: str = "cpu"
    repeat: int = REPEAT
    seconds: float | None = None
    cold: bool = True
    baselines: bool = True


@dataclass(frozen=True)
class Item:
    """A case: a spec on ``world`` ranks, and the models that contain it as labels."""

    spec: Spec
    world: int
    labels: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the name of the case, the same in every run."""
        size = "x".join(map(str, self.spec.shape))
        return f"{self.spec.op} {size} {dtypes.name(self.spec.dtype)} tp{self.world}"


@dataclass(frozen=True)
class Sweep:
    """Everything that a run measures, and how."""

    items: tuple[Item, ...]
    method: Method


def plan_sweep(settings: Settings, *, ranks: int | None, device: str) -> Sweep:
    """Return the sweep for the given options.

    Args:
        ranks: the number of ranks that a launcher started; None without a launcher.

    Raises:
        UsageError: some of it cannot be measured.
    """
    repeat, seconds = settings.repeat, settings.seconds
    if settings.quick:
        repeat = QUICK_REPEAT if repeat is None else repeat
        seconds = QUICK_SECONDS if seconds is None else seconds
    method = Method(
        algorithms=algorithms_named(_split(settings.algorithm) or ["auto"]),
        threads=1 if settings.threads is None else settings.threads,
        device=device,
        repeat=REPEAT if repeat is None else repeat,
        seconds=seconds,
        cold=not settings.warm,
        baselines=settings.baselines is not False,
    )
    at_least(1, repeat=method.repeat)
    check_workers(threads=method.threads)
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--seconds is {seconds:g}; it must be positive and finite")
    types = dict.fromkeys(dtype_named(name) for name in _split(settings.dtype) or ["bf16"])
    worlds = _numbers("tp", settings.tp) or [2 if ranks is None else ranks]
    for world in worlds:
        check_workers(tp=world)
        if ranks is not None and world != ranks:
            raise UsageError(
                f"--tp is {world} but torchrun started {counted(ranks, 'rank')} (WORLD_SIZE); "
                "leave --tp out"
            )
    items: dict[tuple[Spec, int], Item] = {}
    for world in worlds:
        for dtype in types:
            for item in _items(settings, world, dtype):
                same = items.setdefault((item.spec, world), item)
                labels = tuple(dict.fromkeys((*same.labels, *item.labels)))
                items[item.spec, world] = dataclasses.replace(item, labels=labels)
    for item in items.values():
        label = " ".join(item.labels[:1])
        check_split(item.spec, item.world, label=label, uneven=bool(settings.uneven))
        for name in method.algorithms:
            check_algorithm(item.spec, item.world, name, device)
    return Sweep(tuple(items.values()), method)


def _split(values: Many) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",")]


def _numbers(name: str, values: Many) -> list[int]:
    """Parse positive integers, without repetitions."""
    parts = _split(values)
    for part in parts:
        if not number_in(part):
            raise UsageError(f"--{name}: '{part}' is not a positive number")
    return list(dict.fromkeys(map(number_in, parts)))


def _items(settings: Settings, world: int, dtype: torch.dtype) -> Iterator[Item]:
    models = check_known("model", _split(settings.model), MODELS)
    rows = _numbers("m", settings.m)
    if not models and (rows or settings.projection):
        option = "m" if rows else "projection"
        raise UsageError(f"--{option} needs --model; a --shape already contains M")
    shapes = settings.shape or (() if models else SHAPES)
    ops = check_known("op", _split(settings.op) or (_LAYER_OPS if models else OPS), OPS)
    names = check_known("projection", _split(settings.projection) or LAYER, PROJECTIONS)
    for model in models:
        for name in names:
            matmul = projection(MODELS[model], name, world)
            for m in rows or map(int, ROWS):
                spec_shape = (m, matmul.n, matmul.k)
                for op in ops:
                    if OPS[op].has_matmul and OPS[op].gathers == matmul.column:
                        yield Item(Spec(op, spec_shape, dtype), world, (f"{model} {name}",))
    for op in ops:
        for spec in specs_of(op, shapes, ",".join(settings.bytes or BYTES), dtype):
            yield Item(spec, world)
