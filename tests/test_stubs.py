"""The stubs of ``tpkernels._C`` and the extension have the same names, members and parameters."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import tpkernels
from tpkernels import _C

STUBS = Path(tpkernels.__file__).parent / "_C"

# By name: the parameters of a function, the members of a class, None for anything else.
Names = dict[str, Any]


def public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def in_stub(body: list[ast.stmt]) -> Names:
    found: Names = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = in_stub(node.body)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = None if "property" in decorators(node) else parameters(node)
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = None
        elif isinstance(node, ast.Assign):  # an alias, or a member of an enum
            found[ast.unparse(node.targets[0])] = found.get(ast.unparse(node.value))
    return {name: value for name, value in found.items() if public(name)}


def decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(one) for one in node.decorator_list]


def parameters(node: ast.FunctionDef) -> list[str]:
    """Names, but "_" up to the last parameter that has none in the extension: these are
    positional-only in the stub."""
    first, others = node.args.posonlyargs, (*node.args.args, *node.args.kwonlyargs)
    names = [one.arg for one in (*first, *others)]
    unnamed = [i for i, name in enumerate(names) if re.fullmatch(r"arg\d+", name)]
    last = max([len(first) - 1, *unnamed])
    return [name if i > last or name == "self" else "_" for i, name in enumerate(names)]


def in_extension(scope: Any) -> Names:
    if hasattr(scope, "__members__"):  # an enum
        return dict.fromkeys(scope.__members__)
    found = {name: getattr(scope, name) for name in vars(scope) if public(name)}
    if "__init__" in found and not found["__init__"].__doc__.startswith("__init__("):
        del found["__init__"]  # inherited: nothing makes one from Python
    return {name: described(value) for name, value in found.items()}


def described(value: Any) -> Any:
    if isinstance(value, type):
        return in_extension(value)
    if not callable(value):
        return None
    signature = value.__doc__.splitlines()[0].rpartition(" -> ")[0]
    (node,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return parameters(node)


def test_every_submodule_has_a_stub() -> None:
    assert in_extension(_C).keys() == {path.stem for path in STUBS.glob("[!_]*.pyi")}


@pytest.mark.parametrize("name", ["calls", "host", "nccl", "cuda"])
def test_a_stub_has_what_the_submodule_has(name: str) -> None:
    stub = in_stub(ast.parse((STUBS / f"{name}.pyi").read_text()).body)
    submodule = importlib.import_module(f"tpkernels._C.{name}")
    assert submodule is getattr(_C, name)
    assert stub == in_extension(submodule)
    assert sum(map(bool, stub.values())) >= 2  # as many as nccl has
