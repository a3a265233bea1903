from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_lit.attention.mask import BlockLayout
from dflash_lit.attention.picture import draw_mask, tile_counts
from dflash_lit.cli import main
from dflash_lit.errors import UserError


def test_mask_draws_a_png_and_says_what_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mask.png"
    assert main(["mask", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert 20_000 < out.stat().st_size < 150_000  # not blank, and small enough for the docs
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: 192 queries x 704 keys in 132 tiles of 32 x 32: ")
    assert said.count("\n") == 1


def test_mask_takes_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More anchors than there is room for: the blocks that only pad are drawn too."""
    out = tmp_path / "mask.svg"
    options = "--row-tokens 128 --documents 30,40 --anchors 60 --block-size 3 --causal --window 8 --tile 64 --seed 4"
    assert main(["mask", "--out", str(out), *options.split()]) == 0
    assert "180 queries x 308 keys in 15 tiles of 64 x 64" in capsys.readouterr().out
    svg = out.read_text()
    for words in ("8 tokens back at most", "its block up to itself", "document 1", "padding", "noise", "in training 128"):
        assert words in svg


def test_the_same_seed_draws_the_same_picture(tmp_path: Path) -> None:
    pictures = []
    for number, seed in enumerate("001"):
        out = tmp_path / f"{number}.png"
        assert main(["mask", "--out", str(out), "--seed", seed]) == 0
        pictures.append(out.read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--documents 300,213", "--documents come to 513 tokens, over --row-tokens 512"),
        ("--documents 2,1", "--documents: none has room for an anchor"),
        ("--tile 100", "--row-tokens 512 is not a multiple of --tile 100"),
        ("--block-size 1", "--block-size 1: a block is an anchor and at least one mask token"),
        ("--window 15", "--window 15 is shorter than --block-size 16"),
        ("--out mask.gif", "--out mask.gif: the name has to end in"),
        ("--out nowhere/mask.png", "nowhere/mask.png: cannot write the picture"),
        ("--row-tokens 65536 --anchors 1024", "16384 queries x 81920 keys are too many for a picture"),
    ],
)
def test_wrong_input_is_one_line(
    options: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mask", *options.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {says}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("value", "says"), [("200,x", "'200,x' is not whole numbers"), ("200,0", "0 is not 1 or more")])
def test_documents_are_whole_numbers(value: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["mask", "--documents", value])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_picture_is_of_one_row(tmp_path: Path) -> None:
    anchors = torch.tensor([[3], [5]])
    layout = BlockLayout(anchors, anchors > 0, torch.zeros(2, 8, dtype=torch.int32), 4)
    with pytest.raises(UserError, match="a picture shows one row, these are 2"):
        draw_mask(layout, tmp_path / "mask.png", tile=4)


def test_tiles_are_counted_over_rows() -> None:
    """Two rows of one block each, in tiles of 4: context 8 and 4 tokens, in full, and the block's own tile."""
    layout = BlockLayout(torch.tensor([[8], [4]]), torch.tensor([[True], [True]]), torch.zeros(2, 12, dtype=torch.int32), 4)
    assert tile_counts(layout, 4) == {"full": 5, "partial": 0, "skipped": 3, "all": 8}
