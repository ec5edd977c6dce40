"""Private names of torch appear only in `tpkernels.torch_private`, because a new torch may change
them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.support.paths import ROOT
from tpkernels import torch_private

PACKAGE = ROOT / "tpkernels"
HOME = PACKAGE / "torch_private.py"

# Private names of projects other than torch. All remaining names that begin with "_", and that the
# package does not define, count as names of torch.
NOT_FROM_TORCH = {
    # the package: an entry of a ``__dict__``, and suffixes of names
    *("_original_parameters", "_bias", "_hooks"),
    # Python
    *("_asdict", "_at_fork_reinit", "_exit", "_forkserver", "_forkserver_address"),
    *("_forkserver_pid", "_replace", "_run_finalizers"),
    # transformers
    *(
        "_apply_gate",
        "_create_batch_processor",
        "_device_mesh",
        "_get_dtype_plan",
        "_hf_peft_config_loaded",
    ),
    *("_attn_implementation", "_experts_implementation", "_supports_attention_backend"),
    *("_is_expert_parallel", "_tp_plan", "_tp_size", "_true_initial_tokens", "_wake_up_loop"),
    # vLLM
    "_supports_parallel_config",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def chain(node: ast.AST) -> list[str]:
    """Return ["torch", "ops", "aten"] for ``torch.ops.aten``, or [] if the node is not a chain of
    names."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = chain(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if isinstance(node, ast.Attribute) and before else []


def get_torch_names(tree: ast.AST) -> set[str]:
    """Return the names that a module imports from torch, or assigns from such a name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and chain(node.value)[:1] == ["torch"]:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def defined_names() -> set[str]:
    """Return the attributes that the classes of the package define: methods, fields and attributes
    of `self`."""
    names = set()
    trees = [
        ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py*") if path.suffix != ".pyc"
    ]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in (node for cls in classes for node in cls.body):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name for target in targets for name in chain(target)}
    for node in (node for cls in classes for node in ast.walk(cls)):
        match node:
            case ast.Attribute(value=ast.Name("self"), ctx=ast.Store()):
                names.add(node.attr)
    return names


def uses(source: str, defined: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, expression) for every private name of torch in a module."""
    tree = ast.parse(source)
    torch_names = get_torch_names(tree)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    literal_parts = {part for node in joined for part in node.values}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            for alias in node.names:
                origin, *submodules = alias.name.split(".")
                if origin == "torch" and any(map(is_private, submodules)):
                    yield line, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin, *submodules = (node.module or "").split(".")
            for alias in node.names:
                if origin == "torch" and any(map(is_private, [*submodules, alias.name])):
                    yield line, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            names = chain(node)
            if hasattr(torch.ops.tpkernels, node.attr):
                continue
            unknown = node.attr not in defined | NOT_FROM_TORCH
            if unknown or (names and names[0] in torch_names):
                yield line, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module in `sys.modules`, or an attribute in `getattr` or a ``__dict__``.
            name = node.value
            attribute = re.fullmatch(r"_(?!tpkernels_)[a-z]\w+", name)
            unknown = attribute is not None and name not in defined | NOT_FROM_TORCH
            if (unknown and node not in literal_parts) or re.fullmatch(
                r"torch(\.\w+)*\._\w+", name
            ):
                yield line, repr(name)


def test_private_names_of_torch_are_in_one_module() -> None:
    defined = defined_names()
    misplaced = [
        f"{path.relative_to(ROOT)}:{line}: {expression}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != HOME
        for line, expression in uses(path.read_text(), defined)
    ]
    assert not misplaced, "move to tpkernels/torch_private.py:\n" + "\n".join(misplaced)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C", "torch._C"),
        ("import torch\ntorch.cuda._sleep(1)", "torch.cuda._sleep"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch.a._b as c", "torch.a._b"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch import _ops", "torch._ops"),
        ("from torch.autograd import profiler\nprofiler._apply", "profiler._apply"),
        ("import torch\naten = torch.ops.aten\naten._to_copy", "aten._to_copy"),
        ("import torch\ntorch.ops._c10d_functional", "torch.ops._c10d_functional"),
        ("pg._get_backend(device)", "pg._get_backend"),
        ("self._parameters", "self._parameters"),
        ("getattr(x, '_version')", "'_version'"),
        ("import sys\n'torch._dynamo' in sys.modules", "'torch._dynamo'"),
        ("import torch\ntorch.ops.tpkernels._column_matmul", None),
        ("self._apply(fn)", None),
        ("from tpkernels.nn import _mine\n_mine._apply", None),
        ("from torch import __version__", None),
    ],
)
def test_uses_are_found(source: str, expected: str | None) -> None:
    assert [expression for _, expression in uses(source, {"_apply"})] == (
        [expected] if expected else []
    )


def test_expensive_modules_are_imported_on_use() -> None:
    """Import the module in a new process. dynamo and inductor, which load for seconds, stay out."""
    code = (
        "import sys, tpkernels.torch_private\n"
        "assert not {'torch._dynamo', 'torch._inductor'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", sorted(torch_private._LAZY))
def test_lazy_modules_exist(name: str) -> None:
    assert getattr(torch_private, name).__name__ == torch_private._LAZY[name]


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        torch_private.missing  # type: ignore[attr-defined]  # noqa: B018


def test_the_extension_uses_the_listed_names() -> None:
    """Compare the names of torch in csrc/calls with the list. torch must have all of them."""
    sources = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "calls").glob("*")))
    used = re.findall(r'\("(torch[\w.]*)",\s*"(\w+)"\)', sources)
    private = {(module, name) for module, name in used if "._" in f"{module}.{name}"}
    assert private == set(torch_private.EXTENSION_NAMES)
    for module, name in torch_private.EXTENSION_NAMES:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
