from collections.abc import Sequence

# Memory and streams are passed as integers.

class Library:
    def __init__(self, name: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> str: ...
    def unique_id(self) -> bytes: ...

class Operation:
    def __init__(
        self,
        kind: str,
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
    def close(self) -> None: ...
    def abort(self, why: str) -> bool: ...
