"""Folders of targets: bytes, fields of their configs, tokenizers, shards and indexes. What is loaded has to be what the files say, and finite."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dflash_lit.config import register
from dflash_lit.job import Job, quiet_libraries
from dflash_lit.job_data import JobData
from dflash_lit.target.ends import read_ends
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, resolve_path
from fuzzing.case import Case, Wrong
from fuzzing.damage import bytes_damaged, dumped, entry_damaged, json_damaged, text_edited, torn
from fuzzing.tiny_run import TINY, planned, quiet

__all__ = ["Fuzzed"]

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_INDEX = "model.safetensors.index.json"


class Fuzzed:
    """Plans runs on damaged targets, reads their weights, and lets them respond."""

    name = "target"

    def __init__(self, scratch: Path) -> None:
        register()
        quiet_libraries()
        logging.getLogger("transformers").setLevel(logging.CRITICAL)
        self.folders = []
        for number, tied in enumerate((True, False)):
            with torch.random.fork_rng():
                torch.manual_seed(number)
                model = Qwen3ForCausalLM(Qwen3Config(**_SIZES, tie_word_embeddings=tied))
            place = scratch / str(number)
            # The second in several files.
            model.save_pretrained(place, max_shard_size="1GB" if tied else "100KB")
            AutoTokenizer.from_pretrained(resolve_path(EMBEDDED)).save_pretrained(place)
            self.folders.append(place)

    def case(self, rng: random.Random, folder: Path) -> Case:
        place = folder / "target"
        shutil.copytree(rng.choice(self.folders), place)
        files = sorted(place.iterdir())
        about = rng.choices(
            (self._config, self._bytes, self._tensors, self._texts, self._entries, self._mixed), (30, 25, 15, 15, 10, 5)
        )[0](place, rng)
        names = ["target.path", str(place), *(path.name for path in files)]
        written = [*TINY, f"target.path={place}", f"paths.output_dir={folder}/run", f"data.cache_dir={folder}/cache"]

        def act() -> tuple[FrozenTarget, JobData, Any]:
            with quiet():
                cfg, plan = planned(written)
                with Job(cfg, plan) as job:
                    job.console.quiet = True
                    ends = read_ends(plan.info, device="cpu", dtype=torch.float32)
                    target = job.target()
                    assert isinstance(target, FrozenTarget)
                    return target, job.data(target), ends

        def check(found: tuple[FrozenTarget, JobData, Any]) -> None:
            _as_files(*found, place)

        # What a config may do to a drafter or to the data of a run is said with the run's own field.
        return Case(about, act, [*names, *_ALSO], check, may_write=["run", "cache"], limit_s=60)

    # -- what is done to a folder

    def _config(self, place: Path, rng: random.Random) -> str:
        path = place / rng.choice(["config.json"] * 6 + ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
        value, about = json_damaged(json.loads(path.read_text()), rng)
        path.write_bytes(dumped(value))
        return f"{path.name}: {about}"

    def _bytes(self, place: Path, rng: random.Random) -> str:
        path = rng.choice(sorted(place.iterdir()))
        change: Callable[..., tuple[bytes, str]] = rng.choice([bytes_damaged, bytes_damaged, torn])
        data, about = change(path.read_bytes(), rng)
        path.write_bytes(data)
        return f"{path.name}: {about}"

    def _texts(self, place: Path, rng: random.Random) -> str:
        path = rng.choice(sorted(place.glob("*.json")))
        data, about = text_edited(path.read_bytes(), rng)
        path.write_bytes(data)
        return f"{path.name}: {about}"

    def _tensors(self, place: Path, rng: random.Random) -> str:
        path = rng.choice(sorted(place.glob("*.safetensors")))
        tensors = load_file(path)
        name = rng.choice(sorted(tensors))
        value = tensors[name]
        match rng.randrange(6):
            case 0:
                tensors[name], about = value.to(rng.choice([torch.float16, torch.int32, torch.uint8, torch.bool])), "dtype"
                about = f"as {tensors[name].dtype}"
            case 1:
                tensors[name], about = value.reshape(-1)[: rng.randrange(value.numel() + 1)].contiguous(), "cut"
            case 2:
                tensors[name], about = value.t().contiguous() if value.ndim == 2 else value[None].contiguous(), "turned"
            case 3:
                del tensors[name]
                about = "missing"
            case 4:
                value.view(-1)[rng.randrange(value.numel())] = rng.choice([float("nan"), float("inf")])
                about = "one value"
            case _:
                tensors[rng.choice(["", f"{name}.", "model.layers.6.mlp.up_proj.weight", f"{name[:-6]}bias"])] = value.clone()
                about = "one more"
        save_file(tensors, path, metadata={"format": "pt"})
        return f"{path.name}: {name} {about}"

    def _entries(self, place: Path, rng: random.Random) -> str:
        return entry_damaged(rng.choice(sorted(place.iterdir())), rng)

    def _mixed(self, place: Path, rng: random.Random) -> str:
        """Files of another target among these, as a copy that was broken off leaves them."""
        other = rng.choice(self.folders)
        path = rng.choice(sorted(other.iterdir()))
        shutil.copy(path, place / path.name)
        if path.name != _INDEX and rng.random() < 0.5:
            gone = rng.choice(sorted(place.glob("*.safetensors")))
            gone.unlink()
            return f"{path.name} of another, {gone.name} gone"
        return f"{path.name} of another"


_ALSO = ("drafter.", "data.", "rope_type", "the target's dense attention")


def _as_files(target: FrozenTarget, data: JobData, ends: Any, place: Path) -> None:
    stored = {name: value for path in _weights(place) for name, value in load_file(path).items()}
    for name, value in target.model.state_dict().items():
        if not bool(value.isfinite().all()):
            raise Wrong(f"{name} is not finite")
        if name in stored and not torch.equal(value, stored[name].to(value.dtype)):
            raise Wrong(f"{name} is not that of the files")
    for name in sorted(stored.keys() - target.model.state_dict().keys()):
        if name.endswith(".bias") or name.startswith("model.layers.6."):
            raise Wrong(f"{name} was left out")
    own = target.ends()
    if not torch.equal(own.embed, ends.embed) or not torch.equal(own.head, ends.head):
        raise Wrong("a drafter is given other ends than the target has")
    rows = data.module.train
    batch = rows.take(range(len(rows)))
    ids = torch.from_numpy(batch.input_ids).long()
    if not bool(((ids >= 0) & (ids < target.info.text.vocab_size)).all()):
        raise Wrong("token ids beyond the vocabulary")
    documents, positions = (torch.from_numpy(getattr(batch, name)) for name in ("document_ids", "position_ids"))
    if not bool(target.features(ids, documents, positions, [1, 2]).isfinite().all()):
        raise Wrong("features that are not finite")


def _weights(place: Path) -> list[Path]:
    """Those that count: the one file, if it is there."""
    if (place / "model.safetensors").is_file():
        return [place / "model.safetensors"]
    return [place / name for name in sorted(set(json.loads((place / _INDEX).read_text())["weight_map"].values()))]
