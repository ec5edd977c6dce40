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
from tpkernels.algorithms.backends import TABLES
from tpkernels.planning.algorithms import ALGORITHMS
from tpkernels.planning.op_spec import OPS

PACKAGE = ROOT / "tpkernels"

BASE = {"_C", "common", "errors", "torch_private"}
# The three storeys, and what the modules of a part may import of the package besides BASE and their
# own part. Imports that only type checkers see count.
CORE: dict[str, set[str]] = {
    "common": set(),
    "errors": set(),
    "torch_private": set(),
    "planning": set(),
    "symm": set(),
    "groups": {"planning", "symm"},
    "local": {"symm"},
    "kernels": {"symm"},
    "cuda": {"groups", "planning", "symm"},
    "algorithms": {"cuda", "groups", "kernels", "local", "planning", "symm"},
    "timing": {"groups"},
    "ops": {"algorithms", "cuda", "groups", "local", "planning", "symm", "timing"},
    "nccl": {"groups", "symm"},
}
MODELS: dict[str, set[str]] = {
    "compile": {"groups", "ops", "planning"},
    "mesh": {"groups", "ops", "planning"},
    "nn": {"groups", "local", "ops"},
    "parallel": {"groups", "local", "nn", "ops", "planning"},
    "integrations": {"", "groups", "launch", "local", "nn", "ops", "parallel"},
}
TOOLS: dict[str, set[str]] = {
    "numerics": set(),
    "launch": {"groups", "planning", "qualification"},
    "qualification": {"", *CORE, "launch"},
    "bench": {"", *CORE, "launch", "qualification"},
    "cli": {"", *CORE, *MODELS, "bench", "launch", "qualification"},
}
FACADE = {"", "__main__"}


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
    part = name.partition(".")[0]
    if part in FACADE:
        return
    parts = CORE | MODELS | TOOLS
    assert part in parts, f"{path} is in no storey: say in this test what it may import"
    for imported in imports(name, path):
        target = imported.partition(".")[0]
        base = BASE - {"_C"} if part in MODELS else BASE
        allowed = {part, *base, *parts[part]}
        assert target in allowed, f"{name} imports {imported or 'the whole package'}"
    if part != "cli":
        assert "import typer" not in path.read_text()


def test_the_core_imports_neither_models_nor_tools() -> None:
    assert not set().union(*CORE.values()) - set(CORE)
    assert not {*CORE} & {*MODELS} and not {*CORE, *MODELS} & {*TOOLS}


def test_the_top_of_the_package_fits_a_screen() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("_C.")}
    assert len(entries - {"__pycache__"}) <= 27


def test_imports_are_found() -> None:
    """The test above would pass if it saw none."""
    found = {name: set(imports(name, path)) for name, path in modules()}
    assert "algorithms.unfused" in found["algorithms.backends"]
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
    shared = {"autograd", "column_matmul", "execution", "problems", "registration"}
    shared |= {"arguments", "planned_calls", "reference", "replacement", "tuner", "validation"}
    shared |= {"grouped_matmul", "scaled_grouped_matmul", "experts"}
    files = {path.stem for path in (PACKAGE / "ops").glob("[!_]*.py")}
    assert files - shared == set(OPS)


def test_what_is_promised_is_there() -> None:
    for name in tpkernels.__all__:
        assert getattr(tpkernels, name) is not None
    assert sorted(tpkernels.__all__, key=str.lower) == sorted(set(tpkernels.__all__), key=str.lower)
