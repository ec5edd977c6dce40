"""A call's arguments by name, and the key under which its plan is remembered.

Both follow from the op's schema, so an option is declared once, and none can be missing from the
key. As in ``dataclasses``, the function that does it is generated: a generic one takes 1 to 6 us of
every call, AMD EPYC Zen 4, 2026-11-22.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Hashable
from typing import Any

import torch

_FACTS = "({0}.shape, {0}.dtype, {0}.device)"
# What a plan depends on, by type. Other arguments count by value.
_KEYS = {
    "Tensor": _FACTS,
    "Optional[Tensor]": "{0} is not None and " + _FACTS,
    "List[Tensor]": "tuple([" + _FACTS.format("each") + " for each in {0}])",
    "Optional[List[Tensor]]": "{0} is not None and tuple(["
    + _FACTS.format("each")
    + " for each in {0}])",
    "Optional[List[int]]": "{0} is not None and tuple({0})",
}
_NO_PART = ("group",)  # each group remembers its own calls


def unpacker(schema: torch.FunctionSchema) -> Callable[..., tuple[Any, Hashable]]:
    """A function of the op's arguments that returns them as a named tuple, and the key: the shapes,
    dtypes and devices of tensors, and all other arguments by value."""
    given = schema.arguments
    defaults = {each.name: each.default_value for each in given if each.has_default_value()}
    names = [each.name for each in given]
    cls = namedtuple("Arguments", names, defaults=defaults.values())  # type: ignore[misc]
    signature = [name if name not in defaults else f"{name}={defaults[name]!r}" for name in names]
    if any(each.kwarg_only for each in given):
        signature.insert(sum(not each.kwarg_only for each in given), "*")
    parts = [
        _KEYS.get(str(each.type), "{0}").format(each.name)
        for each in given
        if each.name not in _NO_PART
    ]
    source = (
        f"def unpack({', '.join(signature)}):\n"
        f"    return new(cls, ({', '.join(names)},)), ({schema.name!r}, {', '.join(parts)})\n"
    )
    names_in_source: dict[str, Any] = {"cls": cls, "new": tuple.__new__}
    exec(source, names_in_source)
    unpack: Callable[..., tuple[Any, Hashable]] = names_in_source["unpack"]
    return unpack
