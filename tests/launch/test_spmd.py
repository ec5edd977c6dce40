"""``tpkernels.spmd``: closures and lambdas on ranks with a mesh, from scripts without a guard."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels
from tests.support.cases import RanksFixture
from tests.support.processes import output_of
from tpkernels.launch import RankError


def listening(port: int) -> list[str]:
    """The addresses on which sockets of this machine listen on a port, in hexadecimal."""
    lines = [
        line.split()
        for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
        if path.exists()
        for line in path.read_text().splitlines()[1:]
    ]
    local = [fields[1].split(":") for fields in lines if fields[3] == "0A"]
    return [address for address, at in local if int(at, 16) == port]


def test_the_store_listens_on_loopback_only(ranks: RanksFixture) -> None:
    assert listening(ranks(2)._store.port) == ["0100007F"]  # 127.0.0.1 on a little-endian machine


def test_a_closure_on_a_mesh() -> None:
    """With an argument, a keyword, and a variable of the caller; results are tensors."""
    offset = torch.tensor([10.0])

    def work(mesh: Any, x: torch.Tensor, *, factor: int) -> Any:
        y = tpkernels.all_reduce((x + offset) * dist.get_rank(), mesh["y"])
        return mesh.mesh_dim_names, list(mesh.get_coordinate()), factor * y

    results = tpkernels.spmd(work, 4, (2, 2), torch.ones(2), factor=3)
    assert [coordinate for _, coordinate, _ in results] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert results[0][0] == ("x", "y")
    assert [y.tolist() for *_, y in results] == [[33.0] * 2] * 2 + [[165.0] * 2] * 2


def test_attributes_with_the_names_of_submodules() -> None:
    """cloudpickle sends `torch.distributed.config`, which is no plain module."""
    box = SimpleNamespace(config=7)
    assert tpkernels.spmd(lambda mesh: box.config + dist.get_rank(), 1) == [7]


IN_THREADS = """
import os, pickle, sys, threading
import tpkernels

def work(mesh):
    return mesh.size(), os.environ["OMP_NUM_THREADS"], "TPKERNELS_IS_FORK_SERVER" in os.environ
def pickles():
    while len(found) < 3: pickle.dumps(work)

os.environ["OMP_NUM_THREADS"] = "3"
if __name__ == "__main__":
    main, found, failed = sys.modules["__main__"], [], []
    def call():
        try: found.append(tpkernels.spmd(work, 1))
        except Exception as error: found.append(repr(error))
    def watch():
        try: pickles()
        except Exception as error: failed.append(repr(error))
    threads = [threading.Thread(target=call) for _ in range(3)] + [threading.Thread(target=watch)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(found, failed, sys.modules["__main__"] is main, os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.thorough
def test_threads_start_ranks_at_once(tmp_path: Path) -> None:
    """For the first time in the process, while another thread pickles a function of the script."""
    path = tmp_path / "script.py"
    path.write_text(IN_THREADS)
    [printed] = output_of(path).splitlines()
    assert printed == f"{[[(1, '1', False)]] * 3} [] True 3"


SCRIPT = """
import torch.distributed as dist
import tpkernels

class Box:
    def __init__(self, value): self.value = value

boxes = tpkernels.spmd(lambda mesh: Box(dist.get_rank() + mesh.size()), 2, mesh_dim_names=["tp"])
print([box.value for box in boxes], all(type(box) is Box for box in boxes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a file", "standard input"])
def test_a_script_needs_no_guard(tmp_path: Path, how: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with path.open() as script:
        printed = output_of(*([path] if how == "a file" else ["-"]), stdin=script)
    assert printed.splitlines() == ["[2, 3] True"]


def test_an_error_comes_with_the_traceback_of_its_rank() -> None:
    def work(mesh: Any) -> None:
        if mesh.get_local_rank() == 1:
            raise ArithmeticError("on the second rank")

    with pytest.raises(RankError, match=r"rank 1 \(pid(.|\n)*in work(.|\n)*on the second rank$"):
        tpkernels.spmd(work, 2)


def test_the_same_error_on_several_ranks_is_shown_once() -> None:
    with pytest.raises(RankError) as caught:
        tpkernels.spmd(lambda mesh: 1 / 0, 3)
    assert str(caught.value).count("ZeroDivisionError") == 1
    assert str(caught.value).endswith(" s: the same as rank 0")


def test_semaphores_of_a_rank_end_with_it() -> None:
    """Those of tqdm, say, or Python warns of leaked ones as the script ends."""

    def made(mesh: Any) -> str:
        import multiprocessing

        lock = multiprocessing.get_context("spawn").Lock()
        dist.kept = lock  # type: ignore[attr-defined]
        return str(lock._semlock.name)  # type: ignore[attr-defined]

    [name] = tpkernels.spmd(made, 1)
    assert not Path(f"/dev/shm/sem.{name[1:]}").exists()


def test_a_result_that_cannot_be_copied() -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        tpkernels.spmd(lambda mesh: threading.Lock(), 1)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((4, (2, 3)), {}, ValueError, "has 6 ranks, but nprocs is 4"),
        ((0,), {}, ValueError, "nprocs is 0; pass the number of ranks"),
        ((2, 4), {}, TypeError, r"mesh_shape is 4; .* such as \(2,\), or None, before the arg"),
        ((2, "text"), {}, TypeError, r"mesh_shape is 'text'; .* such as \(2,\), or None, before"),
        ((2,), {"device": "cuda"}, ValueError, "torch sees no GPU"),
        ((2,), {"device": "tpu"}, ValueError, "device is 'tpu'; it can be 'cpu' or 'cuda'"),
        ((4, (2, 2)), {"mesh_dim_names": ["x"]}, ValueError, "2 dims, but the names are"),
        ((1, (1, 1, 1, 1)), {}, ValueError, "pass mesh_dim_names"),
        ((1, None, threading.Lock()), {}, TypeError, "cannot be copied to the ranks"),
    ],
)
def test_bad_input_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setattr("tpkernels.launch.spmd._RanksWithoutMain", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=message):
        tpkernels.spmd(print, *arguments, **options)


def test_the_result_of_a_call_is_no_function() -> None:
    with pytest.raises(TypeError, match="fn is 7; pass the function itself"):
        tpkernels.spmd(7, 2)  # type: ignore[arg-type]
