"""``dflash-lit cache``: look at the compile cache, delete it, carry it to other hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_lit.compilation import archive
from dflash_lit.compilation.cache import all_caches, cache_dir, cache_key, chosen_by_user, clear

__all__ = ["add_options"]


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    info = actions.add_parser("info", help="say where the compiled graphs are, and how large")
    info.set_defaults(run=_info)
    remove = actions.add_parser("clear", help="delete this machine's; runs that use it compile again")
    remove.add_argument("--all", action="store_true", help="those of other versions and GPUs too")
    remove.set_defaults(run=_clear)
    save = actions.add_parser("save", help="write this machine's to a file, for other hosts of its kind")
    save.add_argument("file", type=Path, help="a .tar.gz to write")
    save.set_defaults(run=_save)
    load = actions.add_parser("load", help="add a saved file to this machine's; it is code: load only what you trust")
    load.add_argument("file", type=Path, help="what `save` has written")
    load.set_defaults(run=_load)


def _info(args: argparse.Namespace) -> int:
    caches = all_caches()
    print(f"folder  {cache_dir()}")
    print(f"key     {cache_key()}")
    print(f"size    {_usage(*caches.pop(cache_key(), (0, 0)))}")
    for key, (files, size) in caches.items():
        print(f"other   {_usage(files, size)} of {key}")
    if caches:
        print("        `dflash-lit cache clear --all` deletes those of other versions, GPUs and code too")
    if chosen_by_user() not in (None, cache_dir()):
        print(
            f"note    TORCHINDUCTOR_CACHE_DIR={chosen_by_user()} is set: runs use that folder, which none of these commands touches"
        )
    return 0


def _clear(args: argparse.Namespace) -> int:
    before = all_caches()
    cleared = clear(everything=args.all)
    for key in cleared:
        print(f"deleted {_usage(*before.get(key, (0, 0)))} of {key}")
    if not cleared:
        print(f"nothing to delete in {cache_dir().parent if args.all else cache_dir()}")
    return 0


def _save(args: argparse.Namespace) -> int:
    count = archive.save(args.file)
    print(f"{args.file}: {_usage(count, args.file.stat().st_size)} of {cache_key()}")
    return 0


def _load(args: argparse.Namespace) -> int:
    print(f"{archive.load(args.file)} new files in {cache_dir()}")
    return 0


def _usage(files: int, size: int) -> str:
    return f"{size / 1e6:.1f} MB in {files} files"
