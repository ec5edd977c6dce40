"""Slices of tensors in files have exactly the values of the whole tensor's slices."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support import hf_folders
from tpkernels.parallel.checkpoints import open_checkpoint, stored
from tpkernels.parallel.checkpoints.stored import Box, Rows, Stored

pytest.importorskip("transformers")


def in_file(path: Path, whole: torch.Tensor, before: bytes = b"x" * 24) -> Rows:
    path.write_bytes(before + whole.contiguous().view(torch.uint8).numpy().tobytes())
    row = whole[0].numel() * whole.dtype.itemsize
    return Rows(path, len(before), tuple(whole.shape), whole.dtype, row)


BOXES = {
    "all": ((0, 0), (9, 8)),
    "rows": ((2, 0), (5, 8)),
    "columns": ((0, 3), (9, 2)),
    "both": ((1, 5), (7, 3)),
    "nothing": ((4, 0), (0, 8)),
    "no columns": ((0, 8), (9, 0)),
}


@pytest.mark.parametrize("box", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("rows_at_once", [1, 2, 100])
def test_slices(
    tmp_path: Path, box: tuple[tuple[int, ...], tuple[int, ...]], rows_at_once: int
) -> None:
    whole = torch.arange(72, dtype=torch.bfloat16).view(9, 8)
    rows, part = in_file(tmp_path / "file", whole), Box(*box)
    with mock.patch.object(stored, "CHUNK", rows_at_once * rows.row_bytes):
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.full(part.shape, -1, dtype=dtype)
            rows.read(part, out)
            assert torch.equal(out, part.of(whole).to(dtype))


def test_a_slice_of_several_pieces(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(10, 6)
    pieces = []
    for begin, end in ((0, 4), (4, 5), (5, 10)):
        rows = in_file(tmp_path / f"{begin}", whole[begin:end])
        pieces.append((Box((begin, 0), (end - begin, 6)), rows))
    tensor = Stored((10, 6), torch.float32, tuple(pieces))
    for box in (
        Box((0, 0), (10, 6)),
        Box((3, 0), (4, 6)),
        Box((3, 2), (3, 3)),
        Box((6, 1), (1, 1)),
    ):
        out = torch.full(box.shape, -1.0)
        tensor.read(box, out)
        assert torch.equal(out, box.of(whole))


def test_rows_that_are_decoded_in_blocks(tmp_path: Path) -> None:
    """Each block of 4 rows is stored backwards."""
    whole = torch.arange(48.0).view(16, 3)
    backwards = whole.view(4, 4, 3).flip(1).reshape(16, 3)
    rows = in_file(tmp_path / "file", backwards)
    seen = []

    def decode(raw: torch.Tensor) -> torch.Tensor:
        seen.append(len(raw))
        return raw.view(torch.float32).view(-1, 4, 3).flip(1).reshape(-1, 3)

    rows = Rows(rows.path, rows.begin, rows.shape, rows.dtype, rows.row_bytes, decode, 4)
    for chunk in (1, 100, 1 << 20):
        with mock.patch.object(stored, "CHUNK", chunk):
            for box in (Box((0, 0), (16, 3)), Box((5, 0), (6, 3)), Box((7, 1), (1, 2))):
                out = torch.full(box.shape, -1.0)
                rows.read(box, out)
                assert torch.equal(out, box.of(whole))
    assert 4 in seen and 16 in seen


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    rows = in_file(tmp_path / "file", torch.ones(4, 4))
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(60)
    with pytest.raises(ValueError, match=r"file ends before byte 88: it is truncated"):
        rows.read(Box((0, 0), (4, 4)), torch.empty(4, 4))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_gguf_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    import transformers

    path = hf_folders.gguf_file(tmp_path / "model.gguf", kind)
    checkpoint = open_checkpoint(tmp_path)
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(checkpoint.config())
    found = checkpoint.tensors(model)
    whole = want.state_dict()
    assert set(found) == set(whole)
    with mock.patch.object(stored, "CHUNK", 1000):
        for name, tensor in found.items():
            box = Box(tuple(n // 3 for n in tensor.shape), tuple(n // 2 for n in tensor.shape))
            out = torch.empty(box.shape)
            tensor.read(box, out)
            assert torch.equal(out, box.of(whole[name])), name
