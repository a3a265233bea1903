"""Exported folders: bytes, fields, tensors and entries of the folder. What is loaded has to be what was exported, or what the file says."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.export import load_drafter, save_drafter
from fuzzing.case import Case, Wrong, logged
from fuzzing.damage import dumped, entry_damaged, file_damaged, json_damaged

__all__ = ["Fuzzed"]

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "block_size": 4,
    "mask_token_id": 63,
    "target_layer_ids": (1, 2),
    "num_target_layers": 6,
}
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"path_width": 8, "path_candidates": 5},
    {"sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")},
)


class Fuzzed:
    """Loads damaged exports, and writes over them."""

    name = "export"

    def __init__(self, scratch: Path) -> None:
        self.folders, self.drafters = [], []
        for number, changes in enumerate(_KINDS):
            with torch.random.fork_rng():
                torch.manual_seed(number)
                drafter = Drafter(DrafterConfig(**{**_SIZES, **changes}))
                with torch.no_grad():
                    for parameter in drafter.parameters():
                        parameter.normal_()
            self.folders.append(save_drafter(drafter, scratch / str(number)))
            self.drafters.append(load_drafter(self.folders[-1]))

    def case(self, rng: random.Random, folder: Path) -> Case:
        kind = rng.randrange(len(_KINDS))
        place = folder / "drafter"
        shutil.copytree(self.folders[kind], place)
        summed = rng.random() < 0.6
        if not summed:  # as exports of others are: what is damaged there is not seen, and that is said
            described = json.loads((place / "config.json").read_text())
            del described["dflash_config"]["sha256"]
            (place / "config.json").write_text(json.dumps(described))
        weights = [path for path in sorted(place.iterdir()) if path.suffix == ".safetensors"]
        file = rng.choice(weights)
        names = ["config.json", *(path.name for path in weights)]

        def check(found: tuple[Drafter, str]) -> None:
            if summed:
                return self._same(found[0], kind)
            if "has no checksum" not in found[1]:
                raise Wrong("taken without a checksum, and nothing said")
            return _as_files(found[0], place)

        def edited(found: tuple[Drafter, str]) -> None:
            _as_written(found[0], place)

        verdict = check
        match rng.randrange(10):
            case 0 | 1 | 2:
                data, about = file_damaged(file.read_bytes(), rng, text=False, gentle=rng.random() < 0.7)
                file.write_bytes(data)
                about = f"{file.name}: {about}"
            case 3:
                config = place / "config.json"
                data, about = file_damaged(config.read_bytes(), rng, gentle=rng.random() < 0.7)
                config.write_bytes(data)
                about, verdict = f"config.json: {about}", edited
            case 4 | 5:
                config = place / "config.json"
                described, about = json_damaged(json.loads(config.read_text()), rng)
                config.write_bytes(dumped(described))
                about, verdict = f"config.json: {about}", edited
            case 6:
                about = f"{file.name}: {self._tensors(file, rng)}"
            case 7 | 8:
                about = entry_damaged(rng.choice([*weights, place / "config.json"]), rng)
            case _:
                return self._written_over(rng, place, kind)
        return Case(f"{about}{'' if summed else ', without checksums'}", lambda: _loaded(place), names, verdict)

    def _tensors(self, file: Path, rng: random.Random) -> str:
        tensors = load_file(file)
        name = rng.choice(sorted(tensors))
        value = tensors[name]
        match rng.randrange(7):
            case 0:
                tensors[name], about = (
                    value.to(rng.choice([torch.float32, torch.float16, torch.int32, torch.uint8, torch.bool])),
                    "dtype",
                )
                about = f"{name} as {tensors[name].dtype}"
            case 1:
                tensors[name], about = value.reshape(-1)[: rng.randrange(value.numel() + 1)].contiguous(), f"{name} cut"
            case 2:
                tensors[name], about = value.t().contiguous() if value.ndim == 2 else value[None].contiguous(), f"{name} turned"
            case 3:
                del tensors[name]
                about = f"{name} missing"
            case 4:
                tensors[rng.choice(["", "a", f"{name}.", "embed_tokens.weight"])], about = value.clone(), "one more"
            case 5:
                value.view(-1)[rng.randrange(value.numel())] = rng.choice([float("nan"), float("inf"), 1e30])
                about = f"{name}: one value"
            case _:
                other = rng.choice(sorted(tensors))
                tensors[name], tensors[other] = tensors[other], tensors[name]
                about = f"{name} and {other} exchanged"
        save_file(tensors, file, metadata={"format": "pt"})
        return about

    def _same(self, found: Drafter, kind: int) -> None:
        wanted = self.drafters[kind]
        if found.config != wanted.config:
            raise Wrong("another config")
        for name, value in wanted.state_dict().items():
            if not torch.equal(found.state_dict()[name], value):
                raise Wrong(f"tensor {name} is another")

    def _written_over(self, rng: random.Random, place: Path, kind: int) -> Case:
        """An export to a folder that holds, or is, something else: only ever another export is replaced."""
        drafter = self.drafters[kind]
        what = rng.choice(("file", "notes", "link out", "link", "export", "below a file", "nul", "long", "not finite"))
        target = place
        if what == "file":
            shutil.rmtree(place)
            place.write_text("mine")
        elif what == "notes":
            (place / "notes.txt").write_text("mine")
        elif what in ("link out", "link"):
            away = place.parent / "away"
            place.rename(away)
            if what == "link out":
                (away / "notes.txt").write_text("mine")
            place.symlink_to("away")
        elif what == "below a file":
            target = place / "config.json" / "drafter"
        elif what == "nul":
            target = place / "a\0b"
        elif what == "long":
            target = place.parent / ("x" * 300)
        elif what == "not finite":
            drafter = Drafter(drafter.config)
            with torch.no_grad():
                drafter.norm.weight[0] = float("nan")
        # A link to an export may be replaced by one; what it points to stays, or is what is replaced.
        writes = ["drafter", "away/config.json", "away/model.safetensors"] if what in ("link", "export") else []
        good = what in ("link", "export")

        def check(_: Any) -> None:
            if not good:
                raise Wrong("written")
            self._same(load_drafter(place), kind)

        names = ["drafter", "notes.txt", "norm.weight", "x" * 300, "a"]
        return Case(
            f"export onto: {what}",
            lambda: save_drafter(drafter, target),
            names,
            check,
            may_write=[*writes, "away"] if good else [],
        )


def _loaded(place: Path) -> tuple[Drafter, str]:
    """The drafter, and what was logged."""
    with logged("dflash_lit.export") as said:
        return load_drafter(place), said.getvalue()


def _as_files(found: Drafter, place: Path) -> None:
    """Without a checksum the values are those of the files, whatever those are."""
    for file in place.glob("*.safetensors"):
        for name, value in load_file(file).items():
            if file.stem == "path_head" and not found.config.path_width:
                continue
            if not torch.equal(found.state_dict()[name], value.float()):
                raise Wrong(f"tensor {name} is not that of the file")


def _as_written(found: Drafter, place: Path) -> None:
    """Whoever edits config.json may: then the drafter is as that says, and its parts are finite."""
    said = json.loads((place / "config.json").read_text(encoding="utf-8"))
    own = said["dflash_config"]
    config = found.config
    told = {**said, "mask_token_id": own["mask_token_id"], "block_size": own.get("block_size", said.get("block_size"))}
    told["target_layer_ids"] = tuple(own["target_layer_ids"])
    for name, default in {"causal": False, "target_fingerprint": ""}.items():
        told[name] = default if own.get(name) is None else own[name]  # null is what others write for "not set"
    if not config.slides:
        told["layer_types"], told["sliding_window"] = (), None
    else:
        told["layer_types"] = tuple(said["layer_types"])
    for name in config.__dataclass_fields__:
        if name in ("path_width", "path_candidates", "rope_parameters", "initializer_range"):
            continue
        if (
            name not in told
            or told[name] != getattr(config, name)
            or isinstance(told[name], bool) != isinstance(getattr(config, name), bool)
        ):
            raise Wrong(f"{name}={getattr(config, name)!r}, the file says {told.get(name)!r}")
    head = own.get("path_head")
    if (head or {}).get("width", 0) != config.path_width:
        raise Wrong("path_head")
    slots = config.block_size
    with torch.no_grad():
        cos, sin = (
            found.rotary(torch.arange(min(slots, 64))[None]) if hasattr(found, "rotary") else (torch.ones(1), torch.ones(1))
        )
    if not bool(cos.isfinite().all() and sin.isfinite().all()):
        raise Wrong("rotary embedding that is not finite")
    if not torch.tensor(config.rms_norm_eps).isfinite() or config.rms_norm_eps < 0:
        raise Wrong(f"rms_norm_eps={config.rms_norm_eps}")
