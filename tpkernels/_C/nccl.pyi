from collections.abc import Sequence
from enum import Enum

# Memory, streams and windows are passed as integers.

class Library:
    def __init__(self, name: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def features(self) -> dict[str, bool]: ...
    def unique_id(self) -> bytes: ...
    def mem_alloc(self, nbytes: int) -> int: ...
    def mem_free(self, address: int) -> None: ...

class OperationKind(Enum):
    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    SEND = 4
    RECV = 5

class Operation:
    def __init__(
        self,
        kind: OperationKind,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        peer: int,
        stream: int,
    ) -> None: ...

class Communicator:
    def __init__(
        self,
        library: Library,
        unique_id: bytes,
        rank: int,
        world: int,
        *,
        name: str,
        timeout: float,
    ) -> None: ...
    def enqueue(self, operations: Sequence[Operation]) -> None: ...
    def check(self) -> None: ...
    def register_window(self, address: int, nbytes: int) -> int: ...
    def deregister_window(self, window: int) -> None: ...
    def close(self) -> None: ...
    def abort(self, why: str) -> bool: ...
