"""The frozen target: loading, the hidden states of its feature layers, and its two ends for the drafter.

The embedded target and a model of eight billion parameters go through the same code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from dflash_lit.errors import UserError

__all__ = ["EMBEDDED", "FrozenTarget", "TargetEnds", "TargetInfo", "document_mask", "end_token_ids", "generation_settings"]

EMBEDDED = "embedded"
"""The name under which the shipped target is found."""

_UNSUPPORTED_SCALES = ("final_logit_softcapping", "embedding_multiplier", "logits_scaling", "logit_scale")


def resolve_path(path: str) -> str:
    """Folder of the embedded target for its name, anything else unchanged."""
    return str(Path(__file__).parent / "embedded") if path == EMBEDDED else path


@dataclass(frozen=True)
class TargetInfo:
    """What can be known of a target before its weights are read."""

    path: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    trust_remote_code: bool = False

    @classmethod
    def load(cls, path: str, *, trust_remote_code: bool = False) -> TargetInfo:
        """Read config and tokenizer.

        Raises:
            UserError: if there is no such model, or one that a drafter cannot be trained for.
        """
        place = resolve_path(path)
        try:
            config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(
                f"target.path={path!r}: no usable model there ({reason}); give a folder in Hugging Face layout, "
                f"a name on a reachable hub, or {EMBEDDED!r}"
            ) from error
        if not tokenizer("a")["input_ids"]:  # Transformers makes an empty one up where the files are missing
            raise UserError(f"target.path={path!r}: has no tokenizer; its files belong into the same folder")
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        if other := kinds - {"full_attention", "sliding_attention"}:
            raise UserError(f"target.path={path!r}: layers of kind {sorted(other)[0]!r} cannot be run on packed rows yet")
        for name in _UNSUPPORTED_SCALES:
            if getattr(text, name, None) not in (None, 1, 1.0):
                raise UserError(
                    f"target.path={path!r}: its config sets {name}, which a drafter on its bare head would miss; unsupported"
                )
        return cls(path, config, tokenizer, trust_remote_code)

    @property
    def text(self) -> Any:
        """The config of the language model itself (targets with other modalities nest it)."""
        return self.config.get_text_config()

    @property
    def layers(self) -> int:
        return int(self.text.num_hidden_layers)

    @property
    def reserved_ids(self) -> dict[str, int]:
        """Ids with a meaning of their own, by name: what the mask token must not be."""
        tokenizer = self.tokenizer
        found = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id, "bos": tokenizer.bos_token_id}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def pad_id(self) -> int:
        """The id that fills the last row; never looked at."""
        return int(next((i for i in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id) if i is not None), 0))

    def default_mask_token(self) -> int:
        """The tokenizer's mask token, else the first id of the vocabulary that the tokenizer never makes.

        Raises:
            UserError: if there is neither.
        """
        if self.tokenizer.mask_token_id is not None:
            return int(self.tokenizer.mask_token_id)
        if len(self.tokenizer) < self.text.vocab_size:
            return len(self.tokenizer)
        raise UserError(
            "drafter.mask_token_id: the tokenizer has no mask token and fills the whole vocabulary; "
            "name a reserved id that is never text"
        )


@dataclass(frozen=True)
class TargetEnds:
    """The target's embedding and head: all that a drafter needs of its weights.

    Attributes:
        embed: [V, H] input embeddings.
        head: [V, H] output weights; the same tensor where the target ties them.
    """

    embed: Tensor
    head: Tensor


class _Reached(Exception):  # noqa: N818 - not an error: ends a forward pass whose rest nobody needs
    pass


def document_mask(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Causal attention inside each document only: bool [R, 1, S, S], True is visible.

    Padding (-1) is one more "document", so that no row of the softmax is empty.
    """
    tokens = document_ids.shape[1]
    places = torch.arange(tokens, device=document_ids.device)
    distance = places[:, None] - places
    allowed = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return (same & allowed)[:, None]


@contextmanager
def generation_settings(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Let ``model.generate`` go by ``settings`` alone.

    It fills what a given configuration leaves open from the model's own, which often holds a nucleus or penalties: then
    "greedy" would not be the argmax.
    """
    before = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = before


def end_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a response: of the generation config, else of the model, else of the tokenizer; none if none knows one."""
    for holder in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return (int(ids),) if isinstance(ids, int) else tuple(int(i) for i in ids)
    return ()


class FrozenTarget:
    """A causal language model without gradients that hands out the outputs of chosen decoder layers.

    Attributes:
        info: config and tokenizer.
        model: the Hugging Face model, in evaluation mode.
        fingerprint: hex digest over config and a sample of the weights: equal iff it is the same model.
    """

    def __init__(self, info: TargetInfo, model: nn.Module, *, dense_limit_gib: float = 4.0) -> None:
        self.info = info
        self.model: Any = model.eval().requires_grad_(False)
        self.dense_limit_gib = dense_limit_gib
        self.fingerprint = self._digest()
        layers = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == info.layers]
        if len(layers) != 1:
            raise UserError(f"target.path={info.path!r}: its decoder layers could not be told from its other parts")
        self._layers = layers[0]

    @classmethod
    def load(
        cls,
        info: TargetInfo,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        attention: str = "sdpa",
        dense_limit_gib: float = 4.0,
    ) -> FrozenTarget:
        """Read the weights.

        Args:
            dtype: default: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is slow.
            attention: Hugging Face attention implementation, one that takes a dense mask: "sdpa" or "eager".

        Raises:
            UserError: if the weights cannot be read or some are missing.
        """
        if attention not in ("sdpa", "eager"):
            raise UserError(f"target.attention={attention!r}: cannot keep packed documents apart; choose sdpa or eager")
        device = torch.device(device)
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                resolve_path(info.path),
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=info.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"target.path={info.path!r}: its weights could not be read ({str(error).splitlines()[0]})"
            ) from error
        model, loading = loaded
        if missing := sorted(loading["missing_keys"]):
            # Transformers makes them up and only warns.
            raise UserError(f"target.path={info.path!r}: its weights lack tensor {missing[0]!r}; fetch the model again")
        return cls(info, model.to(device), dense_limit_gib=dense_limit_gib)

    @property
    def tokenizer(self) -> Any:
        return self.info.tokenizer

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """See :func:`end_token_ids`."""
        return end_token_ids(self.model, self.tokenizer)

    def ends(self) -> TargetEnds:
        """Embedding and head (no copies)."""
        head = self.model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UserError(f"target.path={self.info.path!r}: a head with a bias is not supported")
        return TargetEnds(self.model.get_input_embeddings().weight, head.weight)

    @contextmanager
    def capture(self, layer_ids: Sequence[int], *, stop: bool = False) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs of decoder layers during the forward passes inside the block.

        Args:
            layer_ids: ids as in :func:`dflash_lit.drafter.config.feature_layers`.
            stop: end the pass after the last of them by raising :class:`_Reached` (for :meth:`features`).

        Yields:
            dict from layer id to hidden states [R, S, H]; filled anew by each pass.
        """
        found: dict[int, Tensor] = {}
        last = max(layer_ids)

        def keep(layer_id: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                found[layer_id] = output[0] if isinstance(output, tuple) else output
                if stop and layer_id == last:
                    raise _Reached

            return hook

        handles = [self._layers[i].register_forward_hook(keep(i)) for i in sorted(set(layer_ids))]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def features(self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Context features of packed rows: [R, S, len(layer_ids) * H] in the target's dtype.

        Documents do not see each other. The pass ends after the last feature layer; no logits are made.

        Raises:
            UserError: before allocation, if the dense document mask would be too large.
        """
        rows, tokens = input_ids.shape
        heads = int(self.info.text.num_attention_heads)
        scores = rows * heads * tokens * tokens * 4
        if scores > self.dense_limit_gib * 2**30:
            raise UserError(
                f"the target's dense attention over {rows} rows of {tokens} tokens may take {scores / 2**30:.1f} GiB a layer, "
                f"over target.dense_limit_gib={self.dense_limit_gib:g}: lower data.row_tokens or data.rows_per_batch, "
                "or raise the limit"
            )
        ids, documents, positions = (x.to(self.device) for x in (input_ids, document_ids, position_ids))
        mask: Any = self._mask(documents)
        kinds = set(getattr(self.info.text, "layer_types", None) or ["full_attention"])
        if "sliding_attention" in kinds:
            mask = {"full_attention": mask, "sliding_attention": self._mask(documents, int(self.info.text.sliding_window))}
        with self.capture(layer_ids, stop=True) as found:
            try:
                self.model(input_ids=ids, attention_mask=mask, position_ids=positions.long(), use_cache=False)
            except _Reached:
                pass
            else:
                raise RuntimeError("the target's forward pass did not go through its feature layers")
        return torch.cat([found[i] for i in layer_ids], dim=-1)

    def _mask(self, documents: Tensor, window: int | None = None) -> Tensor:
        visible = document_mask(documents, window)
        if self.model.config._attn_implementation != "eager":
            return visible
        # Eager attention adds the mask to the scores: a bool one would be added as 0 and 1.
        return torch.where(visible, 0.0, torch.finfo(self.dtype).min).to(self.dtype)

    def _digest(self) -> str:
        described = self.info.config.to_dict()
        for name in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
            described.pop(name, None)
        digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
        for name, parameter in sorted(self.model.named_parameters()):
            # bfloat16 of a few entries: the same whether the model was loaded in fp32 or bf16.
            flat = parameter.detach().flatten()
            count = min(flat.numel(), 64)
            places = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(count - 1, 1)
            sample = flat[places].to(torch.bfloat16).view(torch.int16).cpu()
            digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]
