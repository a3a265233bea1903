"""The frozen target: loading, the hidden states of its feature layers, and its two ends for the drafter.

The embedded target and a model of eight billion parameters go through the same code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

# Private: what Dynamo raises has no public names. Only to turn it into one line; tests/target/test_compiled_layers.py.
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from dflash_lit.errors import UserError
from dflash_lit.files import read_json
from dflash_lit.target.compiled_layers import packed_layers, shared_layer_graph
from dflash_lit.target.packed_attention import PACKED, packed_mask, unsupported
from dflash_lit.target.reader import TargetReader, no_trees

__all__ = [
    "EMBEDDED",
    "LAST_HIDDEN",
    "OWN_CODE",
    "FrozenTarget",
    "TargetEnds",
    "TargetInfo",
    "document_mask",
    "end_token_ids",
    "generation_settings",
    "own_code",
]

Item = TypeVar("Item")
Result = TypeVar("Result")

EMBEDDED = "embedded"
"""The name under which the shipped target is found."""

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights as they stand; quantised ones are seen by whoever unpacks them."""

_SCALES = ("_scale", "_scale_inv", "scales", "absmax")
"""How names of tensors end that say what quantised weights stand for."""

_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")

_UNSUPPORTED_SCALES = ("final_logit_softcapping", "embedding_multiplier", "logits_scaling", "logit_scale")

# Layers that see what a mask lets them see. "attention" is an older name.
_MASKED_KINDS = ("attention", "full_attention", "sliding_attention")


def _layer_kinds(text: Any) -> set[str]:
    """What kinds of layers there are, by the config of the language model."""
    for name in ("layer_types", "layers_block_type", "block_types"):
        if kinds := getattr(text, name, None):
            return set(kinds)
    if getattr(text, "num_attention_heads", None) is None:  # RWKV, xLSTM, Mamba before Transformers named its layers
        return {"recurrent"}
    return {"sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"}


def resolve_path(path: str) -> str:
    """Folder of the embedded target for its name, anything else unchanged."""
    return str(Path(__file__).parent / "embedded") if path == EMBEDDED else path


OWN_CODE = "custom code"
"""Transformers says so of a model that cannot be read without its own code."""


def own_code(place: str | Path) -> str:
    """What to do about such a model."""
    return (
        f"this model comes with code of its own, which would run here with your rights; read it in {place}, and if you trust it set "
        "target.trust_remote_code=true (commands: --trust-remote-code)"
    )


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
        _refuse_pipes(path, place)
        try:
            config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        except Exception as error:  # a wrong field raises what its model's code makes of it
            if not trust_remote_code and OWN_CODE in str(error):
                raise UserError(f"target.path={path!r}: {own_code(place)}") from error
            raise UserError(
                f"target.path={path!r}: no usable model there ({_reason(error)}); give a folder in Hugging Face layout, "
                f"a name on a reachable hub, or {EMBEDDED!r}"
            ) from error
        try:
            empty = not tokenizer("a")["input_ids"]  # Transformers makes an empty one up where the files are missing
        except Exception as error:  # whatever a wrong field leads to
            raise UserError(f"target.path={path!r}: its tokenizer cannot be used ({_reason(error)}); fetch it again") from error
        if empty:
            raise UserError(f"target.path={path!r}: has no tokenizer; its files belong into the same folder")
        text = config.get_text_config()
        for name in _SIZES:
            value = getattr(text, name, 1)
            if value is not None and (type(value) is not int or not 0 < value < 2**31):
                raise UserError(
                    f"target.path={path!r}: its config has {name}={str(value)[:60]}; correct it, or fetch the model again"
                )
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

    @cached_property
    def tokenizer_digest(self) -> str:
        """Names the tokenizer: equal for equal ids of every text, and for equal special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        whole = json.loads(backend.to_str()) if backend is not None else sorted(self.tokenizer.get_vocab().items())
        if isinstance(whole, dict):
            for state in ("padding", "truncation"):  # of the last call
                whole.pop(state, None)
        about = json.dumps([whole, self.tokenizer.special_tokens_map], sort_keys=True, default=str)
        return hashlib.blake2b(about.encode(), digest_size=12).hexdigest()

    @property
    def windows(self) -> dict[str, int | None]:
        """Kinds of its attention layers, and how many tokens each sees; None for all."""
        window = getattr(self.text, "sliding_window", None)
        kinds = _layer_kinds(self.text)
        return {kind: int(window) if kind == "sliding_attention" and window else None for kind in sorted(kinds)}

    @property
    def not_packed(self) -> str | None:
        """The kind of layer because of which a row holds one document only, None if there is none.

        Attention is told by a mask what it may see. The state of a recurrent layer goes on from one document to the next.
        """
        return next((kind for kind in sorted(_layer_kinds(self.text)) if kind not in _MASKED_KINDS), None)

    @property
    def packs(self) -> bool:
        """Whether rows may hold several documents; also whether tokens can be taken back, as decoding with drafts does."""
        return self.not_packed is None

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


LAST_HIDDEN = -1
"""Stands for the last hidden state after the final norm where there are ids of layers."""


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
    """Ids that end a response: of the generation config, else of the model, else of the tokenizer; none if none knows one.

    Raises:
        UserError: if what is there is neither an id nor a list of them.
    """
    for holder in (model.generation_config, model.config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            several = ids if isinstance(ids, list | tuple) else [ids]
            if not all(type(one) is int and 0 <= one < 2**31 for one in several):
                raise UserError(f"the target's eos_token_id={str(ids)[:60]} is no token id; correct its generation_config.json")
            return tuple(several)
    return ()


def _reason(error: Exception) -> str:
    """What an exception says, in one line. Some begin with no more than the name of a field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2])[:300]
    return f"{type(error).__name__}: {said}" if isinstance(error, KeyError) or not said else said


def _refuse_pipes(path: str, place: str) -> None:
    """Whoever opens one waits for its other end, inside of libraries that no signal interrupts."""
    for entry in sorted(os.scandir(place), key=lambda entry: entry.name) if os.path.isdir(place) else ():
        if Path(entry.path).exists() and not entry.is_file() and not entry.is_dir():
            raise UserError(f"target.path={path!r}: {entry.name} is a device or a pipe, no file; fetch the model again")


def _check_generation_config(info: TargetInfo) -> None:
    """Transformers goes on without one that it cannot read: responses would not end where they should."""
    path = Path(resolve_path(info.path)) / "generation_config.json"
    if os.path.lexists(path) and not isinstance(read_json(path, "fetch the model again"), dict):
        raise UserError(f"target.path={info.path!r}: {path.name} holds no object; fetch the model again")


def _check_loading(info: TargetInfo, model: nn.Module, loading: dict[str, Any]) -> None:
    """Refuse what Transformers makes up, or leaves out, and only warns of."""
    if missing := sorted(loading["missing_keys"]):
        raise UserError(f"target.path={info.path!r}: its weights lack tensor {missing[0]!r}; fetch the model again")
    if other := sorted(loading["mismatched_keys"], key=str):
        name, found, expected = other[0]
        raise UserError(
            f"target.path={info.path!r}: tensor {name!r} has shape {list(found)}, by its config {list(expected)}; fetch the model again"
        )
    own = {name for name, _ in model.named_parameters()}
    # Those of other towers of a checkpoint with several modalities are rightly left out.
    stacks = [name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == info.layers]
    # Layers that predict further tokens stand behind the others; Transformers leaves them out.
    layers = info.layers + int(getattr(info.text, "num_nextn_predict_layers", None) or 0)
    quantised = getattr(info.config, "quantization_config", None) is not None
    for name in sorted(loading["unexpected_keys"]):
        module, _, last = name.rpartition(".")
        numbers = [rest.partition(".")[0] for stack in stacks if (rest := name.removeprefix(f"{stack}.")) != name]
        if any(number.isdecimal() and int(number) >= layers for number in numbers):
            lacks = f"num_hidden_layers={info.layers}"
        elif last == "bias" and f"{module}.weight" in own:
            lacks = "no bias there"
        elif last.endswith(_SCALES) and f"{module}.weight" in own and not quantised:
            lacks = "no quantization_config"
        else:
            continue
        raise UserError(
            f"target.path={info.path!r}: its weights hold {name!r}, but its config has {lacks}; fetch the model again, config and all"
        )


def _check_finite(info: TargetInfo, model: nn.Module) -> None:
    """Before anything is made of them. One look for all tensors, and no copy of any."""
    weights = {name: x for name, x in model.named_parameters() if x.dtype in _PLAIN and x.numel()}
    if not weights:
        return
    ends = torch.stack([torch.stack([x.detach().amin(), x.detach().amax()]).float() for x in weights.values()])
    for name, finite in zip(weights, ends.isfinite().all(dim=1).tolist(), strict=True):
        if not finite:
            raise UserError(f"target.path={info.path!r}: tensor {name!r} has values that are not finite; fetch the model again")


class FrozenTarget:
    """A causal language model without gradients that hands out the outputs of chosen decoder layers.

    Packed rows go through it in one of two ways with the same results: by dense attention under a dense mask, right on a CPU
    and quadratic in the row; or compiled, by attention in tiles. Everything else it does, such as generating, is untouched.

    Args:
        info: config and tokenizer.
        model: the Hugging Face model.
        dense_limit_gib: how large dense scores of one layer may get.
        compile: whether packed rows go through compiled layers; default: on a GPU, if the model's code allows it.
        backend: of ``torch.compile``.

    Attributes:
        info: config and tokenizer.
        model: the Hugging Face model, in evaluation mode.
        fingerprint: hex digest over config and a sample of the weights: equal iff it is the same model.
        compiled: whether packed rows go through compiled layers.

    Raises:
        UserError: if its parts cannot be told apart, or ``compile`` asks for what its code does not allow.
    """

    def __init__(
        self,
        info: TargetInfo,
        model: nn.Module,
        *,
        dense_limit_gib: float = 4.0,
        compile: bool | None = None,
        backend: str = "inductor",
    ) -> None:
        self.info = info
        self.model: Any = model.eval().requires_grad_(False)
        self.dense_limit_gib = dense_limit_gib
        self.fingerprint = self._digest()
        layers = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == info.layers]
        if len(layers) != 1:
            raise UserError(f"target.path={info.path!r}: its decoder layers could not be told from its other parts")
        self._layers = layers[0]
        if info.packs and getattr(model, "_is_stateful", False):  # documents of a row would see each other, and nobody notice
            raise UserError(f"target.path={info.path!r}: has recurrent layers that its config does not name; unsupported")
        self._why_not = unsupported(model) if info.packs else f"layers of kind {info.not_packed!r} take one document a row"
        if compile and self._why_not:
            raise UserError(
                f"target.path={info.path!r}: cannot be compiled for packed rows: {self._why_not}; leave target.compile open"
            )
        self.compiled = self._why_not is None and (compile if compile is not None else self.device.type == "cuda")
        # Where a whole layer cannot be a graph (some mixtures of experts), the attention is one of its own.
        whole = self.compiled and getattr(model, "_can_compile_fullgraph", False)
        self._graph = shared_layer_graph(backend) if whole else None

    @classmethod
    def load(
        cls,
        info: TargetInfo,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        attention: str = "sdpa",
        dense_limit_gib: float = 4.0,
        compile: bool | None = None,
    ) -> FrozenTarget:
        """Read the weights.

        Args:
            dtype: default: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is slow.
            attention: Hugging Face attention implementation, one that takes a dense mask: "sdpa" or "eager".
            dense_limit_gib, compile: see the class.

        Raises:
            UserError: if the weights cannot be read, some are missing, left over or not finite, or an id that ends responses is none.
        """
        if attention not in ("sdpa", "eager"):
            raise UserError(f"target.attention={attention!r}: cannot keep packed documents apart; choose sdpa or eager")
        device = torch.device(device)
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        _check_generation_config(info)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                resolve_path(info.path),
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=info.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except pickle.UnpicklingError as error:  # Transformers reads pickled weights with weights_only=True
            raise UserError(
                f"target.path={info.path!r}: its pickled weights hold more than tensors, code that would run when they are read, or are "
                "damaged; they are refused: get the model as safetensors"
            ) from error
        except Exception as error:  # of the disk, of safetensors, of the model's code
            raise UserError(f"target.path={info.path!r}: its weights could not be read ({_reason(error)})") from error
        model, loading = loaded
        _check_loading(info, model, loading)
        model = model.to(device)
        _check_finite(info, model)
        made = cls(info, model, dense_limit_gib=dense_limit_gib, compile=compile)
        _ = made.eos_ids
        return made

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

    def each(self, function: Callable[[FrozenTarget, Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield ``function(self, item)`` for each item, in order.

        Written so that a target in other processes can do the same, several items at a time: ``function`` is one of a module,
        found there by its name, items and results can be pickled, and what it returns is decided by its item alone.
        """
        for item in items:
            yield function(self, item)

    @property
    def layers(self) -> nn.ModuleList:
        """Its decoder layers."""
        return self._layers

    @property
    def no_trees(self) -> str | None:
        """Why draft trees cannot be verified, None if they can; see :func:`~dflash_lit.target.reader.no_trees`."""
        return no_trees(self)

    def reader(self, layer_ids: Sequence[int]) -> TargetReader:
        """Begin to read a text, for decoding; see :class:`~dflash_lit.target.reader.TargetReader`."""
        return TargetReader(self, layer_ids)

    @contextmanager
    def capture(self, layer_ids: Sequence[int], *, stop: bool = False, teacher: bool = False) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs of decoder layers during the forward passes inside the block.

        Args:
            layer_ids: ids as in :func:`dflash_lit.drafter.config.feature_layers`.
            stop: end the pass after the last of them, or before the head, by raising :class:`_Reached` (for :meth:`features`).
            teacher: collect what the head would read, too, under the id ``LAST_HIDDEN``.

        Yields:
            dict from layer id to hidden states [R, S, H]; filled anew by each pass.
        """
        found: dict[int, Tensor] = {}
        last = max(layer_ids)

        def keep(layer_id: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                found[layer_id] = output[0] if isinstance(output, tuple) else output
                if stop and not teacher and layer_id == last:
                    raise _Reached

            return hook

        def before_head(module: nn.Module, inputs: Any) -> None:
            found[LAST_HIDDEN] = inputs[0]
            if stop:
                raise _Reached

        handles = [self._layers[i].register_forward_hook(keep(i)) for i in sorted(set(layer_ids))]
        if teacher:  # the head's input rather than the output of a norm, which each family calls otherwise
            handles.append(self.model.get_output_embeddings().register_forward_pre_hook(before_head))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def features(self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
        """Context features of packed rows: [R, S, len(layer_ids) * H] in the target's dtype, on its device.

        Documents do not see each other. The pass ends after the last feature layer; no logits are made. On a GPU packed rows
        are only put in line: nothing here waits for the device.

        Args:
            input_ids, document_ids, position_ids: integer [R, S] as in
                :class:`~dflash_lit.data.packing.PackedRows`, on any device.

        Raises:
            UserError: before allocation, if dense attention is what would run and its scores would be too large; or if a row
                holds several documents and the target is not one that ``packs``.
        """
        return self._features(input_ids, document_ids, position_ids, layer_ids, teacher=False)[0]

    def features_and_last_hidden(
        self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor, layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The same, and what the target's head would read: the last hidden state after the final norm, [R, S, H].

        All layers run, the head does not: logits of a row would take the vocabulary's size a token.
        """
        features, last_hidden = self._features(input_ids, document_ids, position_ids, layer_ids, teacher=True)
        assert last_hidden is not None
        return features, last_hidden

    def _features(
        self, input_ids: Tensor, document_ids: Tensor, position_ids: Tensor, layer_ids: Sequence[int], *, teacher: bool
    ) -> tuple[Tensor, Tensor | None]:
        if not self.info.packs:
            self._refuse_several_documents(document_ids)
        self._refuse_large(*input_ids.shape)
        # Not in inference mode, which validation turns on: its tensors are of another kind, for which layers compile anew. It
        # resets grad mode, so that comes second. The copies are there for tensors that the caller made in inference mode.
        with torch.inference_mode(False), torch.no_grad(), self.capture(layer_ids, stop=True, teacher=teacher) as found:
            ids, documents = (x.to(self.device, non_blocking=True, copy=True) for x in (input_ids, document_ids))
            positions: Tensor | None = position_ids.to(self.device, torch.long, non_blocking=True, copy=True)
            mask: Any = None
            if self.info.packs:
                masks = {kind: self._mask(documents, window) for kind, window in self.info.windows.items()}
                # By kind where layers differ; models whose layers are all alike take the mask itself.
                mask = masks if len(masks) > 1 else next(iter(masks.values()))
            else:
                positions = None  # they start again at padding, which Transformers would take for another document
            try:
                with self._packed():
                    self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
            except _Reached:
                pass
            else:
                raise RuntimeError("the target's forward pass did not go through its feature layers")
            return torch.cat([found[i] for i in layer_ids], dim=-1), found.get(LAST_HIDDEN)

    @contextmanager
    def _packed(self) -> Iterator[None]:
        """The layers as compiled ones for packed rows, if that is how this target runs them."""
        if not self.compiled:
            yield
            return
        try:
            with packed_layers(self._layers, PACKED, self._graph):
                yield
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            said = "; ".join(line.strip() for line in str(error).strip().splitlines()[:2])
            raise UserError(
                f"target.path={self.info.path!r}: its layers could not be compiled ({said}); "
                "target.compile=false runs rows by dense attention, as far as target.dense_limit_gib allows"
            ) from error

    def _refuse_several_documents(self, document_ids: Tensor) -> None:
        """For targets that do not pack. Looks at the ids: free on the CPU, where the loader makes them."""
        if bool(((document_ids != document_ids[:, :1]) & (document_ids >= 0)).any()):
            raise UserError(
                f"target.path={self.info.path!r}: no mask keeps layers of kind {self.info.not_packed!r} to one document of a row; "
                "give one document a row, at its beginning (pack(..., one_per_row=True))"
            )

    def _refuse_large(self, rows: int, tokens: int) -> None:
        """Refuse dense attention whose scores would be too large; without a mask of ours sdpa never has them all."""
        if self.compiled or (not self.info.packs and self.model.config._attn_implementation != "eager"):
            return
        scores = rows * int(getattr(self.info.text, "num_attention_heads", None) or 0) * tokens * tokens * 4
        if scores > self.dense_limit_gib * 2**30:
            instead = f" (not compiled: {self._why_not})" if self._why_not else ""
            raise UserError(
                f"the target's dense attention{instead} over {rows} rows of {tokens} tokens may take {scores / 2**30:.1f} GiB a layer, "
                f"over target.dense_limit_gib={self.dense_limit_gib:g}: lower data.row_tokens or data.rows_per_batch, "
                "or raise the limit"
            )

    def _mask(self, documents: Tensor, window: int | None) -> Tensor | BlockMask:
        if self.compiled:
            return packed_mask(documents, window)
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
