from collections.abc import Sequence

# Memory and streams are passed as integers.

MAX_WORLD: int
MAX_RESULTS: int

class Workspace:
    def __init__(
        self,
        regions: int,
        state: int,
        control: int,
        rank: int,
        world: int,
        signature: int,
        timeout_ns: int,
        signals: int,
        buffers_offset: int,
        buffer_stride: int,
        seed: int,
        chaos: int,
        /,
    ) -> None: ...

class Epilogue:
    def __init__(
        self,
        out_dtype: int,
        bias: int,
        cols: int,
        bias_dtype: int,
        residual: int,
        residual_dtype: int,
        /,
    ) -> None: ...

class AllReduce:
    def __init__(
        self,
        x: int,
        out: int,
        count: int,
        wire: int,
        epilogue: Epilogue,
        segment: int,
        slot_bytes: int,
        results_offset: int,
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
        cols: int,
        wire: int,
        slot_bytes: int,
        epilogue: Epilogue,
        /,
    ) -> None: ...

class Routed:
    def __init__(
        self,
        x: int,
        out: int,
        permutation: int,
        inverse_permutation: int,
        weights: int,
        rank_offsets: int,
        token_offsets: int,
        k: int,
        max_rows: int,
        cols: int,
        dtype: int,
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

class Litmus:
    def __init__(self, report: int, records: int, round: int, nbytes: int, /) -> None: ...

class Signal:
    def __init__(self, rank: int, index: int, /) -> None: ...

class Results:
    def __init__(self, outputs: Sequence[tuple[int, int]], /) -> None: ...

class Kernels:
    def __init__(self, device: int, image: bytes | None) -> None: ...
    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None: ...
    def set_flag(self, stream: int, workspace: Workspace, index: int, captured: bool) -> None: ...
    def streams_write(self) -> bool: ...
    # Launches a kernel of csrc/cuda/kernels.h.
    def launch(
        self,
        name: str,
        stream: int,
        *arguments: object,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...

def architectures() -> str: ...
def image() -> bytes: ...
def sources() -> list[tuple[str, str]]: ...
def driver_version() -> int: ...
def device_count() -> int: ...
def compute_capability(device: int) -> int: ...
