"""Read dataclasses from untrusted JSON, with a check of every field."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tpkernels.common.text import printable, safe_repr, shorten

T = TypeVar("T")
_MAX_MAGNITUDE = 1e30  # plausibility limit for measured numbers
_MAPPINGS = (dict, Mapping)


def from_json(kind: type[T], value: object, path: str = "$") -> T:
    """Return a record of type ``kind``, the inverse of ``dataclasses.asdict``.

    Raises:
        ValueError: a field has the wrong type, is missing or unknown, or contains an implausibly
            large number. The message contains the first such field and its value.
    """
    return _read(kind, value, path)


def _read(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is types.UnionType:
        return _read_union(arguments, value, path)
    if dataclasses.is_dataclass(origin):
        fields: dict[str, Any] = _fields(origin)  # type: ignore[arg-type]
        _require_type(value, dict, path)
        if value.keys() != fields.keys():
            name = min(value.keys() ^ fields.keys())
            problem = "has the unknown field" if name in value else "lacks the field"
            raise ValueError(f"{path} {problem} {safe_repr(name)}")
        values = {name: _read(fields[name], value[name], f"{path}.{name}") for name in fields}
        try:
            return origin(**values)  # type: ignore[operator]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if origin in _MAPPINGS:
        _require_type(value, dict, path)
        return {
            name: _read(arguments[1], item, f"{path}.{shorten(printable(name), 40)}")
            for name, item in value.items()
        }
    if origin in (list, tuple):
        _require_type(value, list, path)
        fixed_length = origin is tuple and arguments[-1] is not ...
        if fixed_length and len(value) != len(arguments):
            raise ValueError(f"{path} is {safe_repr(value)}; it must have {len(arguments)} values")
        kinds = arguments if fixed_length else arguments[:1] * len(value)
        return origin(_read(kinds[i], item, f"{path}[{i}]") for i, item in enumerate(value))
    _require_type(value, origin, path)
    if origin in (int, float) and not abs(value) <= _MAX_MAGNITUDE:
        raise ValueError(
            f"{path} is {safe_repr(value)}; it must be at most {_MAX_MAGNITUDE:g} in magnitude"
        )
    return value


def _read_union(kinds: tuple[Any, ...], value: object, path: str) -> object:
    if value is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds[:-1]:
        with contextlib.suppress(ValueError):
            return _read(kind, value, path)
    return _read(kinds[-1], value, path)


def _require_type(value: object, kind: type, path: str) -> None:
    has_type = isinstance(value, (int, float) if kind is float else kind)
    if not has_type or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{path} is {safe_repr(value)}; it must be of type {kind.__name__}")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
