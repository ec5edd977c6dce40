from collections.abc import Sequence
from enum import Enum

# Memory, streams, windows and registrations are passed as integers.

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

def all_to_all(
    send: int,
    recv: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    dtype: int,
    stream: int,
) -> list[Operation]: ...

class Communicator:
    def __init__(
        self,
        library: Library,
        unique_id: bytes,
        rank: int,
        world: int,
        *,
        timeout: float,
        name: str = "",
        cta_policy: int | None = None,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def enqueue(self, operations: Sequence[Operation]) -> None: ...
    def check(self) -> None: ...
    def split(self, color: int | None, key: int, name: str = "") -> Communicator | None: ...
    def register_window(self, address: int, nbytes: int, flags: int) -> int: ...
    def deregister_window(self, window: int) -> None: ...
    def register_buffer(self, address: int, nbytes: int) -> int: ...
    def deregister_buffer(self, registration: int) -> None: ...
    def close(self) -> None: ...
    def abort(self, why: str) -> bool: ...
