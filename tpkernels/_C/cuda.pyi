from collections.abc import Sequence

# Memory and streams are passed as integers.

MAX_WORLD: int
MOST_RESULTS: int

class Space:
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

class Epilogue:
    def __init__(
        self,
        out_dtype: int,
        bias: int = 0,
        cols: int = 1,
        bias_dtype: int = 0,
        residual: int = 0,
        residual_dtype: int = 0,
    ) -> None: ...

class RmsNorm:
    def __init__(
        self, normed: int, weight: int, cols: int, weight_dtype: int, eps: float
    ) -> None: ...

class Kernels:
    def __init__(self, device: int, image: bytes | None) -> None: ...
    def all_reduce(
        self,
        stream: int,
        space: Space,
        way: int,
        blocks: int,
        early: bool,
        x: int,
        out: int,
        count: int,
        begin: int,
        wire: int,
        epilogue: Epilogue,
        segment: int,
        slot_bytes: int,
        results_at: int,
        multicast: int,
    ) -> None: ...
    def normed_all_reduce(
        self,
        stream: int,
        space: Space,
        way: int,
        blocks: int,
        cluster: int,
        early: bool,
        x: int,
        out: int,
        count: int,
        wire: int,
        epilogue: Epilogue,
        segment: int,
        slot_bytes: int,
        results_at: int,
        norm: RmsNorm,
    ) -> None: ...
    def rms_norm(
        self,
        stream: int,
        blocks: int,
        cluster: int,
        x: int,
        count: int,
        dtype: int,
        norm: RmsNorm,
    ) -> None: ...
    def gather(
        self,
        stream: int,
        space: Space,
        blocks: int,
        x: int,
        out: int,
        starts: int,
        row: int,
        wire: int,
        slot_bytes: int,
        epilogue: Epilogue,
    ) -> None: ...
    scatter = gather
    low_latency_gather = gather
    low_latency_scatter = gather
    def sum_partials(
        self,
        stream: int,
        blocks: int,
        out: int,
        partials: Sequence[int],
        wire: int,
        begin: int,
        count: int,
        epilogue: Epilogue,
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
    def barrier(self, stream: int, space: Space) -> None: ...
    def begin(self, stream: int, space: Space, flags: int) -> None: ...
    def publish(self, stream: int, space: Space, to: int, index: int) -> None: ...
    def raise_flag(self, stream: int, space: Space, index: int, captured: bool) -> None: ...
    def streams_write(self, captured: bool) -> bool: ...
    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None: ...
    def wait(self, stream: int, space: Space, source: int, index: int) -> None: ...
    def end(self, stream: int, space: Space, results: Sequence[tuple[int, int]]) -> None: ...

def architectures() -> str: ...
def image() -> bytes: ...
def sources() -> list[tuple[str, str]]: ...
def driver_version() -> int: ...
def device_count() -> int: ...
def compute_capability(device: int) -> int: ...
