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

class AllReduce:
    def __init__(
        self,
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
        /,
    ) -> None: ...

class RmsNorm:
    def __init__(
        self, normed: int, weight: int, cols: int, weight_dtype: int, eps: float, /
    ) -> None: ...

class Rows:
    def __init__(self, x: int, count: int, dtype: int, /) -> None: ...

class Shards:
    def __init__(
        self,
        x: int,
        out: int,
        starts: int,
        row: int,
        wire: int,
        slot_bytes: int,
        epilogue: Epilogue,
        /,
    ) -> None: ...

class SumPartials:
    def __init__(
        self,
        out: int,
        partials: Sequence[int],
        wire: int,
        begin: int,
        count: int,
        epilogue: Epilogue,
        /,
    ) -> None: ...

class PacedCopy:
    def __init__(
        self, dst: int, src: int, nbytes: int, latency_ns: int, ns_per_byte: float, /
    ) -> None: ...

class Signal:
    def __init__(self, rank: int, index: int, /) -> None: ...

class Results:
    def __init__(self, outputs: Sequence[tuple[int, int]], /) -> None: ...

class Kernels:
    # The other attributes queue the kernels of csrc/cuda/kernels.h, each with its arguments:
    # (stream, *arguments, blocks=1, cluster=1, early=False).
    def __init__(self, device: int, image: bytes | None) -> None: ...
    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None: ...
    def raise_flag(self, stream: int, space: Space, index: int, captured: bool) -> None: ...
    def streams_write(self, captured: bool) -> bool: ...

def architectures() -> str: ...
def image() -> bytes: ...
def sources() -> list[tuple[str, str]]: ...
def driver_version() -> int: ...
def device_count() -> int: ...
def compute_capability(device: int) -> int: ...
