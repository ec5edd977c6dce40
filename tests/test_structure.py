"""The structure of the package: op names are equal in all layers, and imports have no cycles.

Lower layers never import higher layers.
"""

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
# Three groups of subpackages, and for each subpackage the subpackages that its modules may import,
# in addition to BASE and itself. Imports for type checkers count.
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
    """Yield (name within the package, file) of every Python file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(name for name in names if name != "__init__"), path


@functools.cache
def imports(name: str, path: Path) -> tuple[str, ...]:
    return tuple(_imports(name, path))


def _imports(name: str, path: Path) -> Iterator[str]:
    """Yield the names that a module imports from the package, as "layer.module" without the package
    name."""
    package = f"tpkernels.{name}".rstrip(".").split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            imported = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for full_name in imported:
            if full_name == "tpkernels" or full_name.startswith("tpkernels."):
                yield full_name.removeprefix("tpkernels").removeprefix(".")


@pytest.mark.parametrize(("name", "path"), dict(modules()).items(), ids=dict(modules()))
def test_imports_point_one_way(name: str, path: Path) -> None:
    subpackage = name.partition(".")[0]
    if subpackage in FACADE:
        return
    allowed_by_subpackage = CORE | MODELS | TOOLS
    assert subpackage in allowed_by_subpackage, (
        f"{path} is in no storey: say in this test what it may import"
    )
    for imported in imports(name, path):
        target = imported.partition(".")[0]
        base = BASE - {"_C"} if subpackage in MODELS else BASE
        allowed = {subpackage, *base, *allowed_by_subpackage[subpackage]}
        assert target in allowed, f"{name} imports {imported or 'the whole package'}"
    if subpackage != "cli":
        assert "import typer" not in path.read_text()


def test_the_core_imports_neither_models_nor_tools() -> None:
    assert not set().union(*CORE.values()) - set(CORE)
    assert not {*CORE} & {*MODELS} and not {*CORE, *MODELS} & {*TOOLS}


def test_the_top_of_the_package_fits_a_screen() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("_C.")}
    assert len(entries - {"__pycache__"}) <= 27


def test_imports_are_found() -> None:
    """Negative control: the test above would pass if it found no imports."""
    imports_by_module = {name: set(imports(name, path)) for name, path in modules()}
    assert "algorithms.unfused" in imports_by_module["algorithms.backends"]
    assert "ops.registration.define" in imports_by_module["ops.all_gather"]
    assert "_C.host.Phase" in imports_by_module["algorithms.pipelined.cpu"]
    # imported for types only
    assert "kernels.configs.MatmulConfig" in imports_by_module["algorithms.fused"]


def test_no_import_cycles() -> None:
    names = dict(modules())

    def find_module(imported: str) -> str | None:
        """Return the module of an imported name, or None for the facade of a subpackage."""
        for candidate in (imported, imported.rpartition(".")[0]):
            if candidate in names and names[candidate].name != "__init__.py":
                return candidate
        return None

    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, path in names.items():
        if path.name != "__init__.py":
            sorter.add(
                name,
                *{module for imported in imports(name, path) if (module := find_module(imported))},
            )
    order = list(sorter.static_order())  # raises CycleError
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
        algorithms = [algorithm for algorithm in ALGORITHMS if (op, algorithm) in table]
        needed = {"unfused", "direct"} if device == "cpu" else {"unfused"}
        assert needed <= set(algorithms), f"{op} on {device}: {algorithms}"
        for algorithm in algorithms:
            homes = [
                f"tpkernels.algorithms.{name}"
                for name in (algorithm, f"{algorithm}.{device}", "transfers")
            ]
            assert table[op, algorithm].__module__ in homes


def test_every_op_is_in_the_table() -> None:
    shared = {"autograd", "column_matmul", "execution", "problems", "registration"}
    shared |= {"arguments", "planned_calls", "reference", "replacement", "tuner", "validation"}
    shared |= {"attention", "grouped_matmul", "scaled_grouped_matmul", "experts"}
    files = {path.stem for path in (PACKAGE / "ops").glob("[!_]*.py")}
    assert files - shared == set(OPS)


def test_public_names_exist() -> None:
    for name in tpkernels.__all__:
        assert getattr(tpkernels, name) is not None
    assert sorted(tpkernels.__all__, key=str.lower) == sorted(set(tpkernels.__all__), key=str.lower)
