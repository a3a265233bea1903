"""A compile cache as one file, for other hosts of the same kind.

A copy of the folder, not ``torch.compiler.save_cache_artifacts()``: that one knows only what the calling process has compiled, so
the training run itself would have to write it, and it leaves out Triton kernels that stand outside of graphs, such as those of the
loss. The folder has them, can be saved at any time by any process, and its format is no torch version's.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import time
import zlib
from contextlib import suppress
from pathlib import Path, PurePosixPath

from dflash_lit.compilation.cache import cache_dir, cache_key, cache_root, chosen_by_user
from dflash_lit.errors import UserError

__all__ = ["load", "save"]

MANIFEST = "dflash_lit_compile_cache.json"
FORMAT = 1


def save(file: Path) -> int:
    """Write this machine's cache to ``file``, a .tar.gz; the number of files in it.

    Complete or not at all. No run should be compiling C++ meanwhile: compilers, unlike Inductor and Triton, write in place.

    Raises:
        UserError: if there is nothing to save or ``file`` cannot be written.
    """
    folder, count = cache_dir(), 0
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and _worth_keeping(path.relative_to(folder)))
    if not paths:
        elsewhere = f"; runs here use TORCHINDUCTOR_CACHE_DIR={chosen_by_user()}" if chosen_by_user() else ""
        raise UserError(f"nothing has been compiled into {folder} yet{elsewhere}")
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(temporary, "w:gz", compresslevel=6) as tar:
            _add(tar, MANIFEST, json.dumps({"format": FORMAT, "key": cache_key()}).encode())
            for path in paths:
                # Deleted since it was listed.
                with suppress(FileNotFoundError):
                    _add(tar, path.relative_to(folder).as_posix(), path.read_bytes())
                    count += 1
        os.replace(temporary, file)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _worth_keeping(path: Path) -> bool:
    """Not locks, nor what a process has not finished writing."""
    return path.suffix not in (".lock", ".tmp") and not any(part.startswith((".", "tmp.pid", "in_use_")) for part in path.parts)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), int(time.time())
    tar.addfile(member, io.BytesIO(content))


def load(file: Path) -> int:
    """Put the entries of ``file`` into this machine's cache, beside those there; the number that were new.

    The file is code that later runs execute: load only what you or people you trust have saved.

    Raises:
        UserError: if ``file`` is damaged, of another kind of machine, or would write elsewhere. Nothing is changed then.
    """
    if not file.is_file():
        raise UserError(f"{file} is no file")
    folder = cache_dir()
    staging = cache_root() / f".{folder.name}.{os.getpid()}.{time.monotonic_ns()}.loading"
    try:
        staging.mkdir(parents=True)
        _unpack(file, staging)
        return _merge(staging, folder)
    except (gzip.BadGzipFile, zlib.error, tarfile.TarError, EOFError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{file} is damaged, cut short or not written by `dflash-lit cache save`: save or copy it again"
        ) from None
    except OSError as error:
        raise UserError(f"{file} cannot be loaded into {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _unpack(file: Path, folder: Path) -> None:
    with gzip.open(file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        members = iter(tar)
        _check_manifest(file, tar, next(members, None))
        for member in members:
            name = PurePosixPath(member.name)
            content = tar.extractfile(member) if member.isfile() else None
            if content is None or name.is_absolute() or ".." in name.parts:
                raise UserError(
                    f"{file} holds {member.name!r}, which is no plain file inside of a cache: nothing of it was used"
                )
            path = folder.joinpath(*name.parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                shutil.copyfileobj(content, out)
        # A tar that was cut may look whole. The checksum comes at the very end.
        while stream.read(1 << 20):
            pass


def _check_manifest(file: Path, tar: tarfile.TarFile, member: tarfile.TarInfo | None) -> None:
    content = tar.extractfile(member) if member is not None and member.name == MANIFEST else None
    if content is None:
        raise KeyError(MANIFEST)
    manifest = json.load(content)
    if manifest["format"] != FORMAT:
        raise UserError(f"{file} has format {manifest['format']}, this version of dflash-lit reads {FORMAT}")
    if manifest["key"] != cache_key():
        raise UserError(
            f"{file} was saved for {manifest['key']}, this machine compiles for {cache_key()}: save it on a machine with the same "
            "versions, GPU and code"
        )


def _merge(staging: Path, folder: Path) -> int:
    """Move new files, each at one moment. Entries are found by content: those already there are as good."""
    new = 0
    for path in sorted(path for path in staging.rglob("*") if path.is_file()):
        target = folder / path.relative_to(staging)
        if target.exists():
            continue
        if path.name.startswith("__grp__"):
            _point_to(path, target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        new += 1
    return new


def _point_to(group: Path, folder: Path) -> None:
    """Triton lists the files of a kernel with their full paths, and recompiles if one is not there. They lie beside their list."""
    with suppress(ValueError, KeyError):
        listed = json.loads(group.read_text(encoding="utf-8"))
        listed["child_paths"] = {name: str(folder / Path(path).name) for name, path in listed["child_paths"].items()}
        group.write_text(json.dumps(listed), encoding="utf-8")
