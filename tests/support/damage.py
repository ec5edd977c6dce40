"""A report of `tpkernels bench` made without a run, and ways to damage a file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from typer.testing import CliRunner, Result

from tpkernels.bench.measuring import CaseReport, Choice
from tpkernels.bench.results import Report, new_report, result
from tpkernels.bench.roofline import Rates
from tpkernels.bench.sweep import Settings, plan_sweep
from tpkernels.bench.verification import Verdict
from tpkernels.cli import app
from tpkernels.timing import Samples

RATES = Rates(flops=1e10, torch_flops=1e10, copy_bytes=1e10, copy_over_cache=8.0)
SWEEP = {
    "op": ("all_gather_matmul", "all_reduce"),
    "shape": ("8,16,32",),
    "bytes": ("4K",),
    "algorithm": ("auto", "direct"),
    "repeat": 6,
    "tp": ("2",),
}
ESCAPES = "[bold]x[/no]\x1b[2J\x07\x9b\u202e\ud800\n$\\nope$"
_BAD_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e400", "1e300", "9" * 400, "9" * 5000)
_VALUES = (None, True, -1, 0, 1.5, 2**63, "", "text", [], {}, [1, "2"], {"a": []}, "x" * 5000)

_MAYBE = (("environment",), ("algorithms",))  # may lack entries, as those above may

Node = tuple[Any, ...]  # the path to a node: keys and indices


def invoke(*args: str) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(app, list(args))


def options() -> list[str]:
    """The sweep of `good_report` on the command line."""
    arguments = []
    for name, values in SWEEP.items():
        for value in values if isinstance(values, tuple) else (values,):
            arguments += [f"--{name}", str(value)]
    return arguments


def good_report(given: Mapping[str, Any] = SWEEP) -> Report:
    """A report such as a run of this sweep on this machine might write."""
    sweep = plan_sweep(Settings(**given), ranks=None, device="cpu")
    algorithms = given.get("algorithm", ("auto",))
    report = new_report(sweep)
    for item in sweep.items:
        samples = {
            name: Samples(tuple(1e-3 * (1 + i + j / 50) for j in range(6)), calls=2, warmup=1)
            for i, name in enumerate(
                ("auto", "direct", "unfused", "torch", "matmul", "local_matmul")
            )
            if "matmul" in (item.spec.op if "matmul" in name else "matmul")
            and name in (*algorithms, "unfused", "torch", "matmul", "local_matmul")
        }
        choices = {
            name: Choice(name.replace("auto", "direct"), "4 rows a rank", Verdict(0.5, 0.5, 1.0))
            for name in (*algorithms, "unfused")
        }
        left_out = {"nccl": "no GPU: pip install 'tpkernels[cu13]'"}
        case_report = CaseReport(choices, samples, left_out, inputs_over_cache=2.5)
        report["results"].append(result(item, RATES, [case_report] * 2))
    return {**report, "complete": True}


def nodes(tree: Any, path: Node = ()) -> Iterator[tuple[Node, Any]]:
    """All nodes of a tree except its root."""
    if path:
        yield path, tree
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from nodes(value, (*path, key))


def parent_of(tree: Any, path: Node) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def changed(tree: Any, path: Node, value: Any) -> Any:
    tree = copy.deepcopy(tree)
    parent_of(tree, path)[path[-1]] = value
    return tree


def without(tree: Any, path: Node) -> Any:
    tree = copy.deepcopy(tree)
    del parent_of(tree, path)[path[-1]]
    return tree


def _renamed(tree: Any, path: Node, name: str) -> Any:
    tree = copy.deepcopy(tree)
    parent = parent_of(tree, path)
    if isinstance(parent, dict):
        parent[name] = parent.pop(path[-1])
    else:
        parent.append(parent[path[-1]])
    return tree


def _deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def unusable(tree: Any, pick: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damage that makes a file unusable, several of each kind: (what was done, the content)."""
    text = json.dumps(tree)
    for path, _ in _some(tree, pick, 40):
        yield f"an object at {path}", json.dumps(changed(tree, path, {"damaged": True})).encode()
    for path, _ in _some(tree, pick, 20, lambda path, _: isinstance(path[-1], str)):
        if path[-2:-1] not in (("speedup",), ("times",), ("left_out",), *_MAYBE):
            yield f"nothing at {path}", json.dumps(without(tree, path)).encode()
    for path, _ in _some(tree, pick, 16, lambda _, v: isinstance(v, (int, float)) and v > 1):
        number = pick.choice(_BAD_NUMBERS)
        marked = json.dumps(changed(tree, path, "MARK"))
        yield f"{number[:9]} at {path}", marked.replace('"MARK"', number).encode()
    for _ in range(5):
        yield "cut off", text[: pick.randrange(len(text))].encode()
    for levels in (300, 900, 2000, 100_000):
        path, _ = pick.choice(list(nodes(tree)))
        deep = "[" * levels + "]" * levels
        marked = json.dumps(changed(tree, path, "MARK"))
        yield f"{levels} levels at {path}", marked.replace('"MARK"', deep).encode()
        yield f"{levels} levels", deep.encode()
    yield "nothing", b""
    yield "random bytes", pick.randbytes(1000)
    yield "Latin-1", text.replace("rows", "r\xf6ws").encode("latin-1")
    yield "a cut UTF-16", text.encode("utf-16")[:-1]
    yield "a cut character", text.encode()[:-1] + b"\xc3"
    for value in _VALUES:
        yield f"{str(value)[:9]!r} alone", json.dumps(value).encode()


def altered(tree: Any, pick: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damage that may leave a usable report."""
    for path, value in nodes(tree):
        if isinstance(value, str):
            new = changed(tree, path, ESCAPES + value)
            yield f"escapes at {path}", json.dumps(new).encode()
    for path, _ in _some(tree, pick, 30, lambda path, _: isinstance(path[-1], str)):
        yield f"escapes for {path}", json.dumps(_renamed(tree, path, ESCAPES)).encode()
    for path, _ in _some(tree, pick, 80):
        new = pick.choice([*_VALUES, _deep(200), ESCAPES, [ESCAPES], {ESCAPES: ESCAPES}])
        yield f"{str(new)[:9]!r} at {path}", json.dumps(changed(tree, path, new)).encode()
    for path, _ in _some(tree, pick, 20, lambda path, _: isinstance(path[-1], int)):
        yield f"one less of {path}", json.dumps(without(tree, path)).encode()
        yield f"one more of {path}", json.dumps(_renamed(tree, path, "")).encode()
    text = json.dumps(tree).encode()
    for _ in range(40):
        at = pick.randrange(len(text))
        yield f"a byte at {at}", text[:at] + pick.randbytes(1) + text[at + 1 :]
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        yield encoding, text.decode().encode(encoding)


def _some(
    tree: Any, pick: random.Random, count: int, where: Callable[[Node, Any], bool] | None = None
) -> list[tuple[Node, Any]]:
    candidates = [each for each in nodes(tree) if where is None or where(*each)]
    return pick.sample(candidates, min(count, len(candidates)))


def faults(ended: Result, allowed: tuple[int, ...]) -> str:
    """What is wrong with how a command ended: an exit code not in ``allowed``, a traceback, output
    that a terminal would interpret, or a refusal of more than one line. "": nothing."""
    description = f"exit code {ended.exit_code}, {ended.exception!r}: {ended.output[-300:]!r}"
    right = ended.exception is None or isinstance(ended.exception, SystemExit)
    right = right and ended.exit_code in allowed
    right = right and all(char == "\n" or char.isprintable() for char in ended.output)
    if ended.exit_code == 2 and not ended.output.startswith("Usage: "):  # typer's own
        right = right and ended.output.startswith("Error: ") and ended.output.count("\n") == 1
        right = right and len(ended.output) < 1100
    return "" if right else description
