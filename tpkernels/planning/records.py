"""Records read from JSON that nothing vouches for: dataclasses, checked field by field."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tpkernels.common.text import printable, short, shown

T = TypeVar("T")
_MOST = 1e30  # larger numbers were not measured
_MAPPINGS = (dict, Mapping)


def from_json(kind: type[T], value: object, where: str = "$") -> T:
    """Return the record of type ``kind`` that ``dataclasses.asdict`` gave.

    Raises:
        ValueError: a part is not of its type, is missing or unknown, or is a number that cannot
            have been measured; the message names the first such part and its value.
    """
    return _read(kind, value, where)


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is types.UnionType:
        return _read_one_of(arguments, value, where)
    if dataclasses.is_dataclass(origin):
        fields: dict[str, Any] = _fields(origin)  # type: ignore[arg-type]
        _require(value, dict, where)
        if value.keys() != fields.keys():
            name = min(value.keys() ^ fields.keys())
            problem = "has the unknown field" if name in value else "lacks the field"
            raise ValueError(f"{where} {problem} {shown(name)}")
        parts = {name: _read(fields[name], value[name], f"{where}.{name}") for name in fields}
        try:
            return origin(**parts)  # type: ignore[operator]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if origin in _MAPPINGS:
        _require(value, dict, where)
        return {
            name: _read(arguments[1], one, f"{where}.{short(printable(name), 40)}")
            for name, one in value.items()
        }
    if origin in (list, tuple):
        _require(value, list, where)
        pair = origin is tuple and arguments[-1] is not ...
        if pair and len(value) != len(arguments):
            raise ValueError(f"{where} is {shown(value)}; it must have {len(arguments)} values")
        kinds = arguments if pair else arguments[:1] * len(value)
        return origin(_read(kinds[i], one, f"{where}[{i}]") for i, one in enumerate(value))
    _require(value, origin, where)
    if origin in (int, float) and not abs(value) <= _MOST:
        raise ValueError(f"{where} is {shown(value)}; it must be at most {_MOST:g} in magnitude")
    return value


def _read_one_of(kinds: tuple[Any, ...], value: object, where: str) -> object:
    if value is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds[:-1]:
        with contextlib.suppress(ValueError):
            return _read(kind, value, where)
    return _read(kinds[-1], value, where)


def _require(value: object, kind: type, where: str) -> None:
    right = isinstance(value, (int, float) if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {shown(value)}; it must be of type {kind.__name__}")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
