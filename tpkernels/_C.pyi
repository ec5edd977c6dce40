from collections.abc import Callable, Sequence
from enum import Enum

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
) -> None: ...
def sum_partials(
    out: int, partials: Sequence[int], wire: int, begin: int, count: int, epilogue: Epilogue
) -> None: ...
def advise_huge_pages(address: int, nbytes: int) -> None: ...
def vector_units() -> list[str]: ...
def vector_unit() -> str: ...
def use_vector_unit(name: str) -> None: ...

class NcclLibrary:
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

class NcclOperationKind(Enum):
    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    SEND = 4
    RECV = 5

class NcclOperation:
    def __init__(
        self,
        kind: NcclOperationKind,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        peer: int,
        stream: int,
    ) -> None: ...

def nccl_all_to_all(
    send: int,
    recv: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    dtype: int,
    stream: int,
) -> list[NcclOperation]: ...

class NcclCommunicator:
    def __init__(
        self,
        library: NcclLibrary,
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
    def enqueue(self, operations: Sequence[NcclOperation]) -> None: ...
    def check(self) -> None: ...
    def split(self, color: int | None, key: int, name: str = "") -> NcclCommunicator | None: ...
    def register_window(self, address: int, nbytes: int, flags: int) -> int: ...
    def deregister_window(self, window: int) -> None: ...
    def register_buffer(self, address: int, nbytes: int) -> int: ...
    def deregister_buffer(self, registration: int) -> None: ...
    def close(self) -> None: ...
    def abort(self, why: str) -> bool: ...

# csrc/cuda: addresses, and streams as integers.

CUDA_MAX_WORLD: int

class CudaSpace:
    def __init__(
        self,
        regions: int,
        state: int,
        control: int,
        rank: int,
        signature: int,
        timeout_ns: int,
        words: int,
        buffers_at: int,
        buffer_stride: int,
        WORLD: int,
        seed: int,
        CHAOS: int,
    ) -> None: ...

class CudaEpilogue:
    def __init__(
        self,
        out_dtype: int,
        bias: int = 0,
        cols: int = 1,
        residual: int = 0,
        residual_dtype: int = 0,
    ) -> None: ...

class CudaKernels:
    def __init__(self, device: int, image: bytes | None) -> None: ...
    def all_reduce(
        self,
        stream: int,
        space: CudaSpace,
        way: int,
        blocks: int,
        x: int,
        out: int,
        count: int,
        begin: int,
        wire: int,
        epilogue: CudaEpilogue,
        segment: int,
        slot_bytes: int,
        results_at: int,
        multicast: int,
    ) -> None: ...
    def gather(
        self,
        stream: int,
        space: CudaSpace,
        blocks: int,
        x: int,
        out: int,
        starts: int,
        row: int,
        wire: int,
        slot_bytes: int,
        epilogue: CudaEpilogue,
    ) -> None: ...
    scatter = gather
    def sum_partials(
        self,
        stream: int,
        blocks: int,
        out: int,
        partials: Sequence[int],
        wire: int,
        begin: int,
        count: int,
        epilogue: CudaEpilogue,
    ) -> None: ...
    def paced_copy(
        self,
        stream: int,
        blocks: int,
        dst: int,
        src: int,
        nbytes: int,
        latency_ns: int,
        ns_per_byte: float,
    ) -> None: ...
    def barrier(self, stream: int, space: CudaSpace) -> None: ...
    def begin(self, stream: int, space: CudaSpace) -> None: ...
    def publish(self, stream: int, space: CudaSpace, to: int, index: int) -> None: ...
    def pass_on(self, stream: int, space: CudaSpace, source: int, index: int) -> None: ...
    def poison(self, stream: int, space: CudaSpace, out: int, nbytes: int) -> None: ...
    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None: ...
    def fetch(
        self,
        stream: int,
        space: CudaSpace,
        source: int,
        index: int,
        dst: int,
        src: int,
        nbytes: int,
    ) -> None: ...
    def end(self, stream: int, space: CudaSpace) -> None: ...

def cuda_architectures() -> str: ...
def cuda_image() -> bytes: ...
def cuda_sources() -> list[tuple[str, str]]: ...
def cuda_driver_version() -> int: ...
def cuda_device_count() -> int: ...
def cuda_compute_capability(device: int) -> int: ...
