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
from tpkernels.bench.sweep import Settings, plan_sweep
from tpkernels.bench.verification import Verdict
from tpkernels.cli import app
from tpkernels.planning.cost import Rates
from tpkernels.timing import Samples

SEED = 20261122
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
_BAD_NUMBERS = ("NaN", "Infinity", "-1e400", "1e300", "9" * 400, "9" * 5000)
_VALUES = (None, True, -1, 0, 1.5, 2**63, "", "text", [], {}, [1, "2"], {"a": []}, "x" * 5000)
_BASELINES = ("unfused", "torch", "matmul", "local_matmul")

Node = tuple[Any, ...]  # the path to a node: keys and indices


def invoke(*args: str) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(app, list(args))


def options(sweep: Mapping[str, Any] = SWEEP) -> list[str]:
    """A sweep on the command line."""
    arguments = []
    for name, values in sweep.items():
        for value in values if isinstance(values, tuple) else (values,):
            arguments += [f"--{name}", str(value)]
    return arguments


def good_report(given: Mapping[str, Any] = SWEEP) -> Report:
    """A report such as a run of this sweep on this machine might write."""
    sweep = plan_sweep(Settings(**given), ranks=None, device="cpu")
    report = new_report(sweep)
    for item in sweep.items:
        names = dict.fromkeys((*sweep.method.algorithms, *_BASELINES))
        samples = {
            name: Samples(tuple(1e-3 * (1 + i + j / 50) for j in range(6)), calls=2, warmup=1)
            for i, name in enumerate(names)
            if "matmul" in item.spec.op or "matmul" not in name
        }
        choices = {
            name: Choice(name.replace("auto", "direct"), "4 rows a rank", Verdict(0.5, 0.5, 1.0))
            for name in (*sweep.method.algorithms, "unfused")
        }
        left_out = {"nccl": "no GPU: pip install 'tpkernels[cu13]'"}
        case_report = CaseReport(choices, samples, left_out, inputs_over_cache=2.5)
        report.results.append(result(item, RATES, [case_report] * 2))
    report.complete = True
    return report


def nodes(tree: Any, path: Node = ()) -> Iterator[tuple[Node, Any]]:
    """All nodes of a tree except its root."""
    if path:
        yield path, tree
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from nodes(value, (*path, key))


def changed(tree: Any, path: Node, change: Callable[[Any, Any], object]) -> Any:
    """A copy of the tree, in which ``change(parent, key)`` was made at a node."""
    parent = tree = copy.deepcopy(tree)
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return tree


def with_value(tree: Any, path: Node, value: Any) -> Any:
    return changed(tree, path, lambda parent, key: parent.__setitem__(key, value))


def unusable(tree: Any, pick: random.Random) -> Iterator[tuple[str, bytes]]:
    """Damage that makes a file unusable, several of each kind: (what was done, the content)."""
    text = json.dumps(tree)

    def marked(path: Node, replacement: str) -> bytes:
        whole = json.dumps(with_value(tree, path, "MARK"))
        return whole.replace('"MARK"', replacement).encode()

    def some(count: int, where: Callable[[Node, Any], bool] = lambda *_: True) -> list[Node]:
        found = [path for path, value in nodes(tree) if where(path, value)]
        return pick.sample(found, min(count, len(found)))

    for path in some(20):
        yield f"an object at {path}", marked(path, '{"damaged": true}')
    optional = ("speedup", "times", "left_out", "environment", "algorithms", "ms")
    for path in some(10, lambda path, _: isinstance(path[-1], str)):
        if path[-2:-1] not in [(name,) for name in optional]:
            without = changed(tree, path, lambda parent, key: parent.pop(key))
            yield f"nothing at {path}", json.dumps(without).encode()
    for path in some(8, lambda _, value: isinstance(value, (int, float)) and value > 1):
        number = pick.choice(_BAD_NUMBERS)
        yield f"{number[:9]} at {path}", marked(path, number)
    for levels in (300, 2000, 100_000):
        deep = "[" * levels + "]" * levels
        yield f"{levels} levels", deep.encode()
        yield f"{levels} levels inside", marked(some(1)[0], deep)
    yield "cut off", text[: pick.randrange(len(text))].encode()
    yield "nothing", b""
    yield "random bytes", pick.randbytes(1000)
    yield "Latin-1", text.replace("rows", "r\xf6ws").encode("latin-1")[:-1] + b"\xf6"
    yield "a cut UTF-16", text.encode("utf-16")[:-1]
    for value in _VALUES:
        yield f"{str(value)[:9]!r} alone", json.dumps(value).encode()


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
