"""The served format: a folder that vLLM, SGLang and z-lab's loader read.

``model.safetensors`` in bf16 without prefix, embedding, head or rotary buffers (11 tensors a layer and 3), and a
``config.json`` with the fields those loaders look for, old and new places of the rotary settings included. A path head is in a file
of its own, ``path_head.safetensors``, and ``dflash_config`` says so: those who do not know it find an ordinary drafter. It also has the
files' checksums.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lit.checkpoints.file import load
from dflash_lit.drafter.config import FULL, SLIDING, DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.files import file_digest, read_json, refuse_no_file

__all__ = [
    "drafter_from_checkpoint",
    "drafter_of",
    "load_drafter",
    "read_config",
    "refuse_other",
    "save_drafter",
    "served_config",
]

_WEIGHTS, _PATH_HEAD, _CONFIG = "model.safetensors", "path_head.safetensors", "config.json"
_log = logging.getLogger(__name__)


def served_config(config: DrafterConfig, *, auto_map: bool = False) -> dict[str, Any]:
    """``config.json`` of an exported drafter.

    Args:
        auto_map: name the remote-code class that z-lab's Transformers loader asks for; SGLang does not want the field.
    """
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    described: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "causal": config.causal,
            "target_fingerprint": config.target_fingerprint,
        },
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": config.initializer_range,
        "layer_types": config.each_layer(FULL, SLIDING),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.slides,
        "max_window_layers": config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        # Transformers 5 reads rope_parameters; servers read the two older fields.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else rope,
    }
    if config.path_width:
        described["dflash_config"]["path_head"] = {"width": config.path_width, "candidates": config.path_candidates}
    if auto_map:
        described["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    return described


def save_drafter(drafter: Drafter, folder: str | Path, *, auto_map: bool = False) -> Path:
    """Write ``folder`` (replaced if it exists); complete or not at all.

    Raises:
        UserError: if a weight is not finite, naming its tensor, ``folder`` holds anything but an export, or it cannot be written.
    """
    folder = Path(folder)
    try:
        return _save(drafter, folder, auto_map=auto_map)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: a NUL in the name
        raise UserError(
            f"{folder}: cannot be written ({getattr(error, 'strerror', None) or error}); name another folder"
        ) from error


def refuse_other(folder: Path) -> None:
    """Refuse to export to a folder that is there and is no export: it would be replaced.

    Raises:
        UserError: naming what it holds.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder to export to")
    if other := {path.name for path in folder.iterdir()} - {_WEIGHTS, _PATH_HEAD, _CONFIG}:
        raise UserError(f"{folder}: holds {sorted(other)[0]!r}, which is no exported drafter; name a new folder")


def _save(drafter: Drafter, folder: Path, *, auto_map: bool) -> Path:
    refuse_other(folder)
    files: dict[str, dict[str, Tensor]] = {}
    for name, value in drafter.state_dict().items():
        if not bool(value.isfinite().all()):
            raise UserError(f"export: tensor {name!r} has values that are not finite; nothing was written")
        file = _PATH_HEAD if name.startswith("path_head.") else _WEIGHTS
        files.setdefault(file, {})[name] = value.detach().to("cpu", torch.bfloat16).contiguous()
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for file, weights in files.items():
            save_file(weights, made / file, metadata={"format": "pt"})
        described = served_config(drafter.config, auto_map=auto_map)
        described["dflash_config"]["sha256"] = {file: file_digest(made / file) for file in files}
        text = json.dumps(described, indent=2)
        (made / _CONFIG).write_text(text + "\n", encoding="utf-8")
        # Temporary folders and safetensors files are private; a server runs as another user.
        made.chmod(0o755)
        for file in files:
            (made / file).chmod(0o644)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
            os.replace(folder, old / "old")
            try:
                os.replace(made, folder)
            except OSError:
                os.replace(old / "old", folder)
                old.rmdir()
                raise
            if (old / "old").is_symlink():  # what it leads to is not ours
                (old / "old").unlink()
            shutil.rmtree(old)
        else:
            os.replace(made, folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return folder


def _described(folder: Path) -> dict[str, Any]:
    """``config.json`` as it is."""
    path = folder / _CONFIG
    raw = read_json(path, "give the folder of an exported drafter")
    if not isinstance(raw, dict) or not isinstance(raw.get("dflash_config"), dict):
        raise UserError(f"{path}: has no dflash_config; is this a DFlash drafter?")
    return raw


def read_config(folder: str | Path) -> DrafterConfig:
    """The ``config.json`` of an exported folder; UserError naming file and field where it is wrong."""
    folder = Path(folder)
    path, raw = folder / _CONFIG, _described(folder)
    own = raw["dflash_config"]
    if raw.get("attention_bias"):
        raise UserError(f"{path}: attention_bias=true is not supported")

    def read(name: str, kind: Any, where: dict[str, Any] = raw) -> Any:
        if name not in where:
            raise UserError(f"{path}: field {name!r} is missing")
        value = where[name]
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        # What a float cannot hold is no size or number of a model either.
        if wrong or (isinstance(value, int | float) and not abs(value) < 1e15):
            raise UserError(f"{path}: field {name!r} cannot be {str(value)[:60]!r}")
        return value

    number = (int, float)
    paths: dict[str, int] = {}
    if "path_head" in own:
        described = read("path_head", dict, own)
        paths = {f"path_{name}": read(name, int, described) for name in ("width", "candidates")}
    layers = read("target_layer_ids", list, own)
    if not all(type(layer) is int for layer in layers):
        raise UserError(f"{path}: field 'target_layer_ids' cannot be {layers!r}")
    kinds = read("layer_types", list) if raw.get("layer_types") is not None else []
    slides = SLIDING in kinds
    if other := {str(kind) for kind in kinds} - {FULL, SLIDING}:
        raise UserError(f"{path}: layer_types has {sorted(other)[0]!r}; only {FULL} and {SLIDING} are supported")
    if slides and own.get("causal") is None:
        raise UserError(
            f"{path}: has sliding layers, whose blocks servers take for causal unless dflash_config.causal says; add it"
        )
    rope = raw.get("rope_parameters")
    if rope is None:  # as Transformers 4 and servers have it
        scaling = read("rope_scaling", dict) if raw.get("rope_scaling") is not None else {}
        rope = {"rope_type": "default", **scaling, "rope_theta": read("rope_theta", number)}
    else:
        read("rope_theta", number, read("rope_parameters", dict))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    whole = (*sizes, "vocab_size", "num_target_layers", "max_position_embeddings")
    values: dict[str, Any] = {
        **{name: read(name, int) for name in whole},
        "block_size": read("block_size", int, own if "block_size" in own else raw),
        "mask_token_id": read("mask_token_id", int, own),
        "target_layer_ids": tuple(layers),
        "rms_norm_eps": read("rms_norm_eps", number),
        "causal": read("causal", bool, own) if own.get("causal") is not None else False,
        "layer_types": tuple(kinds) if slides else (),
        "sliding_window": read("sliding_window", int) if slides else None,
        "rope_parameters": rope,
        "initializer_range": read("initializer_range", number) if raw.get("initializer_range") is not None else 0.02,
        "target_fingerprint": read("target_fingerprint", str, own) if own.get("target_fingerprint") is not None else "",
        **paths,
    }
    try:
        return DrafterConfig(**values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def load_drafter(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Drafter:
    """Read an exported folder. Files that others wrote may have no checksum there: that is logged, since damage would not be seen.

    Raises:
        UserError: naming the file and field or tensor that is missing, superfluous, of the wrong shape or kind, or not finite, or the
            file whose bytes are not those that were written.
    """
    folder = Path(folder)
    config = read_config(folder)
    found = _described(folder)["dflash_config"].get("sha256")
    sums = {} if found is None else found
    if not isinstance(sums, dict):
        raise UserError(f"{folder / _CONFIG}: field 'sha256' cannot be {str(sums)[:60]!r}")
    files = (_WEIGHTS, _PATH_HEAD) if config.path_width else (_WEIGHTS,)
    # Before anything of these sizes is made.
    _check_shapes(config, folder, {file: _shapes(folder / file) for file in files})
    drafter = Drafter(config)
    for file in files:
        path = folder / file
        try:
            weights, digest = load_file(path), file_digest(path) if file in sums else None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read ({error})") from error
        for name, value in sorted(weights.items()):
            if not value.is_floating_point():
                raise UserError(
                    f"{path}: tensor {name!r} has values of kind {str(value.dtype).removeprefix('torch.')}, not of float"
                )
            if not bool(value.isfinite().all()):
                raise UserError(f"{path}: tensor {name!r} has values that are not finite")
        if digest != (wanted := sums.get(file)):
            raise UserError(
                f"{path}: is damaged or was exchanged: its SHA-256 is {digest}, {_CONFIG} has {wanted}; copy or export it again, or "
                f"delete dflash_config.sha256 there if it is meant to be another"
            )
        if digest is None:
            _log.info(
                "%s: has no checksum in %s (it was not written by this version), so damage would not be seen", path, _CONFIG
            )
        drafter.load_state_dict(weights, strict=False)  # that it is complete was seen above
    return drafter.to(dtype).eval()


def _shapes(path: Path) -> dict[str, list[int]]:
    """Of the tensors in a file, by name; only its beginning is read."""
    refuse_no_file(path, "give the folder of an exported drafter")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error


def _check_shapes(config: DrafterConfig, folder: Path, shapes: dict[str, dict[str, list[int]]]) -> None:
    """Refuse files whose tensors are not those of ``config``, without making any."""
    for number in range(config.num_hidden_layers):
        name = f"layers.{number}.self_attn.q_proj.weight"
        if name not in shapes[_WEIGHTS]:
            raise UserError(f"{folder / _WEIGHTS}: tensor {name!r} is missing")
    try:
        with torch.device("meta"):
            everything = {name: list(value.shape) for name, value in Drafter(config).state_dict().items()}
    except UserError as error:
        raise UserError(f"{folder / _CONFIG}: {error}") from error
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{folder / _CONFIG}: its sizes cannot be those of a model ({reason})") from error
    for file, found in shapes.items():
        path = folder / file
        expected = {name: shape for name, shape in everything.items() if name.startswith("path_head.") == (file == _PATH_HEAD)}
        for name in sorted(set(expected) | set(found)):
            if name not in found:
                raise UserError(f"{path}: tensor {name!r} is missing")
            if name not in expected:
                raise UserError(f"{path}: tensor {name!r} does not belong to this drafter")
            if found[name] != expected[name]:
                raise UserError(f"{path}: tensor {name!r} has shape {found[name]}, its config says {expected[name]}")


def drafter_from_checkpoint(path: str | Path) -> Drafter:
    """The drafter in a Lightning checkpoint of :class:`dflash_lit.module.DrafterModule` (fp32 masters).

    The file is read by :func:`dflash_lit.checkpoints.file.load`: it cannot run code.
    """
    return drafter_of(load(path, mmap=True), path)


def drafter_of(saved: dict[str, Any], path: str | Path) -> Drafter:
    """The same of a checkpoint that was read from ``path``.

    Raises:
        UserError: if it is none of this project, or weights and settings do not fit.
    """
    try:
        config = DrafterConfig.from_dict(dict(saved["hyper_parameters"]["drafter"]))
        prefix = "drafter."
        weights = {k.removeprefix(prefix): v for k, v in saved["state_dict"].items() if k.startswith(prefix)}
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except Exception as error:  # whatever it holds instead
        raise UserError(f"{path}: is not a checkpoint of this project ({type(error).__name__}: {str(error)[:120]})") from error
    for name, value in weights.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"{path}: {prefix}{name} has values of kind {kind}, not of float; use another checkpoint")
        if value.layout is not torch.strided:
            raise UserError(f"{path}: {prefix}{name} has the layout {value.layout}; use another checkpoint")
        if not bool(value.isfinite().all()):
            raise UserError(f"{path}: {prefix}{name} has values that are not finite; use another checkpoint")
    for number in range(config.num_hidden_layers):
        if (name := f"layers.{number}.self_attn.q_proj.weight") not in weights:
            raise UserError(f"{path}: its weights do not fit its settings ({prefix}{name} is missing); use another checkpoint")
    try:
        with torch.device("meta"):  # before anything of these sizes is made
            expected = {name: value.shape for name, value in Drafter(config).state_dict().items()}
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{path}: its sizes cannot be those of a model ({reason}); use another checkpoint") from error
    for name in sorted(expected.keys() & weights.keys()):
        if weights[name].shape != expected[name]:
            found, wanted = list(weights[name].shape), list(expected[name])
            raise UserError(
                f"{path}: its weights do not fit its settings ({prefix}{name} has shape {found}, not {wanted}); use another checkpoint"
            )
    drafter = Drafter(config)
    try:
        drafter.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path}: its weights do not fit its settings ({str(error).splitlines()[-1].strip()})") from error
    return drafter.eval()
