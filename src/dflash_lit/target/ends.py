"""The target's embedding and head, read alone from its files: all that a drafter's rank holds of the target.

What their tensors are called differs from model to model, and a checkpoint may call them otherwise than the model's class. Both
are asked rather than guessed: the class, built without memory, where its two ends are; Transformers, what it loads there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import file_exists, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dflash_lit.errors import UserError
from dflash_lit.target.frozen import TargetEnds, TargetInfo, resolve_path

__all__ = ["read_ends"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_FLOATS = ("F64", "F32", "F16", "BF16")
"""What safetensors calls the dtypes of tensors that are weights as they stand."""

# How names end where Transformers cannot say what it loads; the more common first.
_EMBED_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output_layer.weight")


def read_ends(info: TargetInfo, *, device: torch.device | str, dtype: torch.dtype) -> TargetEnds:
    """The same as ``FrozenTarget.load(info, ...).ends()``, bit for bit, from the one or two tensors it takes.

    Nothing else of the target is read or allocated, and of a model on a hub no file fetched that holds neither.

    Args:
        info: config and tokenizer.
        device: where the two go; they pass through the host's memory one after the other.
        dtype: what they are cast to, whatever the file holds.

    Returns:
        embedding and head, both [V, H] in ``dtype`` on ``device``, without gradients; one tensor where the target ties them.

    Raises:
        UserError: in one line that names the file: if it is missing, cannot be read or lacks a tensor, or if a tensor has
            another shape or is quantised. Also for a head with a bias, as by ``FrozenTarget.ends``, and without safetensors.
    """
    model = _skeleton(info)
    embed_name, head_name, tied = _ends_of(model, info)
    weights = _Checkpoint.find(info)
    embed, head = _names_in_checkpoint(model, (embed_name, head_name), weights)
    if tied:  # one may be absent, and which one differs
        embed, head = embed or head, head or embed
    for name, found in ((embed_name, embed), (head_name, head)):
        if found is None:
            raise weights.lacks(name)
    assert embed is not None
    assert head is not None

    first = weights.read(embed).to(dtype).to(device)
    if head == embed:
        return TargetEnds(first, first)
    second = weights.read(head).to(dtype).to(device)
    # A checkpoint may hold both although its config ties them. Transformers believes the checkpoint.
    return TargetEnds(first, first if tied and torch.equal(first, second) else second)


def _skeleton(info: TargetInfo) -> Any:
    """The model that ``FrozenTarget.load`` would fill, without storage."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                copy.deepcopy(info.config),  # it is written to
                trust_remote_code=info.trust_remote_code,
                attn_implementation="eager",  # the one that asks for no package; no attention is computed
            )
    except Exception as error:  # may be the model's own code
        raise UserError(f"target.path={info.path!r}: no causal language model by its config ({_reason(error)})") from error


def _ends_of(model: Any, info: TargetInfo) -> tuple[str, str, bool]:
    """Names of the embedding's and the head's weight in the model's class, and whether it ties them."""
    try:
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError as error:
        raise UserError(f"target.path={info.path!r}: {type(model).__name__} does not say what its embedding is") from error
    if getattr(head, "bias", None) is not None:
        raise UserError(f"target.path={info.path!r}: a head with a bias is not supported")
    modules = list(model.named_modules(remove_duplicate=False))
    found = []
    for role, module in (("embedding", embed), ("head", head)):
        names = [name for name, other in modules if other is module]
        if module is None or not names or not isinstance(getattr(module, "weight", None), nn.Parameter):
            raise UserError(f"target.path={info.path!r}: {type(model).__name__} has no {role} with a weight; unsupported")
        found.append(f"{names[0]}.weight")
    return found[0], found[1], head.weight is embed.weight


@dataclass(frozen=True)
class _Stored:
    """A tensor in a checkpoint."""

    name: str
    file: str


@dataclass(frozen=True)
class _Checkpoint:
    """The safetensors files of a model. Those on a hub are fetched one by one, when they are opened.

    Attributes:
        info: of the model.
        source: the file that says which tensors there are: the index, or the only file.
        files: file by name of tensor.
        revision: the commit on the hub that ``source`` is of, so that the others are of the same.
    """

    info: TargetInfo
    source: str
    files: Mapping[str, str]
    revision: str | None

    @classmethod
    def find(cls, info: TargetInfo) -> _Checkpoint:
        """Look for one file, then for an index of several, as Transformers does."""
        named = getattr(info.config, "transformers_weights", None)
        for source in (named,) if named else (_WHOLE, _INDEX):
            path = _fetch(info, source)
            if path is None:
                continue
            # .../snapshots/<commit>/<file> in a cache of the hub
            revision = path.parent.name if path.parent.parent.name == "snapshots" else None
            if source.endswith(".json"):
                return cls(info, source, _read_index(info, path), revision)
            with _opened(info, source, path) as tensors:
                return cls(info, source, dict.fromkeys(tensors.keys(), source), revision)
        raise _no_safetensors(info, named or f"{_WHOLE} and no {_INDEX}")

    def lacks(self, name: str) -> UserError:
        """What to say when nothing in the checkpoint becomes the parameter ``name``."""
        module = name.rpartition(".")[0] + "."
        for other in sorted(self.files):  # GPTQ and its like put several tensors in a weight's place
            if f".{module}" in f".{other}" and not other.endswith(".weight"):
                what = f"{self.source} holds {other!r} in place of {name!r}: quantised ends are not supported"
                return _error(self.info, what)
        return _error(self.info, f"{self.source} lacks tensor {name!r}; fetch the model again")

    def read(self, stored: _Stored) -> Tensor:
        """The tensor as it is stored, [V, H] on the CPU, in memory of its own; of its file only the header is read besides."""
        text = self.info.text
        expected = [int(text.vocab_size), int(text.hidden_size)]
        path = _fetch(self.info, stored.file, self.revision)
        if path is None:
            raise _error(
                self.info, f"{stored.file}, which holds {stored.name!r}, is missing{_where(self.info)}; fetch it again"
            )
        with _opened(self.info, stored.file, path) as tensors:
            if stored.name not in tensors.keys():  # noqa: SIM118 - not a dict
                raise _error(self.info, f"{stored.file} lacks tensor {stored.name!r}, which {self.source} says it holds")
            header = tensors.get_slice(stored.name)
            kind, shape = header.get_dtype(), list(header.get_shape())
            if kind not in _FLOATS:
                raise _error(self.info, f"{stored.file} holds {stored.name!r} in {kind}: quantised ends are not supported")
            if shape != expected:
                raise _error(
                    self.info,
                    f"{stored.file} holds {stored.name!r} of shape {shape}; "
                    f"by its config it is {expected} (vocab_size, hidden_size)",
                )
            try:
                return tensors.get_tensor(stored.name)
            except (OSError, SafetensorError) as error:
                raise _unreadable(self.info, stored.file, path, error) from error


def _names_in_checkpoint(model: Any, wanted: tuple[str, str], weights: _Checkpoint) -> tuple[_Stored | None, _Stored | None]:
    """What in the checkpoint becomes the parameters ``wanted``, None for what is not there."""
    try:
        found = _by_transformers(model, wanted, weights)
    except (
        ImportError,
        AttributeError,
        TypeError,
    ):  # internals, which another version may have renamed: then the likeliest names
        guesses = zip(wanted, (_EMBED_NAMES, _HEAD_NAMES), strict=True)
        found = {name: guess for name, known in guesses if (guess := _closest(name, known, weights.files))}
    stored = [_Stored(found[name], weights.files[found[name]]) if name in found else None for name in wanted]
    return stored[0], stored[1]


def _by_transformers(model: Any, wanted: Iterable[str], weights: _Checkpoint) -> dict[str, str]:
    """Name in the checkpoint by name in the model, by the rules that ``from_pretrained`` renames tensors by.

    Follows ``convert_and_load_state_dict_in_model`` of ``transformers.core_model_loading``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix, parameters = model.base_model_prefix, model.state_dict()
    found: dict[str, str] = {}
    for name in sorted(weights.files, key=dot_natural_key):  # all: some rules apply only after another has
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if renamed not in parameters and name in parameters:
            renamed, pattern = rename_source_key(name, [], [], prefix, parameters)
        if renamed in wanted and renamed not in found:
            if pattern is not None:
                raise _error(weights.info, f"{weights.source}: Transformers rebuilds {name!r} as it loads it; unsupported")
            found[renamed] = name
    return found


def _closest(wanted: str, known: Iterable[str], names: Iterable[str]) -> str | None:
    """The name that ends like ``wanted``, by two parts or more, else like one of ``known``; None if it is not the only one."""
    parts = wanted.split(".")
    by_common: dict[int, list[str]] = {}
    for name in names:
        common = 0
        for ours, theirs in zip(reversed(parts), reversed(name.split(".")), strict=False):
            if ours != theirs:
                break
            common += 1
        by_common.setdefault(common, []).append(name)
    tiers = [by_common[common] for common in sorted(by_common, reverse=True) if common >= 2]
    tiers += [[name for name in names if ("." + name).endswith("." + end)] for end in known]
    best = next((tier for tier in tiers if tier), [])
    least = min((name.count(".") for name in best), default=0)  # the outermost: inner ones belong to parts of the model
    outermost = [name for name in best if name.count(".") == least]
    return outermost[0] if len(outermost) == 1 else None


def _fetch(info: TargetInfo, file: str, revision: str | None = None) -> Path | None:
    """Where a file of the model is, after fetching it from the hub if need be; None if the model has no such file."""
    place = resolve_path(info.path)
    if Path(place).is_dir():
        path = Path(place) / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(place, file, revision=revision))
    except EntryNotFoundError:  # also without a network, if it is not in the cache
        return None
    except Exception as error:  # the network's, the hub's and the disk's have no class in common
        raise _error(info, f"{file} could not be fetched ({_reason(error)})") from error


def _read_index(info: TargetInfo, path: Path) -> dict[str, str]:
    """File by name of tensor."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _error(info, f"{path.name} is no index of safetensors files ({_reason(error)}); fetch the model again") from error


def _opened(info: TargetInfo, file: str, path: Path) -> Any:
    """The file with its header read."""
    try:
        # Read, not mapped: a mapped file takes as much address space as it is long, and must stay as it is for as long as the
        # tensor is used; overwritten it changes the tensor, cut off it ends the process with a bus error.
        return safe_open(path, framework="pt", device="cpu", backend="pread")
    except (OSError, SafetensorError) as error:
        raise _unreadable(info, file, path, error) from error


def _no_safetensors(info: TargetInfo, missing: str) -> UserError:
    """What to say of a model without them: what it has instead, if that is known."""
    place = resolve_path(info.path)
    for file in _PICKLED:
        try:
            if Path(place).is_dir():
                there = (Path(place) / file).is_file()
            else:
                there = isinstance(try_to_load_from_cache(place, file), str) or file_exists(place, file)
        except Exception:  # only to say more; without a network it is not known
            there = False
        if there:
            return _error(
                info,
                f"has its weights in {file} only, which cannot be read in part; convert them to safetensors: "
                "AutoModelForCausalLM.from_pretrained(path).save_pretrained(folder)",
            )
    return _error(info, f"has no {missing}{_where(info)}; give a folder or a name with all files of the model")


def _unreadable(info: TargetInfo, file: str, path: Path, error: Exception) -> UserError:
    try:
        with path.open("rb") as opened:
            pointer = opened.read(24).startswith(b"version https://git-lfs")
    except OSError:
        pointer = False
    if pointer:
        return _error(info, f"{file} is only a pointer of Git LFS; run git lfs pull in the model's folder")
    return _error(info, f"{file} could not be read ({_reason(error)}); if it is cut off, fetch it again")


def _where(info: TargetInfo) -> str:
    """Where files of a model on a hub were looked for in vain: which of the two failed is not known."""
    return "" if Path(resolve_path(info.path)).is_dir() else " in the cache and on the hub, which may be out of reach"


def _error(info: TargetInfo, what: str) -> UserError:
    return UserError(f"target.path={info.path!r}: {what}")


def _reason(error: Exception) -> str:
    """What an exception says, in one line. The hub's begin with no more than a status."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
