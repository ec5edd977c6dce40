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

class Multicast:
    def __init__(self, regions: int = 0, x: int = 0) -> None: ...

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
        everywhere: Multicast,
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
        everywhere: Multicast,
        /,
    ) -> None: ...

class Routed:
    def __init__(
        self,
        x: int,
        out: int,
        order: int,
        places: int,
        weights: int,
        rows: int,
        tokens: int,
        k: int,
        most: int,
        row: int,
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
    def __init__(
        self, found: int, records: int, round: int, nbytes: int, multicast: int, /
    ) -> None: ...

class Signal:
    def __init__(self, rank: int, index: int, /) -> None: ...

class Results:
    def __init__(self, outputs: Sequence[tuple[int, int]], /) -> None: ...

class Kernels:
    def __init__(self, device: int, image: bytes | None) -> None: ...
    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None: ...
    def raise_flag(self, stream: int, space: Space, index: int, captured: bool) -> None: ...
    def streams_write(self) -> bool: ...
    # Queue the kernels of csrc/cuda/kernels.h.
    def two_shot_all_reduce(
        self,
        stream: int,
        space: Space,
        reduction: AllReduce,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    multimem_all_reduce = two_shot_all_reduce
    ll_all_reduce = two_shot_all_reduce
    ll_two_shot_all_reduce = two_shot_all_reduce
    ll128_all_reduce = two_shot_all_reduce
    def two_shot_all_reduce_rms_norm(
        self,
        stream: int,
        space: Space,
        reduction: AllReduce,
        norm: RmsNorm,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    ll_all_reduce_rms_norm = two_shot_all_reduce_rms_norm
    ll_two_shot_all_reduce_rms_norm = two_shot_all_reduce_rms_norm
    multimem_all_reduce_rms_norm = two_shot_all_reduce_rms_norm
    def rms_norm_of_rows(
        self,
        stream: int,
        rows: Rows,
        norm: RmsNorm,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    def one_shot_all_gather(
        self,
        stream: int,
        space: Space,
        shards: Shards,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    one_shot_reduce_scatter = one_shot_all_gather
    ll_all_gather = one_shot_all_gather
    multimem_all_gather = one_shot_all_gather
    multimem_reduce_scatter = one_shot_all_gather
    ll_reduce_scatter = one_shot_all_gather
    def routed_dispatch(
        self,
        stream: int,
        space: Space,
        routed: Routed,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    routed_combine = routed_dispatch
    def sum_of_partials(
        self,
        stream: int,
        partials: SumPartials,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    def litmus_messages(
        self,
        stream: int,
        space: Space,
        litmus: Litmus,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    litmus_words = litmus_messages
    litmus_lines = litmus_messages
    litmus_bulk = litmus_messages
    litmus_multimem = litmus_messages
    def call_barrier(
        self,
        stream: int,
        space: Space,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    def call_begin(
        self,
        stream: int,
        space: Space,
        index: int,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    call_flag = call_begin
    def call_publish(
        self,
        stream: int,
        space: Space,
        signal: Signal,
        /,
        blocks: int = 1,
        cluster: int = 1,
        early: bool = False,
    ) -> None: ...
    call_wait = call_publish
    def call_end(
        self,
        stream: int,
        space: Space,
        results: Results,
        /,
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
