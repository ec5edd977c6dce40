"""The stubs of ``tpkernels._C`` match the extension in names, members and parameters."""

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

# Maps a name to the parameters of a function, the members of a class, or None.
Names = dict[str, Any]


def is_public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def read_stub(body: list[ast.stmt]) -> Names:
    names: Names = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = read_stub(node.body)
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = None if "property" in decorators(node) else parameters(node)
        elif isinstance(node, ast.AnnAssign):
            names[ast.unparse(node.target)] = None
        elif isinstance(node, ast.Assign):  # an alias, or a member of an enum
            names[ast.unparse(node.targets[0])] = names.get(ast.unparse(node.value))
    return {name: value for name, value in names.items() if is_public(name)}


def decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return the parameter names, with "_" for each positional-only parameter.

    In a stub, these are all parameters up to the last parameter without a name in the extension.
    """
    first, named = node.args.posonlyargs, (*node.args.args, *node.args.kwonlyargs)
    names = [parameter.arg for parameter in (*first, *named)]
    unnamed = [i for i, name in enumerate(names) if re.fullmatch(r"arg\d+", name)]
    last = max([len(first) - 1, *unnamed])
    return [name if i > last or name == "self" else "_" for i, name in enumerate(names)]


def read_extension(scope: Any) -> Names:
    if hasattr(scope, "__members__"):  # an enum
        return dict.fromkeys(scope.__members__)
    members = {name: getattr(scope, name) for name in vars(scope) if is_public(name)}
    if "__init__" in members and not members["__init__"].__doc__.startswith("__init__("):
        del members["__init__"]  # inherited: Python cannot construct it
    return {name: describe(value) for name, value in members.items()}


def describe(value: Any) -> Any:
    if isinstance(value, type):
        return read_extension(value)
    if not callable(value):
        return None
    signature = value.__doc__.splitlines()[0].rpartition(" -> ")[0]
    (node,) = ast.parse(f"def {signature}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return parameters(node)


def test_every_submodule_has_a_stub() -> None:
    assert read_extension(_C).keys() == {path.stem for path in STUBS.glob("[!_]*.pyi")}


@pytest.mark.parametrize("name", ["calls", "host", "nccl", "cuda"])
def test_a_stub_matches_its_submodule(name: str) -> None:
    stub = read_stub(ast.parse((STUBS / f"{name}.pyi").read_text()).body)
    submodule = importlib.import_module(f"tpkernels._C.{name}")
    assert submodule is getattr(_C, name)
    assert stub == read_extension(submodule)
    assert sum(map(bool, stub.values())) >= 2  # nccl has two
