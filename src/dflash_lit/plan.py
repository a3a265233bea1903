"""From a composed config to a checked, fully derived plan, before anything heavy starts.

Only the target's config and tokenizer are read here. Every impossible combination ends as one :class:`UserError`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from dflash_lit.attention.dense import refuse_large
from dflash_lit.checkpoints.contract import BATCHES, compare, settings
from dflash_lit.checkpoints.file import load
from dflash_lit.checkpoints.form import check_count
from dflash_lit.config import DrafterSection, PlacementSection, TrainConfig
from dflash_lit.data.chat_data import store_settings
from dflash_lit.data.sources import find_sources
from dflash_lit.drafter.config import FULL, SLIDING, DrafterConfig, feature_layers
from dflash_lit.errors import UserError
from dflash_lit.export import drafter_of, read_config
from dflash_lit.objective.config import Objective
from dflash_lit.placement.interfaces import check_interface
from dflash_lit.placement.layout import Layout, device_name, devices
from dflash_lit.placement.own_gpu import gpus_of_host
from dflash_lit.requeue import wanted
from dflash_lit.stopping import duration
from dflash_lit.target.frozen import TargetInfo
from dflash_lit.trained import folder_of, has_ended

__all__ = ["Plan", "derive_drafter", "make_plan"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PRECISIONS = ("32-true", "bf16-mixed")


@dataclass(frozen=True)
class Plan:
    """What a run will do, with nothing left to derive.

    Attributes:
        layout: the processes; one, for a colocated run on one device.
        devices: of each local rank, the same on all hosts.
        dtype: of the target.
        val_every: optimizer steps.
    """

    info: TargetInfo
    drafter: DrafterConfig
    objective: Objective
    layout: Layout
    devices: tuple[torch.device, ...]
    dtype: torch.dtype
    precision: str
    val_every: int
    max_new_tokens: int

    @property
    def device(self) -> torch.device:
        """That of local rank 0."""
        return self.devices[0]

    def module_settings(self, cfg: TrainConfig, fingerprint: str = "") -> dict[str, Any]:
        """Arguments of :class:`dflash_lit.module.DrafterModule`, but for the target's ends.

        Args:
            fingerprint: of the target; empty as long as its weights were not read.
        """
        return {
            "drafter": {**self.drafter.to_dict(), "target_fingerprint": fingerprint},
            "objective": self.objective.to_dict(),
            "anchors": cfg.drafter.anchors,
            "seed": cfg.seed,
            "optimizer": cfg.optimizer.kind,
            "lr": cfg.optimizer.lr,
            "betas": list(cfg.optimizer.betas),
            "weight_decay": cfg.optimizer.weight_decay,
            "warmup": cfg.optimizer.warmup,
            "tree_budgets": list(cfg.evaluation.tree_budgets),
            "feature_noise": cfg.drafter.feature_noise,
            "dense_limit_gib": cfg.drafter.dense_limit_gib,
            "compile_on_cpu": bool(cfg.drafter.compile),
            "tokenizer": self.info.tokenizer_digest,
        }


def _positive(section: str, values: object, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        if value is not None and value < 1:
            raise UserError(f"{section}.{name}={value}: must be at least 1")


def _container(hint: Any) -> tuple[type, ...]:
    """What a value may be by its annotation, if that says list or dict."""
    for one in (hint, *get_args(hint)):
        if (kind := get_origin(one) or one) in (list, dict):
            return (list, tuple) if kind is list else (dict,)
    return ()


def _no_giants(values: object, place: str = "") -> None:
    """No whole number that tensors cannot hold, and nothing but lists and dicts where those belong."""
    kinds = get_type_hints(type(values))
    for field in fields(values):  # type: ignore[arg-type]
        name, value = f"{place}{field.name}", getattr(values, field.name)
        kind = _container(kinds[field.name])
        if kind and value is not None and not isinstance(value, kind):  # what an interpolation leads to is not checked before
            what = "a whole section of the config" if is_dataclass(value) else f"{value!r}"
            raise UserError(f"{name}: is {what}; give a {kind[0].__name__}")
        if is_dataclass(value):
            _no_giants(value, f"{name}.")
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, int) and not -(2**63) <= one < 2**63:
                raise UserError(f"{name}={one}: lies beyond 64 bits")


def _own(text: Any, name: str) -> int:
    """A size that the drafter takes over from the config of the target's language model; recurrent ones may lack it."""
    value = getattr(text, name, None)
    if value is None:
        raise UserError(f"drafter.{name}: the target has none to take over; give a number")
    return int(value)


def _sliding(section: DrafterSection) -> list[str]:
    """With a window all layers slide but the last, which still sees everything."""
    return [] if section.sliding_window is None else [SLIDING] * (section.layers - 1) + [FULL]


def derive_drafter(section: DrafterSection, info: TargetInfo, fingerprint: str = "") -> DrafterConfig:
    """The drafter's sizes: what the section leaves open is the target's.

    Raises:
        UserError: for a mask token that is out of range or means something else, layers out of range, or a size that neither
            the section nor the target gives.
    """
    text = info.text
    heads = section.num_attention_heads or _own(text, "num_attention_heads")
    kv_heads = section.num_key_value_heads or int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = section.head_dim or int(
        getattr(text, "head_dim", None) or text.hidden_size // (getattr(text, "num_attention_heads", None) or heads)
    )
    layer_ids = section.target_layer_ids
    if layer_ids is None:
        layer_ids = list(feature_layers(info.layers, section.features))
    mask = section.mask_token_id if section.mask_token_id is not None else info.default_mask_token()
    for name, reserved in info.reserved_ids.items():
        if mask == reserved:
            raise UserError(
                f"drafter.mask_token_id={mask} is the target's {name} token; choose a reserved id that is never text"
            )
    rope = dict(section.rope_parameters or getattr(text, "rope_parameters", None) or {})
    if "full_attention" in rope:  # targets with several kinds of layers give each its own
        rope = dict(rope["full_attention"])
    for name in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        rope.pop(name, None)  # the drafter turns whole heads, by one position: servers must not read otherwise
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", float(getattr(text, "rope_theta", None) or 10_000.0))
    return DrafterConfig(
        hidden_size=int(text.hidden_size),
        intermediate_size=section.intermediate_size or _own(text, "intermediate_size"),
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(text.vocab_size),
        block_size=section.block_size,
        mask_token_id=mask,
        target_layer_ids=tuple(layer_ids),
        num_target_layers=info.layers,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(getattr(text, "max_position_embeddings", 32768)),
        causal=section.causal,
        layer_types=tuple(section.layer_types or _sliding(section)),
        sliding_window=section.sliding_window,
        path_width=section.path_width,
        path_candidates=section.path_candidates,
        rope_parameters=rope,
        # Qwen3's 0.02 suits widths from a thousand on; a narrow drafter would start so near zero that it idles for long.
        initializer_range=section.initializer_range
        or max(float(getattr(text, "initializer_range", 0.02)), 0.02 * (1024 / int(text.hidden_size)) ** 0.5),
        target_fingerprint=fingerprint,
    )


def _device(accelerator: str) -> torch.device:
    if accelerator not in ("auto", "cpu", "gpu"):
        raise UserError(f"trainer.accelerator={accelerator!r}: choose auto, cpu or gpu")
    there = torch.cuda.is_available()
    if accelerator == "gpu" and not there:
        raise UserError(
            "trainer.accelerator=gpu: torch sees no GPU here; use cpu, or install a CUDA build of torch and its driver"
        )
    return torch.device("cuda", 0) if there and accelerator != "cpu" else torch.device("cpu")


def _teacher_temperature(cfg: TrainConfig) -> float:
    """Soft labels are those the responses were drawn from; of greedy ones, the target's plain distribution."""
    if cfg.objective.temperature is not None:
        return cfg.objective.temperature
    if cfg.objective.labels == "hard":
        return 1.0
    return cfg.data.temperature if 0 < cfg.data.temperature < math.inf else 1.0


def _check_data(cfg: TrainConfig, info: TargetInfo) -> None:
    data = cfg.data
    _positive("data", data, "train_prompts", "val_prompts", "prompt_tokens", "responses_per_batch", "rows_per_batch")
    if data.row_tokens < 128 or data.row_tokens % 128:
        raise UserError(f"data.row_tokens={data.row_tokens}: must be a positive multiple of 128")
    if data.kind not in ("prompts", "chat"):
        raise UserError(f"data.kind={data.kind!r}: choose prompts or chat")
    if data.kind == "chat" and data.path is None:
        raise UserError("data.path: data=chat needs a file, a folder, a glob or the name of a data set")
    if data.response_tokens < 2:
        raise UserError(
            f"data.response_tokens={data.response_tokens}: no token would be supervised after an anchor; use 2 or more"
        )
    if not 0 <= data.temperature < math.inf:
        raise UserError(f"data.temperature={data.temperature:g}: must be 0 (greedy) or positive")
    if data.offline and cfg.placement.kind == "split":
        raise UserError("data.offline=true: the targets of a split run would have nothing to do; use placement=colocated")
    if not 0 < data.offline_limit_gib < math.inf:
        raise UserError(f"data.offline_limit_gib={data.offline_limit_gib:g}: must be positive")
    if data.policy_documents < 0:
        raise UserError(f"data.policy_documents={data.policy_documents}: must be 0 (no check) or positive")
    if not 0 < data.held_out_share < 1:
        raise UserError(f"data.held_out_share={data.held_out_share:g}: must lie between 0 and 1")
    most = int(getattr(info.text, "max_position_embeddings", 0) or 0)
    longest = max(
        data.prompt_tokens + data.response_tokens,
        data.prompt_tokens + (cfg.evaluation.max_new_tokens or data.response_tokens) + cfg.drafter.block_size,
    )
    if most and longest > most:
        raise UserError(
            f"data.prompt_tokens + response tokens come to {longest}, but the target has positions for {most}; "
            "lower data.prompt_tokens, data.response_tokens or evaluation.max_new_tokens"
        )
    if data.kind == "chat":
        store_settings(data)
        if most and data.row_tokens > most:
            raise UserError(f"data.row_tokens={data.row_tokens}: the target has positions for {most}; lower it")
    elif data.prompts is not None and not Path(data.prompts).is_file():
        raise UserError(
            f"data.prompts={data.prompts!r}: no such file; give a .jsonl or .txt file of prompts, or null for the standard library"
        )


def _layout(placement: PlacementSection) -> Layout:
    if placement.kind not in ("colocated", "split"):
        raise UserError(f"placement.kind={placement.kind!r}: choose colocated or split")
    if placement.kind == "split" and placement.targets < 1:
        raise UserError(f"placement.targets={placement.targets}: a split run needs at least 1")
    if placement.kind == "colocated" and placement.targets:
        raise UserError(
            f"placement.targets={placement.targets}: colocated drafters have their target in their own process; use placement=split"
        )
    if placement.prefetch is not None and placement.prefetch < 0:
        raise UserError(f"placement.prefetch={placement.prefetch}: must be at least 0")
    if not 2 <= placement.timeout_s < math.inf:
        raise UserError(f"placement.timeout_s={placement.timeout_s:g}: must be at least 2 seconds")
    if not 0.001 <= placement.message_limit_gib < math.inf:  # less than a message about what is too large
        raise UserError(f"placement.message_limit_gib={placement.message_limit_gib:g}: must be at least 0.001")
    check_interface(placement.interface)
    layout = Layout(placement.targets, placement.drafters, placement.hosts)
    spare = layout.hosts * max(layout.targets - 1, 0)
    if not 0 <= placement.tolerate <= spare:
        raise UserError(
            f"placement.tolerate={placement.tolerate}: each host needs a target, so at most {spare} of this placement's can be spared; "
            "raise placement.targets, or lower it"
        )
    return layout


def make_plan(cfg: TrainConfig, *, checkpoint: bool = True) -> Plan:
    """Check ``cfg`` and derive what it leaves open.

    Args:
        checkpoint: look into that of ``ckpt_path``, too, which may be large, and for the data; once is enough for all processes of
            a run.

    Raises:
        UserError: for the first thing that cannot work, naming its key.
    """
    _no_giants(cfg)
    layout = _layout(cfg.placement)
    _positive(
        "trainer",
        cfg.trainer,
        "max_steps",
        "accumulate_grad_batches",
        "log_every_n_steps",
        "val_every",
        "threads",
        "limit_val_batches",
    )
    drafter_sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    _positive("drafter", cfg.drafter, "layers", "anchors", *drafter_sizes)
    if cfg.drafter.initializer_range is not None and cfg.drafter.initializer_range <= 0:
        raise UserError(f"drafter.initializer_range={cfg.drafter.initializer_range:g}: must be positive, or null")
    if not 0 <= cfg.drafter.feature_noise < math.inf:
        raise UserError(f"drafter.feature_noise={cfg.drafter.feature_noise:g}: must be 0 (none) or positive")
    _positive("evaluation", cfg.evaluation, "prompts", "max_new_tokens")
    if not cfg.evaluation.tree_budgets or min(cfg.evaluation.tree_budgets) < 1:
        raise UserError("evaluation.tree_budgets: give at least one budget, each 1 or more")
    budgets = list(cfg.evaluation.budgets)
    if any(budget < 1 for budget in budgets) or len(set(budgets)) < len(budgets):
        raise UserError(f"evaluation.budgets={budgets}: give different budgets, each 1 or more, or none for no draft trees")
    if any(not 0 <= t < math.inf for t in cfg.evaluation.temperatures):
        raise UserError("evaluation.temperatures: must be 0 (greedy) or positive")
    if cfg.optimizer.kind not in ("adamw", "muon"):
        raise UserError(f"optimizer.kind={cfg.optimizer.kind!r}: choose adamw or muon")
    if not 0 < cfg.optimizer.lr < math.inf:
        raise UserError(f"optimizer.lr={cfg.optimizer.lr:g}: must be positive")
    if not 0 <= cfg.optimizer.weight_decay < math.inf:
        raise UserError(f"optimizer.weight_decay={cfg.optimizer.weight_decay:g}: must be 0 or positive")
    if cfg.trainer.gradient_clip_val is not None and cfg.trainer.gradient_clip_val <= 0:
        raise UserError(f"trainer.gradient_clip_val={cfg.trainer.gradient_clip_val:g}: must be positive, or null for none")
    if not 0 <= cfg.optimizer.warmup < 1:
        raise UserError(f"optimizer.warmup={cfg.optimizer.warmup:g}: is a share of the steps, 0 <= share < 1")
    if len(cfg.optimizer.betas) != 2 or not all(0 <= b < 1 for b in cfg.optimizer.betas):
        raise UserError(f"optimizer.betas={list(cfg.optimizer.betas)}: give two numbers in 0..1")
    if cfg.trainer.precision not in (None, *_PRECISIONS):
        raise UserError(
            f"trainer.precision={cfg.trainer.precision!r}: choose {' or '.join(_PRECISIONS)} (the masters are fp32 in both)"
        )
    if cfg.trainer.max_time is not None:
        duration(cfg.trainer.max_time)
    if not 0 < cfg.trainer.save_within_s < math.inf:
        raise UserError(f"trainer.save_within_s={cfg.trainer.save_within_s:g}: must be positive")
    wanted(cfg.trainer.requeue)
    if cfg.target.dtype not in (None, *_DTYPES):
        raise UserError(f"target.dtype={cfg.target.dtype!r}: choose {', '.join(_DTYPES)}")
    if cfg.ckpt_path is not None and not Path(cfg.ckpt_path).is_file():
        raise UserError(f"ckpt_path={cfg.ckpt_path!r}: no such file; give a .ckpt file from a run's checkpoints folder")
    if cfg.drafter.init_from is not None and not (cfg.drafter.init_from and Path(cfg.drafter.init_from).is_dir()):
        raise UserError(f"drafter.init_from={cfg.drafter.init_from!r}: no such folder; give that of an exported drafter")
    if not 0 <= cfg.seed < 2**32:
        raise UserError(f"seed={cfg.seed}: must lie in 0..{2**32 - 1}")
    objective = Objective(**(asdict(cfg.objective) | {"temperature": _teacher_temperature(cfg)}))
    device = _device(cfg.trainer.accelerator)
    visible = gpus_of_host() if device.type == "cuda" else None
    of_local = devices(layout, visible, share=cfg.placement.share)
    if device.type == "cuda" and cfg.drafter.compile is False:
        raise UserError("drafter.compile=false: on a GPU the drafter's attention exists only compiled; leave it null")
    if device.type == "cpu" and objective.capacity < 1:
        raise UserError(f"objective.capacity={objective.capacity:g}: only the kernels of a GPU leave slots out; use 1 on a CPU")
    if cfg.drafter.block_size < 2:  # before derived values make it less plain
        raise UserError(
            f"drafter.block_size={cfg.drafter.block_size}: a block needs the anchor and at least one mask slot; use 2 or more"
        )

    info = TargetInfo.load(cfg.target.path, trust_remote_code=cfg.target.trust_remote_code)
    _check_data(cfg, info)
    if cfg.data.kind == "chat" and checkpoint:
        find_sources(cfg.data.path, split=cfg.data.split)
    drafter = derive_drafter(cfg.drafter, info)
    if cfg.drafter.init_from is not None:
        try:
            warm = read_config(cfg.drafter.init_from)
        except UserError as error:
            raise UserError(f"drafter.init_from: {error}") from None
        for name in (
            "block_size",
            "mask_token_id",
            "target_layer_ids",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_hidden_layers",
            "vocab_size",
            "causal",
            "layer_types",
            "sliding_window",
        ):
            theirs, ours = getattr(warm, name), getattr(drafter, name)
            if theirs != ours:
                raise UserError(f"drafter.init_from: that drafter has {name}={theirs}, this run {ours}; set them equal")
        if warm.path_width not in (0, drafter.path_width):  # a drafter without a path head may be given one
            theirs, ours = warm.path_width, drafter.path_width
            raise UserError(f"drafter.init_from: that drafter has path_width={theirs}, this run {ours}; set them equal")
    if device.type == "cpu":  # on a GPU the drafter's attention is never dense
        queries = cfg.drafter.anchors * cfg.drafter.block_size
        refuse_large(
            cfg.data.rows_per_batch, drafter.num_attention_heads, queries, cfg.data.row_tokens, cfg.drafter.dense_limit_gib
        )
    plan = Plan(
        info=info,
        drafter=drafter,
        objective=objective,
        layout=layout,
        devices=tuple(torch.device(device_name(of)) if layout.world > 1 else device for of in of_local),
        dtype=_DTYPES[cfg.target.dtype] if cfg.target.dtype else (torch.float32 if device.type == "cpu" else torch.bfloat16),
        precision=cfg.trainer.precision or ("32-true" if device.type == "cpu" else "bf16-mixed"),
        val_every=min(cfg.trainer.val_every or max(cfg.trainer.max_steps // 5, 1), cfg.trainer.max_steps),
        max_new_tokens=cfg.evaluation.max_new_tokens or cfg.data.response_tokens,
    )
    if cfg.ckpt_path is not None and checkpoint:
        _check_checkpoint(cfg.ckpt_path, cfg, plan)
    return plan


def _check_checkpoint(path: str, cfg: TrainConfig, plan: Plan) -> None:
    """Refuse what cannot be gone on from, before any work is done. What only the target's weights and the data tell is compared later."""
    saved = load(path, mmap=True)
    batches = (cfg.data.rows_per_batch, plan.layout.drafter_world, cfg.trainer.accumulate_grad_batches)
    known = {"data.row_tokens": cfg.data.row_tokens, **dict(zip(BATCHES, batches, strict=True))}
    compare(saved, {**settings(plan.module_settings(cfg)), **known})
    drafter_of(saved, path)
    done = check_count(saved.get("global_step"), "global_step")
    if done >= cfg.trainer.max_steps and has_ended(folder_of(path)):
        raise UserError(
            f"ckpt_path={path!r}: is of step {done}, and trainer.max_steps={cfg.trainer.max_steps}: nothing is left to train; "
            "dflash-lit export writes its drafter"
        )
