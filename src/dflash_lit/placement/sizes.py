"""How large target and drafter are, from the target's config alone: no weights, no tokenizer, no memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dflash_lit.config import DrafterSection
from dflash_lit.doctor.memory import Recipe
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.placement.known import KNOWN, known_config
from dflash_lit.plan import derive_drafter
from dflash_lit.target.frozen import OWN_CODE, TargetInfo, own_code, resolve_path

__all__ = ["Sizes", "measure_sizes"]


@dataclass(frozen=True)
class Sizes:
    """What memory and FLOP hang on besides the batch.

    Attributes:
        target: name or folder.
        target_parameters: all of them.
        ends_parameters: of embedding and head, once where they are tied: what a drafter rank holds of the target.
        used_weights: entries of the matrices that a token goes through up to the last feature layer.
        windows: of the attention layers up to there: tokens that one sees, None for all before it.
        target_width: heads times head size of the target.
        target_intermediate: width of its MLP.
        drafter: the sizes of the drafter.
        drafter_parameters: its parameters.
    """

    target: str
    target_parameters: int
    ends_parameters: int
    used_weights: float
    windows: tuple[int | None, ...]
    target_width: int
    target_intermediate: int
    drafter: DrafterConfig
    drafter_parameters: int


def _read_config(target: str, trust_remote_code: bool) -> PretrainedConfig:
    if (known := known_config(target)) is not None:
        return known
    try:
        return AutoConfig.from_pretrained(resolve_path(target), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if not trust_remote_code and OWN_CODE in str(error):
            raise UserError(f"--target {target}: {own_code(resolve_path(target))}") from None
        raise UserError(
            f"--target {target}: no usable config there ({_reason(error)}); give a folder in Hugging Face layout, "
            f"a name on a reachable hub, 'embedded', or one of {', '.join(KNOWN)}"
        ) from None  # the reason is in the message


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())  # names a tied one once


def _used(layer: nn.Module, text: Any) -> float:
    """Matrix entries of a layer that a token goes through; of a stack of experts only its share."""
    experts = next((n for name in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(text, name, 0))), 0)
    share = getattr(text, "num_experts_per_tok", None) or experts
    matrices = [p for p in layer.parameters() if p.ndim >= 2]
    return sum(p.numel() * (share / experts if experts and p.ndim == 3 and p.shape[0] == experts else 1) for p in matrices)


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    """Of the first ``layers`` layers; recurrent ones, which look at no pairs, are left out."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    seeing = [kind for kind in kinds[:layers] if "attention" in kind and kind != "linear_attention"]
    return tuple(int(window) if kind == "sliding_attention" and window else None for kind in seeing)


def measure_sizes(target: str, recipe: Recipe, *, trust_remote_code: bool = False) -> Sizes:
    """Build both models without memory, and count.

    Args:
        target: a folder or a name on a hub, of which only the config is read, "embedded", or a name in
            :data:`.known.KNOWN`, whose sizes need no network.
        recipe: the drafter's sizes where they are not the target's.

    Raises:
        UserError: if there is no such config, or no drafter for it.
    """
    config = _read_config(target, trust_remote_code)
    no_tokens: Any = SimpleNamespace(pad_token_id=None, eos_token_id=None, bos_token_id=None)
    # Any mask token: the tokenizer would have to be fetched for the right one.
    section = DrafterSection(**recipe.drafter, mask_token_id=0)
    info = TargetInfo(target, config, no_tokens, trust_remote_code)
    drafter = derive_drafter(section, info)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            drafter_parameters = _count(Drafter(drafter))
        ends = nn.ModuleList([model.get_input_embeddings(), model.get_output_embeddings()])
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == info.layers)
    except Exception as error:  # models build themselves in many ways, their own code included
        raise UserError(
            f"--target {target}: its parameters could not be counted ({_reason(error)})"
        ) from None  # the reason is in the message
    used = max(drafter.target_layer_ids) + 1
    return Sizes(
        target=target,
        target_parameters=_count(model),
        ends_parameters=_count(ends),
        used_weights=sum(_used(layer, info.text) for layer in layers[:used]),
        windows=_windows(info.text, used),
        target_width=drafter.num_attention_heads * drafter.head_dim,  # the section leaves the target's
        target_intermediate=int(getattr(info.text, "intermediate_size", None) or drafter.intermediate_size),
        drafter=drafter,
        drafter_parameters=drafter_parameters,
    )
