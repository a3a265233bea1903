from __future__ import annotations

import io
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dflash_lit.data.datamodule import EMPTY_ROW, RowDataModule, RowDataset
from dflash_lit.data.held import held, kernel
from dflash_lit.data.offline import StoredFeatures, ensure_features, offline_bytes, offline_key, write_features
from dflash_lit.errors import UserError
from dflash_lit.placement.strategy import LocalTarget
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from tests.helpers import packed_rows, tiny_target

PIECES = [[(100, 40)], [(60, 10), (60, 20)], [(128, 3)], [(9, 2)], [(50, 1)]]
LAYERS = (0, 2)


def source(target: FrozenTarget, *, teacher: bool = True) -> LocalTarget:
    return LocalTarget(target, LAYERS, teacher=teacher)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def target(request: pytest.FixtureRequest) -> FrozenTarget:
    made = tiny_target(TargetInfo.load("embedded"), vocab_size=512, num_hidden_layers=4)
    return FrozenTarget(made.info, made.model.to(request.param))


def ensured(target: FrozenTarget, place: Path, *, limit_gib: float = 1.0) -> tuple[list[Path], str]:
    said = io.StringIO()
    sides = (packed_rows(PIECES), packed_rows(PIECES[:2], seed=1))
    hidden = target.info.text.hidden_size
    folders = ensure_features(
        sides,
        source(target),
        place,
        widths=[2 * hidden, hidden],
        limit_gib=limit_gib,
        rows_per_batch=2,
        console=Console(file=said, width=200),
    )
    return folders, said.getvalue()


def test_batches_are_those_of_the_target(target: FrozenTarget, tmp_path: Path) -> None:
    folders, said = ensured(target, tmp_path / "features")
    assert "offline features: 0.00 GiB go to" in said
    train = StoredFeatures.open(folders[0])
    rows = packed_rows(PIECES)
    for chosen in ([0, 1], [4, 2], [3, EMPTY_ROW]):
        online = source(target).with_features(RowDataset(rows).batch(chosen, 2))
        offline = RowDataset(rows, train).batch(chosen, 2)
        assert offline.keys() == online.keys()
        for name in offline:
            assert offline[name].dtype == online[name].dtype
            if name in ("features", "last_hidden"):
                kept = online["document_ids"] >= 0  # padding is anything
                torch.testing.assert_close(offline[name][kept], online[name][kept], rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(offline[name], online[name])
    given = RowDataset(rows, train).batch([0, 1], 2)
    assert LocalTarget(target, LAYERS).with_features(given) is given  # the target is not asked


def test_they_are_written_once(target: FrozenTarget, tmp_path: Path) -> None:
    folders, _ = ensured(target, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    again, said = ensured(target, tmp_path)
    assert again == folders
    assert "are in" in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == before
    rows, other = packed_rows(PIECES), packed_rows(PIECES, seed=5)
    keys = {
        offline_key(rows, "a", LAYERS, True, torch.float32),
        offline_key(other, "a", LAYERS, True, torch.float32),
        offline_key(rows, "b", LAYERS, True, torch.float32),
        offline_key(rows, "a", (0, 1), True, torch.float32),
        offline_key(rows, "a", LAYERS, False, torch.float32),
        offline_key(rows, "a", LAYERS, True, torch.bfloat16),
    }
    assert len(keys) == 6


def test_the_size_is_that_of_the_files_and_has_a_limit(target: FrozenTarget, tmp_path: Path) -> None:
    folders, _ = ensured(target, tmp_path / "a")
    hidden = target.info.text.hidden_size
    size = sum(offline_bytes(rows, 128, [2 * hidden, hidden], target.dtype) for rows in (5, 2))
    found = sum(path.stat().st_size for folder in folders for path in folder.glob("*.npy"))
    assert size <= found <= size + 4 * 4096  # headers
    with pytest.raises(
        UserError, match=r"data\.offline: features of 7 rows take 0\.00 GiB, over data\.offline_limit_gib=1e-06"
    ):
        ensured(target, tmp_path / "b", limit_gib=1e-6)
    assert not (tmp_path / "b").exists()


def test_nothing_is_left_of_a_run_that_was_broken_off(target: FrozenTarget, tmp_path: Path) -> None:
    def broken(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if batch["row_ids"][0] >= 2:
            raise KeyboardInterrupt
        return source(target).with_features(batch)

    with pytest.raises(KeyboardInterrupt):
        write_features(packed_rows(PIECES), tmp_path / "key", broken, rows_per_batch=2)
    assert not list(tmp_path.iterdir())
    (tmp_path / ".key.partial").mkdir()  # of a run that had no time to clean up
    (tmp_path / ".key.partial" / "other.npy").write_bytes(b"0" * 1000)
    write_features(packed_rows(PIECES), tmp_path / "key", source(target).with_features, rows_per_batch=2)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert sorted(path.stem for path in (tmp_path / "key").iterdir()) == ["features", "last_hidden", "meta"]
    shutil.rmtree(tmp_path / "key")
    with pytest.raises(UserError, match="cannot be read"):
        StoredFeatures.open(tmp_path / "key")


def test_what_killed_runs_have_left_is_removed_before_the_disk_is_asked(target: FrozenTarget, tmp_path: Path) -> None:
    """Not what may be written by another host, whose lock need not be seen here."""
    ours, held_by_us, theirs, old = (tmp_path / f".{name}.partial" for name in "abcd")
    for left in (ours, held_by_us, theirs, old):
        left.mkdir()
        (left / "features.npy").write_bytes(b"0" * 1000)
        (left / ".writer").write_text(kernel() if left in (ours, held_by_us) else "another")
    for path in (*old.iterdir(), old):
        os.utime(path, (0, time.time() - 25 * 3600))
    with held(held_by_us):  # by a run that writes
        folders, _ = ensured(target, tmp_path)
    assert {*folders, held_by_us, theirs} == set(tmp_path.iterdir())
    assert len(list(held_by_us.iterdir())) == 2


def test_a_killed_writer_is_known_by_what_it_has_left(target: FrozenTarget, tmp_path: Path) -> None:
    left = tmp_path / "left"

    def killed(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shutil.copytree(tmp_path / ".key.partial", left)
        return source(target).with_features(batch)

    write_features(packed_rows(PIECES[:1]), tmp_path / "key", killed, rows_per_batch=8)
    assert (left / ".writer").read_text() == kernel()


def test_the_disk_is_asked_for_all_space_at_once(target: FrozenTarget, tmp_path: Path) -> None:
    """Not page by page through the map, where a full disk ends the process by a signal."""
    taken = []

    def watched(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        taken.extend((path.stat().st_blocks * 512, path.stat().st_size) for path in tmp_path.rglob("*.npy"))
        return source(target).with_features(batch)

    write_features(packed_rows(PIECES * 20), tmp_path / "key", watched, rows_per_batch=2)
    assert len(taken) > 4
    assert all(blocks >= size > 50_000 for blocks, size in taken)


def test_two_runs_that_write_at_once(target: FrozenTarget, tmp_path: Path) -> None:
    """The second finds the folder there when it has written its own."""
    rows = packed_rows(PIECES)
    write_features(rows, tmp_path / "key", source(target).with_features, rows_per_batch=2)
    expected = StoredFeatures.open(tmp_path / "key").take([0])
    write_features(rows, tmp_path / "key", source(target).with_features, rows_per_batch=2)
    assert torch.equal(StoredFeatures.open(tmp_path / "key").take([0])["features"], expected["features"])
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    shutil.rmtree(tmp_path / "key")


def test_loaders_and_the_example_have_them(target: FrozenTarget, tmp_path: Path) -> None:
    folders, _ = ensured(target, tmp_path)
    train, val = (StoredFeatures.open(folder) for folder in folders)
    module = RowDataModule(packed_rows(PIECES), packed_rows(PIECES[:2], seed=1), 2, 0, features=(train, val))
    for batch in (module.example_batch(), next(iter(module.train_dataloader())), next(iter(module.val_dataloader()))):
        assert batch["features"].shape == (2, 128, 2 * target.info.text.hidden_size)
