from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from dflash_lit.cli import main
from dflash_lit.compilation import archive
from dflash_lit.compilation.archive import load, save
from dflash_lit.compilation.cache import INDUCTOR, cache_dir, cache_key
from dflash_lit.errors import UserError

KERNEL = "triton/ABC"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(INDUCTOR, raising=False)
    move(tmp_path / "here", monkeypatch)
    return tmp_path


def move(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_LIT_COMPILE_CACHE", str(root))


def write(name: str, content: str | bytes) -> None:
    path = cache_dir() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def filled() -> None:
    write("fxgraph/ab/entry", bytes(range(256)) * 500)
    write("ab/code.py", "x = 1")
    write(f"{KERNEL}/kernel.cubin", b"\x7fELF")
    write(f"{KERNEL}/__grp__kernel.json", json.dumps({"child_paths": {"kernel.cubin": f"{cache_dir()}/{KERNEL}/kernel.cubin"}}))


def contents() -> dict[str, bytes]:
    folder = cache_dir()
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_host_gets_the_same_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    before = contents()
    for name in ("locks/x.lock", "ab/.1.2.tmp", f"{KERNEL}/tmp.pid_1_x/kernel.cubin", "in_use_1_2"):
        write(name, "of a run that compiles")
    assert save(here / "cache.tar.gz") == 4

    move(here / "there", monkeypatch)
    write("ab/code.py", "x = 1  # has been here before")
    assert load(here / "cache.tar.gz") == 3
    group = f"{KERNEL}/__grp__kernel.json"
    after = contents()
    assert after.pop("ab/code.py") == b"x = 1  # has been here before"
    # Triton looks for the files of a kernel where its list says.
    assert json.loads(after.pop(group)) == {"child_paths": {"kernel.cubin": str(cache_dir() / KERNEL / "kernel.cubin")}}
    assert after == {name: content for name, content in before.items() if name not in ("ab/code.py", group)}
    assert load(here / "cache.tar.gz") == 0
    assert [path.name for path in cache_dir().parent.iterdir()] == [cache_key()]  # nothing else is left behind


def test_another_key_is_refused_with_both(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    ours = cache_key()
    save(here / "cache.tar.gz")
    monkeypatch.setattr(archive, "cache_key", lambda: "torch2.99.0-cpu-py311-00000000")
    with pytest.raises(UserError, match=f"was saved for {ours}, this machine compiles for torch2.99.0-cpu-py311-00000000"):
        load(here / "cache.tar.gz")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_is_refused_and_changes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    filled()
    save(here / "cache.tar.gz")
    whole = (here / "cache.tar.gz").read_bytes()
    (here / "cut.tar.gz").write_bytes(whole[: min(int(len(whole) * share), len(whole) - 1)])
    move(here / "there", monkeypatch)
    with pytest.raises(UserError, match="is damaged, cut short or not written by `dflash-lit cache save`"):
        load(here / "cut.tar.gz")
    assert contents() == {}
    assert list((here / "there").iterdir()) == []


def test_a_file_with_a_flipped_bit_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    save(here / "cache.tar.gz")
    damaged = bytearray((here / "cache.tar.gz").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (here / "cache.tar.gz").write_bytes(damaged)
    move(here / "there", monkeypatch)
    with pytest.raises(UserError, match="is damaged"):
        load(here / "cache.tar.gz")
    assert contents() == {}


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside"),
        member("ab/../../../outside"),
        member("/outside"),
        member("link", tarfile.SYMTYPE, "/etc"),
        member("link", tarfile.LNKTYPE, "ab/code.py"),
        member("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda info: f"{info.name} {info.type!r}",
)
def test_what_would_write_elsewhere_is_refused(here: Path, bad: tarfile.TarInfo) -> None:
    manifest = json.dumps({"format": archive.FORMAT, "key": cache_key()}).encode()
    with tarfile.open(here / "cache.tar.gz", "w:gz") as tar:
        first = tarfile.TarInfo(archive.MANIFEST)
        first.size = len(manifest)
        tar.addfile(first, io.BytesIO(manifest))
        tar.addfile(tarfile.TarInfo("ab/good.py"), io.BytesIO())
        tar.addfile(bad, io.BytesIO())
    with pytest.raises(UserError, match="which is no plain file inside of a cache: nothing of it was used"):
        load(here / "cache.tar.gz")
    assert contents() == {}
    assert not any(path.name == "outside" for path in here.rglob("*"))


@pytest.mark.parametrize("manifest", [None, b"", b"[]", b'{"format": 1}', b'{"format": 2, "key": "x"}'])
def test_other_archives_are_refused(here: Path, manifest: bytes | None) -> None:
    with tarfile.open(here / "cache.tar.gz", "w:gz") as tar:
        first = tarfile.TarInfo("photograph.jpg" if manifest is None else archive.MANIFEST)
        first.size = len(manifest or b"")
        tar.addfile(first, io.BytesIO(manifest or b""))
    with pytest.raises(UserError, match=r"is damaged|has format 2, this version of dflash-lit reads 1"):
        load(here / "cache.tar.gz")


def test_saving_replaces_a_file_only_when_it_is_complete(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    file = here / "cache.tar.gz"
    file.write_text("the last one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.os, "replace", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        save(file)
    assert file.read_text() == "the last one"
    assert sorted(path.name for path in here.iterdir()) == ["cache.tar.gz", "here"]


def test_the_commands(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(here / "cache.tar.gz")
    assert main(["cache", "save", file]) == 2
    assert capsys.readouterr().err == f"error: nothing has been compiled into {cache_dir()} yet\n"
    assert main(["cache", "load", file]) == 2
    assert capsys.readouterr().err == f"error: {file} is no file\n"
    filled()
    assert main(["cache", "save", file]) == 0
    assert f"in 4 files of {cache_key()}\n" in capsys.readouterr().out
    move(here / "there", monkeypatch)
    assert main(["cache", "load", file]) == 0
    assert capsys.readouterr().out == f"4 new files in {cache_dir()}\n"
