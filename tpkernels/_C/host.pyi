from collections.abc import Callable, Sequence
from enum import Enum

# Memory is passed as integer addresses, dtypes as the codes of csrc/host/vector.h.

def open_memfd(name: str) -> int: ...
def open_pidfd(pid: int) -> int: ...

class Arena:
    def __init__(self, fd: int, region_bytes: int, world: int) -> None: ...
    @staticmethod
    def create(region_bytes: int, world: int) -> int: ...
    def commit(self, rank: int, offset: int, nbytes: int) -> None: ...
    def give_back(self, rank: int, offset: int, nbytes: int) -> None: ...
    def region(self, rank: int, offset: int = 0, nbytes: int | None = None) -> Region: ...
    region_bytes: int
    world: int

class Region:
    arena: Arena
    address: int
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Phase(Enum):
    DATA = 0
    RESULT = 1
    READ = 2

class Channel:
    def __init__(
        self,
        arena: Arena,
        rank: int,
        pidfds: Sequence[int],
        pids: Sequence[int],
        timeout: float,
        spin_us: float,
        yield_us: float,
        capacity: int,
    ) -> None: ...
    @staticmethod
    def region_bytes(world: int, limit: int) -> int: ...
    @staticmethod
    def parts(world: int, region_bytes: int, begin: int, end: int) -> list[tuple[int, int]]: ...
    def grow(self, capacity: int) -> None: ...
    rank: int
    world: int
    epoch: int
    capacity: int
    broken: bool
    def buffer_offset(self, parity: int) -> int: ...
    def begin(self, signature: int, text: str) -> None: ...
    def publish(self, phase: Phase, index: int = 0) -> None: ...
    def wait(self, peer: int, phase: Phase, index: int = 0) -> None: ...
    def wait_any(self, peers: Sequence[int], phase: Phase, index: int = 0) -> int: ...
    def barrier(self) -> None: ...
    def watch(self, phase: Phase, waited: float) -> None: ...
    def abandon(self, why: str, late: bool = False, culprit: int = -1) -> None: ...
    def add_segment(self, identity: int, arena: Arena) -> None: ...
    def locate(self, segment: int, offset: int) -> None: ...
    def in_segment(self, peer: int) -> bool: ...
    def segment_of(self, peer: int, nbytes: int) -> Region: ...
    def set_on_wait(self, f: Callable[[bool], object] | None) -> None: ...
    def set_chaos(
        self, seed: int, max_delay_us: int, single_buffer: bool = False, skip_waits: bool = False
    ) -> None: ...

class ShardLayout:
    def __init__(self, outer: int, inner: int, sizes: Sequence[int]) -> None: ...

class Epilogue:
    def __init__(
        self,
        out_dtype: int,
        bias: int = 0,
        cols: int = 1,
        residual: int = 0,
        residual_dtype: int = 0,
    ) -> None: ...

def all_gather(
    channel: Channel,
    signature: int,
    text: str,
    source: int,
    segment: int,
    offset: int,
    out: int,
    layout: ShardLayout,
    dtype: int,
    /,
) -> None: ...
def reduce_scatter(
    channel: Channel,
    signature: int,
    text: str,
    source: int,
    segment: int,
    offset: int,
    out: int,
    layout: ShardLayout,
    wire: int,
    epilogue: Epilogue,
    /,
) -> None: ...
def all_reduce(
    channel: Channel,
    signature: int,
    text: str,
    source: int,
    segment: int,
    offset: int,
    out: int,
    count: int,
    wire: int,
    epilogue: Epilogue,
    /,
) -> None: ...
def sum_partials(
    out: int, partials: Sequence[int], wire: int, begin: int, count: int, epilogue: Epilogue, /
) -> None: ...
def advise_huge_pages(address: int, nbytes: int) -> None: ...
def vector_units() -> list[str]: ...
def vector_unit() -> str: ...
def use_vector_unit(name: str) -> None: ...
