"""A checkpoint file is whole or not there, whatever kills its writer; damage and code are refused with what to take instead."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_lit.checkpoints.digest import PIECE
from dflash_lit.checkpoints.file import DiskFullError, load, remove_leftovers, save
from dflash_lit.errors import UserError


def checkpoint(step: int, kib: int = 64) -> dict[str, Any]:
    weights = {"a": torch.full((kib, 256), float(step)), "b": torch.arange(7) + step}
    return {
        "global_step": step,
        "state_dict": weights,
        "callbacks": {"C": {"best": [1.5, None, "x"], "score": weights["a"][0, 0]}},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def killed(write: Callable[[], object]) -> int:
    """What ended a child of this process that does ``write``: a signal, or 0."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            write()
        finally:
            os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def kill_at_byte(limit: int) -> None:
    """The kernel kills this process in the write that would make a file longer than this."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def kill_at(event: str) -> None:
    def hook(name: str, _: object) -> None:
        if name == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@contextmanager
def room(limit: int) -> Iterator[None]:
    """No file may get longer than this inside the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_saved_comes_back_in_one_file_that_others_read(tmp_path: Path) -> None:
    path = tmp_path / "made" / "last.ckpt"
    save(checkpoint(3), path)
    assert os.listdir(path.parent) == ["last.ckpt"]
    for read in (load(path), load(path, mmap=True), torch.load(path, weights_only=True)):
        assert same(read, checkpoint(3))
    with zipfile.ZipFile(path) as archive:
        assert archive.comment.startswith(b"dflash_lit sha256/4MiB=")
        assert archive.testzip() is None


def test_a_file_of_many_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors longer and shorter than a piece, brought to the disk in between."""
    monkeypatch.setattr("dflash_lit.checkpoints.file._SYNC_BYTES", 2**20)
    sizes = (PIECE // 4 - 1, 3, PIECE // 2 + 1, PIECE, 0, 1)
    saved = {"state_dict": {str(i): torch.randn(size) for i, size in enumerate(sizes)}}
    save(saved, path := tmp_path / "last.ckpt")
    assert same(load(path), saved)
    with open(path, "r+b") as file:
        file.seek(PIECE * 3)
        byte = file.read(1)
        file.seek(PIECE * 3)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(UserError, match="is damaged: its checksum is"):
        load(path)


def test_what_the_disk_refuses_in_the_background_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports it at one call, which may be any; the next one knows nothing of it."""
    path = tmp_path / "last.ckpt"
    save(checkpoint(1), path)
    calls: list[int] = []
    to_disk = os.fsync

    def once(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        to_disk(handle)

    monkeypatch.setattr("dflash_lit.checkpoints.file._SYNC_BYTES", 1)
    monkeypatch.setattr("os.fsync", once)
    with pytest.raises(DiskFullError, match="no room for this checkpoint"):
        save(checkpoint(2), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert same(load(path), checkpoint(1))


@pytest.mark.parametrize("at", [1, 2**40])  # while torch writes, where it hides the error behind one of its own; and after it
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, RuntimeError])
def test_what_ended_a_checkpoint_is_what_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], at: int
) -> None:
    def fail(handle: int) -> None:
        raise kind("first")

    def save_in_handling_another() -> None:
        try:
            raise ValueError("before")
        except ValueError:
            save(checkpoint(1), tmp_path / "last.ckpt")

    monkeypatch.setattr("dflash_lit.checkpoints.file._SYNC_BYTES", at)
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(kind, match="first"):
        save(checkpoint(1), tmp_path / "last.ckpt")
    with pytest.raises(kind, match="first"):
        save_in_handling_another()
    assert os.listdir(tmp_path) == []


def test_without_locks_what_was_not_written_for_a_day_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    for name, hours in (("old", 25), ("new", 23)):
        (tmp_path / f".{name}.ckpt.abc.partial").write_bytes(b"0")
        os.utime(tmp_path / f".{name}.ckpt.abc.partial", (0, time.time() - hours * 3600))
    save(checkpoint(1), tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == [".new.ckpt.abc.partial", "last.ckpt"]


def test_a_writer_killed_at_any_byte_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(checkpoint(1), path)
    size = path.stat().st_size

    def write(prepare: Callable[[], None]) -> Callable[[], None]:
        def child() -> None:
            prepare()
            save(checkpoint(2), path)

        return child

    for limit in (1, 700, size // 2, size - 100, size - 1):
        assert killed(write(lambda limit=limit: kill_at_byte(limit))) == signal.SIGXFSZ  # type: ignore[misc]
        assert load(path)["global_step"] == 1
    assert killed(write(lambda: kill_at("os.rename"))) == signal.SIGKILL  # all is written, nothing is renamed
    assert load(path)["global_step"] == 1
    left = [name for name in os.listdir(tmp_path) if name != "last.ckpt"]
    assert len(left) == 1, "each writer removes what the one before it has left"
    assert killed(write(lambda: None)) == 0
    assert same(load(path), checkpoint(2))
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_writer_killed_at_any_time_leaves_a_whole_one(tmp_path: Path) -> None:
    """Real processes that do nothing but save, killed after some milliseconds."""
    path = tmp_path / "last.ckpt"
    program = (
        "import sys, torch\nfrom pathlib import Path\nfrom dflash_lit.checkpoints.file import save\nfirst = int(sys.argv[2])\n"
        "for step in range(first, 10**6):\n    save({'global_step': step, 'w': torch.full((512, 256), float(step))}, sys.argv[1])\n"
        "    print(step, flush=True)"
    )
    done = 0
    for pause in (0.0, 0.013, 0.029):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(done + 1)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(pause)
            child.kill()
            said = child.stdout.read().split()
        saved = load(path)
        assert saved["global_step"] >= int(said[-1] if said else done + 1)
        assert (saved["w"] == saved["global_step"]).all()
        done = saved["global_step"]
    save(checkpoint(0), path)
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_an_unfinished_file_of_a_living_writer_stays(tmp_path: Path) -> None:
    (tmp_path / ".old.ckpt.abc.partial").write_text("of a dead one")
    living = tmp_path / ".new.ckpt.def.partial"
    with open(living, "wb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert [found.name for found in remove_leftovers(tmp_path)] == [".old.ckpt.abc.partial"]
        save(checkpoint(1), tmp_path / "last.ckpt")
        assert living.exists()
    assert remove_leftovers(tmp_path) == [living]


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    save(checkpoint(1), tmp_path / "step=1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    save(checkpoint(2), tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert load(tmp_path / "step=1.ckpt")["global_step"] == 1


# -- no room


def test_no_room_keeps_the_old_one_and_says_how_much_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(checkpoint(1), path)
    size = path.stat().st_size
    for limit in (0, 700, size // 2, size - 1):
        with room(limit), pytest.raises(DiskFullError) as caught:
            save(checkpoint(2), path)
        assert str(caught.value).startswith(f"{path}: no room for this checkpoint (File too large): it needs about ")
        needed = int(str(caught.value).split("(")[2].split(" bytes")[0])
        assert size * 0.9 <= needed <= size * 1.2
        assert os.listdir(tmp_path) == ["last.ckpt"]
        assert load(path)["global_step"] == 1
    save(checkpoint(2), path)
    assert load(path)["global_step"] == 2


def test_a_full_file_system(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    try:
        save(checkpoint(1), tmp_path / "last.ckpt")
        with pytest.raises(DiskFullError, match=r"No space left on device.*are free"):
            save(checkpoint(2, kib=512), tmp_path / "last.ckpt")
        assert os.listdir(tmp_path) == ["last.ckpt"]
        assert load(tmp_path / "last.ckpt")["global_step"] == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_other_errors_of_the_disk_are_not_taken_for_a_full_one(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    with pytest.raises(OSError, match=r"last\.ckpt"):
        save(checkpoint(1), tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"]


# -- damage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folder")
    for step in (1, 2):
        save(checkpoint(step, kib=2), made / f"step={step}.ckpt")
        os.utime(made / f"step={step}.ckpt", (step, step))
    return made


def test_every_flipped_bit_and_every_cut_is_seen(folder: Path, tmp_path: Path) -> None:
    good = (folder / "step=2.ckpt").read_bytes()
    path = tmp_path / "last.ckpt"
    random = np.random.default_rng(0)
    places = {*range(4, 60), *range(len(good) - 120, len(good)), *random.integers(4, len(good), 150).tolist()}
    for place in sorted(places):
        damaged = bytearray(good)
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"last\.ckpt: is damaged"):
            load(path)
    for length in {*range(4, len(good), 97), *range(len(good) - 110, len(good))}:
        path.write_bytes(good[:length])
        with pytest.raises(UserError, match=r"last\.ckpt: is (damaged|not a checkpoint)"):
            load(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(UserError, match="is damaged"):
        load(path)


def test_it_is_said_which_older_one_is_whole(folder: Path) -> None:
    path, newest = folder / "last.ckpt", folder / "step=9.ckpt"
    path.write_bytes((folder / "step=2.ckpt").read_bytes()[:-3])
    newest.write_bytes(b"PK\x03\x04 and nothing")
    try:
        with pytest.raises(UserError) as caught:
            load(path)
        assert str(caught.value).endswith(f"; use {folder / 'step=2.ckpt'}, of step 2")
        assert "\n" not in str(caught.value)
    finally:
        path.unlink()
        newest.unlink()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a checkpoint"),
        (b"# text\n", "is not a checkpoint"),
        (b"PK\x03\x04", "is damaged"),
        (pickle.dumps({"global_step": 1}), "is refused: a bare pickle, which runs code"),
    ],
)
def test_what_is_no_archive(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.ckpt: {says}.*none beside it can be used"):
        load(tmp_path / "x.ckpt")


def test_what_is_there_instead_of_a_file(tmp_path: Path) -> None:
    for name in ("nothing.ckpt", "folder.ckpt"):
        (tmp_path / "folder.ckpt").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=rf"{name}: no such checkpoint"):
            load(tmp_path / name)
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(UserError, match=r"list\.ckpt: is not a checkpoint of this project \(it holds a list\)"):
        load(tmp_path / "list.ckpt")
    torch.save({"global_step": 4}, tmp_path / "plain.ckpt")  # without a checksum, of Lightning's own way or an earlier version
    assert load(tmp_path / "plain.ckpt") == {"global_step": 4}


# -- code


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_code_in_a_file_is_never_run_and_refused_by_name(tmp_path: Path) -> None:
    evil, mark = {"callbacks": {"C": Runs(tmp_path / "ran")}, "state_dict": {}}, tmp_path / "ran"
    torch.save(evil, tmp_path / "zip.ckpt")
    torch.save(evil, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.ckpt").write_bytes(pickle.dumps(evil))
    for name, says in (("zip", r"it names '\w+\.mkdir', code that would run"), ("old", "bare pickle"), ("bare", "bare pickle")):
        for mmap in (False, True):
            with pytest.raises(UserError, match=rf"{name}\.ckpt: is refused: .*{says}|{says}"):
                load(tmp_path / f"{name}.ckpt", mmap=mmap)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.float64(1), "callbacks.C.best.*numpy.float64"),
        ([0, {"x": Path("a")}], r"callbacks\.C\.best\[1\]\.x is a pathlib.*Path"),
        ({Path("a"): 1}, "a key of callbacks.C.best"),
        (lambda: None, "callbacks.C.best is a builtins.function"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(value: object, says: str, tmp_path: Path) -> None:
    """Else a run would only say so when it is to go on."""
    saved = checkpoint(1)
    saved["callbacks"]["C"]["best"] = value
    with pytest.raises(UserError, match=says):
        save(saved, tmp_path / "last.ckpt")
    assert os.listdir(tmp_path) == []
