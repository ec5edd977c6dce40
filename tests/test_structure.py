"""The tree is a table of contents: one name for an op through all layers, and imports that
point one way."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import tpkernels
from tests.ops import test_results
from tests.support.paths import ROOT
from tpkernels.backends import TABLES
from tpkernels.op_spec import OPS
from tpkernels.planning.algorithms import ALGORITHMS

PACKAGE = ROOT / "tpkernels"

# What the modules of a layer may import of the package; imports that only type checkers see count.
# ops -> tuning -> planning, call, backends -> algorithms
# -> local, transport, kernels, cuda -> symm -> _C.
LEAVES = {
    "_C",
    "op_spec",
    "errors",
    "dtypes",
    "shards",
    "version",
    "cache",
    "defaults",
    "text",
    "integers",
    "nvml",
}
ALLOWED = {
    **{leaf: set[str]() for leaf in LEAVES - {"_C", "op_spec"}},
    "op_spec": {"dtypes"},
    "planning": LEAVES | {"planning"},
    "symm": LEAVES | {"symm"},
    "groups": LEAVES | {"symm", "planning", "groups"},
    "call": LEAVES | {"symm", "planning", "groups"},
    "local": LEAVES | {"symm", "local"},
    "transport": LEAVES | {"call", "groups", "local", "transport"},
    "kernels": LEAVES | {"symm", "planning", "kernels"},
    "cuda": LEAVES | {"symm", "planning", "call", "cuda"},
    "algorithms": LEAVES
    | {"call", "planning", "local", "transport", "symm", "kernels", "cuda", "algorithms"},
    "backends": LEAVES
    | {"call", "planning", "local", "transport", "kernels", "cuda", "algorithms"},
    "validation": LEAVES | {"groups", "local"},
    "tuning": LEAVES | {"planning", "groups", "call", "backends", "timing", "tuning"},
    "ops": LEAVES
    | {"planning", "groups", "call", "backends", "algorithms", "local", "cuda", "symm"}
    | {"validation", "tuning", "ops"},
    "nccl": LEAVES | {"symm", "groups", "nccl"},
    "numerics": {"dtypes", "shards", "numerics"},
    "compile": {"dtypes", "op_spec", "groups", "ops", "compile"},
    "mesh": LEAVES - {"_C"} | {"planning", "groups", "validation", "ops", "mesh"},
    "nn": LEAVES - {"_C"} | {"groups", "validation", "ops", "local", "nn"},
    "parallel": LEAVES - {"_C"} | {"groups", "ops", "local", "nn", "parallel"},
    "timing": {"groups"},
    "launch": {"_C", "defaults", "dtypes", "text", "groups", "launch"},
}
# From here on anything goes but `cli`: they use the package as its users do.
USERS = {"", "__main__", "bench", "cli", "initialization", "integrations", "qualification"}


def modules() -> Iterator[tuple[str, Path]]:
    """(name within the package, file) of every Python file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


@functools.cache
def imports(name: str, path: Path) -> tuple[str, ...]:
    return tuple(_imports(name, path))


def _imports(name: str, path: Path) -> Iterator[str]:
    """What a module imports of the package, as "layer.module" without the package's name."""
    package = f"tpkernels.{name}".rstrip(".").split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for full in found:
            if full == "tpkernels" or full.startswith("tpkernels."):
                yield full.removeprefix("tpkernels").removeprefix(".")


@pytest.mark.parametrize(("name", "path"), dict(modules()).items(), ids=dict(modules()))
def test_imports_point_one_way(name: str, path: Path) -> None:
    layer = name.partition(".")[0]
    if layer in USERS:
        if layer == "bench":
            assert not any(one.partition(".")[0] == "cli" for one in imports(name, path))
            assert "import typer" not in path.read_text()
        return
    assert layer in ALLOWED, f"{path} is in no layer: say in this test what it may import"
    for imported in imports(name, path):
        target = imported.partition(".")[0]
        assert target in ALLOWED[layer], f"{name} imports {imported or 'the whole package'}"


def test_imports_are_found() -> None:
    """The test above would pass if it saw none."""
    found = {name: set(imports(name, path)) for name, path in modules()}
    assert "algorithms.unfused" in found["backends"]
    assert "ops.registration.define" in found["ops.all_gather"]
    assert "_C.host.Phase" in found["algorithms.pipelined.cpu"]
    assert "kernels.configs.MatmulConfig" in found["algorithms.fused"]  # for types only


def test_no_files_import_each_other_in_a_circle() -> None:
    names = dict(modules())

    def file_of(imported: str) -> str | None:
        """The module that an imported name is, or comes from; None for a package's facade."""
        for candidate in (imported, imported.rpartition(".")[0]):
            if candidate in names and names[candidate].name != "__init__.py":
                return candidate
        return None

    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, path in names.items():
        if path.name != "__init__.py":
            sorter.add(name, *{found for one in imports(name, path) if (found := file_of(one))})
    order = list(sorter.static_order())  # raises CycleError with the circle
    assert order.index("_C" if "_C" in order else "errors") < order.index("ops.all_gather")


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_one_name_everywhere(op: str) -> None:
    assert (PACKAGE / "ops" / f"{op}.py").is_file()
    tests = {path.stem for path in (ROOT / "tests" / "ops").glob("test_*.py")}
    assert f"test_{op}" in tests or op in test_results.NAMES or OPS[op].scaled or OPS[op].routed
    assert op in tpkernels.__all__
    assert callable(getattr(tpkernels, op))
    schema = getattr(torch.ops.tpkernels, op).default._schema
    assert schema.name == f"tpkernels::{op}"
    for device, table in TABLES.items():
        ways = [algorithm for algorithm in ALGORITHMS if (op, algorithm) in table]
        needed = {"unfused", "direct"} if device == "cpu" else {"unfused"}
        assert needed <= set(ways), f"{op} on {device}: {ways}"
        for way in ways:
            homes = [
                f"tpkernels.algorithms.{name}" for name in (way, f"{way}.{device}", "transfers")
            ]
            assert table[op, way].__module__ in homes


def test_every_op_is_in_the_table() -> None:
    shared = {"autograd", "column_matmul", "execution", "problems", "registration", "scaled"}
    shared |= {"planned_calls", "reference", "replacement"}
    shared |= {"shortcut", "grouped_matmul", "scaled_grouped_matmul", "experts"}
    files = {path.stem for path in (PACKAGE / "ops").glob("[!_]*.py")}
    assert files - shared == set(OPS)


def test_what_is_promised_is_there() -> None:
    for name in tpkernels.__all__:
        assert getattr(tpkernels, name) is not None
    assert sorted(tpkernels.__all__, key=str.lower) == sorted(set(tpkernels.__all__), key=str.lower)
