"""The tree is a table of contents: one name for an op through all layers, imports that point one
way, files that can be read in one go."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tpkernels
from tpkernels.backends import OPS, TABLES
from tpkernels.plan import ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tpkernels"
MOST_LINES = 300

# What the modules of a layer may import of the package. Imports point one way:
# ops -> plan, backends -> algorithms -> symm -> _C.
LEAVES = {"_C", "errors", "dtypes", "shards", "version", "cache", "defaults", "text"}
ALLOWED = {
    "errors": set[str](),
    "dtypes": set[str](),
    "shards": set[str](),
    "version": set[str](),
    "cache": set[str](),
    "defaults": set[str](),
    "text": set[str](),
    "tuning": LEAVES | {"tuning"},
    "numerics": {"dtypes", "shards", "numerics"},
    "problem": {"dtypes", "shards", "tuning"},
    "steps": {"problem"},
    "plan": LEAVES - {"_C"} | {"tuning", "problem", "steps"},
    "kernels": LEAVES | {"symm", "tuning", "kernels"},
    "cuda": LEAVES | {"symm", "cuda"},
    "symm": LEAVES | {"symm"},
    "algorithms": LEAVES | {"problem", "steps", "symm", "algorithms", "kernels", "cuda"},
    "group": LEAVES | {"symm", "tuning"},
    "groups": LEAVES | {"group"},
    "nccl": LEAVES | {"symm", "group", "groups", "nccl"},
    "benchmarking": {"groups"},
    "backends": LEAVES | {"problem", "plan", "algorithms", "kernels", "cuda", "group", "symm"},
    "compile": {"dtypes", "groups", "compile"},
    "ops": LEAVES
    | {"problem", "steps", "plan", "backends", "group", "groups", "algorithms", "kernels"}
    | {"cuda", "ops", "tuning"},
    "nn": LEAVES - {"_C"} | {"groups", "ops", "nn"},
    "parallel": LEAVES - {"_C"} | {"groups", "ops", "nn", "parallel"},
}
# From here on anything goes: they use the package as its users do.
USERS = {"", "__main__", "cli", "launch", "_fork_server", "_member", "_rank"}


def modules() -> Iterator[tuple[str, Path]]:
    """(name within the package, file) of every Python file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node that can run."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield other
                yield from statements(other)
            continue
        yield child
        yield from statements(child)


def imports(name: str, path: Path) -> Iterator[str]:
    """What a module imports of the package, as "layer.module" without the package's name."""
    package = f"tpkernels.{name}".rstrip(".").split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in statements(ast.parse(path.read_text())):
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


@pytest.mark.parametrize("name", dict(modules()))
def test_imports_point_one_way(name: str) -> None:
    path = dict(modules())[name]
    layer = name.partition(".")[0]
    if layer in USERS:
        return
    assert layer in ALLOWED, f"{path} is in no layer: say in this test what it may import"
    for imported in imports(name, path):
        target = imported.partition(".")[0]
        assert target in ALLOWED[layer], f"{name} imports {imported or 'the whole package'}"


def test_imports_are_found() -> None:
    """The test above would pass if it saw none."""
    found = {name: set(imports(name, path)) for name, path in modules()}
    assert "algorithms.unfused" in found["backends"]
    assert "groups" in found["ops.all_gather"]
    assert "_C.Phase" in found["algorithms.pipelined"]
    assert not any(one.startswith("backends") for one in found["algorithms.direct"])  # types only


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_one_name_everywhere(op: str) -> None:
    assert (PACKAGE / "ops" / f"{op}.py").is_file()
    assert (ROOT / "tests" / f"test_{op}.py").is_file()
    assert op in tpkernels.__all__
    assert callable(getattr(tpkernels, op))
    schema = getattr(torch.ops.tpkernels, op).default._schema
    assert schema.name == f"tpkernels::{op}"
    for device, table in TABLES.items():
        ways = [algorithm for algorithm in ALGORITHMS if (op, algorithm) in table]
        needed = {"unfused", "direct"} if device == "cpu" else {"unfused"}
        assert needed <= set(ways), f"{op} on {device}: {ways}"
        for way in ways:
            assert table[op, way].__name__ == op
            homes = [f"tpkernels.algorithms.{way}", f"tpkernels.algorithms.{way}_{device}"]
            assert table[op, way].__module__ in homes


def test_every_op_is_in_the_table() -> None:
    files = {path.stem for path in (PACKAGE / "ops").glob("[!_]*.py")}
    assert files == set(OPS)


def test_what_is_promised_is_there() -> None:
    for name in tpkernels.__all__:
        assert getattr(tpkernels, name) is not None
    assert sorted(tpkernels.__all__, key=str.lower) == sorted(set(tpkernels.__all__), key=str.lower)


def sources() -> Iterator[Path]:
    for folder in ("tpkernels", "csrc", "tests", "benchmarks", "examples"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".pyi", ".cpp", ".h", ".inc", ".cu", ".cuh"}:
                yield path


def test_files_can_be_read_in_one_go() -> None:
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in sources()}
    assert len(lengths) > 30
    long = {str(path): lines for path, lines in lengths.items() if lines >= MOST_LINES}
    assert not long, f"files of {MOST_LINES} lines or more: {long}"
