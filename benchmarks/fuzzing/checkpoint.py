"""Saved training checkpoints: bytes, entries, kinds of file, other settings. Whoever goes on from one comes to where nothing was damaged."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from dflash_lit.checkpoints.file import load, save
from dflash_lit.config import register
from dflash_lit.drafter.model import Drafter
from dflash_lit.export import drafter_from_checkpoint
from dflash_lit.job import Job, quiet_libraries
from dflash_lit.module import DrafterModule
from fuzzing.case import Case, Wrong
from fuzzing.damage import bytes_damaged, entry_damaged, file_damaged, odd_value
from fuzzing.tiny_run import TINY, fitted, planned, quiet

__all__ = ["Fuzzed"]

_COMMENT = b"dflash_lit sha256/4MiB="
_OTHER = (
    "drafter.anchors=5",
    "drafter.block_size=5",
    "drafter.layers=2",
    "drafter.head_dim=32",
    "drafter.intermediate_size=64",
    "seed=1",
    "optimizer.lr=0.5",
    "optimizer.weight_decay=0.5",
    "optimizer.kind=adamw",
    "data.row_tokens=256",
    "data.rows_per_batch=2",
    "trainer.accumulate_grad_batches=1",
    "drafter.feature_noise=0.5",
    "objective.alpha=0.25",
)


class _Code:
    """Writes a file when it is unpickled by a reader that runs code."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("has_run",)


class Fuzzed:
    """Goes on from damaged checkpoints, and exports their drafters."""

    name = "checkpoint"

    def __init__(self, scratch: Path) -> None:
        register()
        quiet_libraries()
        self.cache = scratch / "cache"
        often = (
            "+callbacks.often._target_=callbacks.checkpoint.SafeCheckpoint",
            f"+callbacks.often.dirpath={scratch}/often",
            "+callbacks.often.every_n_train_steps=2",
            "+callbacks.often.save_top_k=-1",
        )
        with quiet():
            cfg, plan = planned([*TINY, f"paths.output_dir={scratch}/run", f"data.cache_dir={self.cache}", *often])
            job = Job(cfg, plan)
            job.console.quiet = True
            self.target = job.target()
            self.data = job.data(self.target).module
            trainer, module = fitted(cfg, plan, self.target, self.data)  # type: ignore[arg-type]
        self.weights = {name: value.clone() for name, value in module.drafter.state_dict().items()}
        self.steps = trainer.global_step
        found = {load(path)["global_step"]: path for path in (scratch / "often").iterdir()}
        # Of the middle, so that there is something to go on with.
        self.bytes = found[2].read_bytes()
        self.saved = load(found[2])

    def case(self, rng: random.Random, folder: Path) -> Case:
        place = folder / "run" / "checkpoints"
        place.mkdir(parents=True)
        path = place / "last.ckpt"
        path.write_bytes(self.bytes)
        (folder / "mine.ckpt").write_bytes(b"nobody's to remove")
        extra: list[str] = []
        check: Callable[[Any], None] | None = self._same
        names = [str(path), "ckpt_path"]
        kind = rng.choices(
            ("bytes", "entry", "signed bytes", "value", "code", "settings", "kind", "names"), (30, 8, 10, 34, 5, 4, 6, 3)
        )[0]
        match kind:
            case "bytes":
                data, about = file_damaged(self.bytes, rng, text=False, gentle=rng.random() < 0.5)
                path.write_bytes(data)
                if rng.random() < 0.2:  # the other is to be recommended, and is whole
                    (place / "step=2.ckpt").write_bytes(self.bytes)
                    names = [f"use {place / 'step=2.ckpt'}"] if data != self.bytes else names
            case "entry":
                about = entry_damaged(path, rng)
            case "signed bytes":
                data, about = bytes_damaged(_unsigned(self.bytes), rng, gentle=True)
                path.write_bytes(_signed(data))
                check = self._usable
            case "value":
                changed, where, about = _value_changed(self.saved, rng)
                about = f"{where} {about}"
                path.write_bytes(_signed(_archive(changed)))
                check = self._usable if where.startswith(_SAYS) else self._same
            case "code":
                about, check = self._code(path, rng), None
            case "settings":
                extra = [rng.choice(_OTHER)]
                about, names, check = extra[0], [extra[0].split("=")[0].split(".")[-1], "drafter"], None
                if extra[0].startswith(("data.rows_per_batch", "data.row_tokens", "trainer")):
                    names, check = [*names, "trainer.max_steps", "batches"], None
            case "kind":
                about, check = self._other_kind(path, rng), None
            case _:
                changed = copy.deepcopy(self.saved)
                for state in changed["callbacks"].values():
                    if "best_k_models" in state:
                        victim = rng.choice(
                            [f"{folder}/mine.ckpt", f"{folder}/run/checkpoints/../../mine.ckpt", "../mine.ckpt"]
                        )
                        state["best_k_models"] = {victim: torch.tensor(rng.choice([-1.0, 9.0, float("nan")]))}
                        state |= {"best_model_path": victim, "kth_best_model_path": victim, "last_model_path": victim}
                path.write_bytes(_signed(_archive(changed)))
                about = "best checkpoints named elsewhere"
        if kind != "settings" and rng.random() < 0.15:
            return Case(
                f"export of {kind}: {about}",
                lambda: drafter_from_checkpoint(path),
                [str(path), "drafter"],
                None if check is None else self._exportable if check == self._usable or kind == "value" else self._exported,
            )
        written = [*TINY, f"paths.output_dir={folder}/again", f"data.cache_dir={self.cache}", f"ckpt_path='{path}'", *extra]

        def act() -> tuple[L.Trainer, DrafterModule]:
            with quiet():
                cfg, plan = planned(written)
                return fitted(cfg, plan, self.target, self.data)  # type: ignore[arg-type]

        return Case(f"{kind}: {about}", act, names, check, may_write=["again"], limit_s=60)

    # -- what is done to a file

    def _code(self, path: Path, rng: random.Random) -> str:
        evil: Any = {**self.saved, rng.choice(["callbacks", "extra", "state_dict"]): _Code()}
        match rng.randrange(4):
            case 0:
                path.write_bytes(pickle.dumps(evil if rng.random() < 0.5 else _Code(), protocol=rng.choice([0, 2, 4])))
                return "a bare pickle"
            case 1:
                torch.save(evil, path)
                return "in an archive without a checksum"
            case 2:
                path.write_bytes(_signed(_archive(evil)))
                return "in a signed archive"
            case _:
                torch.save(evil, path, _use_new_zipfile_serialization=False)
                return "as torch.save wrote it long ago"

    def _other_kind(self, path: Path, rng: random.Random) -> str:
        kind = rng.choice(("empty", "text", "json", "zip", "signed zip", "tensor", "state only", "list", "weights"))
        path.unlink()
        match kind:
            case "empty":
                path.touch()
            case "text":
                path.write_text("step 6\n")
            case "json":
                path.write_text(json.dumps({"state_dict": {}}))
            case "zip" | "signed zip":
                made = io.BytesIO()
                with zipfile.ZipFile(made, "w") as archive:
                    archive.writestr("a/data.pkl", "nothing")
                path.write_bytes(_signed(made.getvalue()) if kind == "signed zip" else made.getvalue())
            case "tensor":
                torch.save(torch.zeros(3), path)
            case "state only":
                torch.save(self.saved["state_dict"], path)
            case "list":
                torch.save([self.saved["state_dict"]], path)
            case _:
                save({"state_dict": self.saved["state_dict"], "global_step": 2}, path)
        return kind

    # -- what came of it

    def _same(self, found: tuple[L.Trainer, DrafterModule]) -> None:
        self._usable(found)
        for name, value in found[1].drafter.state_dict().items():
            if not torch.equal(value, self.weights[name]):
                raise Wrong(f"{name} is not as in the run that was not damaged")

    def _usable(self, found: tuple[L.Trainer, DrafterModule]) -> None:
        """It went on to its end, and what it ended with is a drafter."""
        trainer, module = found
        if trainer.global_step != self.steps:
            raise Wrong(f"{trainer.global_step} steps, not {self.steps}")
        for name, value in module.drafter.state_dict().items():
            if not bool(value.isfinite().all()):
                raise Wrong(f"{name} is not finite")

    def _exported(self, found: Drafter) -> None:
        self._exportable(found)
        for name, value in found.state_dict().items():
            if not torch.equal(value, self.saved["state_dict"][f"drafter.{name}"]):
                raise Wrong(f"{name} is not the checkpoint's")

    def _exportable(self, found: Drafter) -> None:
        for name, value in found.state_dict().items():
            if not bool(value.isfinite().all()) or value.dtype != torch.float32:
                raise Wrong(f"{name} is {value.dtype}, or not finite")


_SAYS = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks")
"""A signed file that says something else there is another checkpoint, from which another run follows."""


def _archive(value: Any) -> bytes:
    """As ``torch.save`` writes it. Not by the product's writer, which refuses what it could not read."""
    made = io.BytesIO()
    torch.save(value, made)
    return made.getvalue()


def _unsigned(data: bytes) -> bytes:
    place = data.rindex(_COMMENT)
    return data[: place - 2]


def _signed(data: bytes) -> bytes:
    """With the checksum of what is there now, as the product ends a file; without the two bytes of the archive's comment length."""
    if data.endswith(b"\0\0"):
        data = data[:-2]
    pieces = [hashlib.sha256(data[at : at + 2**22]).digest() for at in range(0, len(data), 2**22)]
    comment = _COMMENT + hashlib.sha256(b"".join(pieces)).hexdigest().encode()
    return data + len(comment).to_bytes(2, "little") + comment


def _value_changed(saved: dict[str, Any], rng: random.Random) -> tuple[dict[str, Any], str, str]:
    """A copy with one entry somewhere removed, replaced or changed; where, and what."""
    changed = _copied(saved)
    places: list[tuple[Any, Any, str]] = []

    def walk(node: Any, where: str) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            name = f"{where}.{key}" if where else str(key)
            places.append((node, key, name))
            if isinstance(node[key], dict | list) and node[key]:
                walk(node[key], name)

    walk(changed, "")
    # The parts are of very different sizes: each as often.
    part = rng.choice(sorted({name.split(".")[0] for _, _, name in places}))
    node, key, where = rng.choice([place for place in places if place[2].split(".")[0] == part])
    value = node[key]
    if isinstance(value, Tensor) and rng.random() < 0.85:
        node[key], about = _tensor_changed(value, rng)
    elif rng.random() < 0.25:
        del node[key]
        about = "removed"
    elif type(value) in (int, float) and rng.random() < 0.5:
        node[key] = rng.choice([value + 1, value - 1, -value, value * 1000 + 7, float(value), str(value), value != 0])
        about = f"= {node[key]!r}"
    else:
        node[key] = odd_value(rng)
        about = f"= {str(node[key])[:30]!r}"
    return changed, where, about


def _copied(value: Any) -> Any:
    """Containers are new, tensors the same."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _tensor_changed(value: Tensor, rng: random.Random) -> tuple[Tensor, str]:
    match rng.randrange(6):
        case 0:
            dtype = rng.choice(
                [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64]
            )
            return value.to(dtype), f"as {dtype}"
        case 1:
            return value.reshape(-1)[: rng.randrange(value.numel())].clone(), "cut"
        case 2:
            return (value.t().contiguous() if value.ndim == 2 else value[None].clone()), "turned"
        case 3:
            value = value.clone()
            value.view(-1)[rng.randrange(value.numel())] = rng.choice([float("nan"), float("inf"), 1e30, -1.0])
            return value, "one value"
        case 4:
            return value.to_sparse() if rng.random() < 0.5 else value.expand(2, *value.shape), "in another layout"
        case _:
            return torch.zeros((), dtype=value.dtype), "a scalar"
