"""What a rank does with an executor's messages. It knows nothing of how they travel.

Messages, in one order on all ranks:

- ``("make", factory, args, kwargs)`` makes the object;
- ``("call", method, args, kwargs, rank)`` calls a method, whose result is wanted of ``rank``, or of
  all ranks if that is None;
- ``("stream", method, args, kwargs, rank, steps)`` calls a generator method and makes ``steps``
  steps; ``("more", steps)`` allows further steps, ``("stop",)`` ends it.

Replies: a rank answers "make", "call" and "stream" with exactly one of ``("result", value,
seconds)``, ``("error", traceback, type, seconds)`` and, for a stream, ``("end", seconds)``. Before
the last, the rank whose items are wanted sends ``("item", value)`` for each.

Invariant (all ranks stop after the same step): a rank makes a step only if it was allowed, and all
ranks read the permissions and the stop in the same order. So when they read the stop, all have made
all the steps that were allowed before, and no rank is in a collective that another will not enter.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

from tpkernels.launch import messages, worker
from tpkernels.launch.messages import Message


class Servant:
    """One rank's object, and the stream that is open."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._object: Any = None
        self._items: Iterator[Any] | None = None
        self._wanted = False  # the items of this rank
        self._begin = 0.0

    def handle(self, message: tuple[Any, ...]) -> Iterator[Message]:
        """Does what a message asks for, and yields the replies."""
        kind, *fields = message
        if kind == "more":
            yield from self._guarded(lambda: self._steps(*fields))
        elif kind == "stop":
            yield from self._guarded(self._stop)
        else:
            self._begin = time.monotonic()
            acts: dict[str, Callable[..., Iterator[Message]]]
            acts = {"make": self._make, "call": self._call, "stream": self._stream}
            act = acts[kind]
            yield from self._guarded(lambda: act(*fields))

    def _guarded(self, act: Callable[[], Iterator[Message]]) -> Iterator[Message]:
        try:
            yield from act()
        except GeneratorExit:
            raise
        except BaseException as error:  # even SystemExit: a method must not end the rank
            self._items = None
            failed = worker.failure(self._rank, error)
            yield messages.encode(("error", failed.error, failed.error_type, self._seconds()))

    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def _make(
        self, factory: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Message]:
        self._object = resolve(factory)(*args, **kwargs)
        yield messages.encode(("result", methods_of(self._object), self._seconds()))

    def _call(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int | None
    ) -> Iterator[Message]:
        value = getattr(self._object, method)(*args, **kwargs)
        wanted = value if rank in (None, self._rank) else None
        reply = ("result", wanted, self._seconds())
        yield messages.encode(reply, ["", f"the result of {method}", ""])

    def _stream(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int, steps: int
    ) -> Iterator[Message]:
        items = getattr(self._object, method)(*args, **kwargs)
        if not isinstance(items, Iterator):
            raise TypeError(
                f"{method} returned a {type(items).__name__}; stream() needs a generator"
            )
        self._items, self._wanted = items, rank == self._rank
        yield from self._steps(steps)

    def _steps(self, steps: int) -> Iterator[Message]:
        for _ in range(steps if self._items is not None else 0):
            assert self._items is not None
            try:
                item = next(self._items)
            except StopIteration:
                self._items = None
                yield messages.encode(("end", self._seconds()))
                return
            if self._wanted:
                yield messages.encode(("item", item), ["", "an item"])

    def _stop(self) -> Iterator[Message]:
        items, self._items = self._items, None
        if items is None:  # it has ended before
            return
        close = getattr(items, "close", None)
        if close is not None:
            close()
        yield messages.encode(("end", self._seconds()))


def resolve(factory: str) -> Callable[..., Any]:
    """The callable named "module:qualified.name"."""
    module, _, name = factory.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{factory} is a {type(found).__name__}, not a class or function")
    return found


def name_of(factory: str | Callable[..., Any]) -> str:
    """The name by which ranks find a factory.

    Raises:
        ValueError: they could not.
    """
    if isinstance(factory, str):
        if not all(factory.partition(":")):
            raise ValueError(f"factory {factory!r} must be of the form 'module:Class'")
        return factory
    name = f"{getattr(factory, '__module__', None)}:{getattr(factory, '__qualname__', None)}"
    try:
        if resolve(name) is factory:
            return name
    except (ImportError, AttributeError, TypeError):
        pass
    raise ValueError(
        f"factory {factory!r} must be a class or function that ranks can import: define it at the "
        "top of a module, or name it as 'module:Class'"
    )


def methods_of(worker_object: Any) -> list[str]:
    """The public methods; properties are not read."""
    found = {name: inspect.getattr_static(worker_object, name, None) for name in dir(worker_object)}
    return [name for name, it in found.items() if not name.startswith("_") and _is_method(it)]


def _is_method(member: Any) -> bool:
    return callable(member) or isinstance(member, (classmethod, staticmethod))
