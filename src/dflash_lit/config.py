"""The schema of ``conf/``: every key a run can have, with its type, default and meaning.

Hydra checks names and types against it while composing; :mod:`dflash_lit.plan` checks what depends on the target and data.
``None`` means "derived", and the derivation is named beside it.
"""

from __future__ import annotations

import netrc
import os
from dataclasses import dataclass, field
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from dflash_lit.requeue import run_folder

__all__ = ["TrainConfig", "register", "wandb_offline"]

# OmegaConf reads these annotations at run time and wants Optional[...] rather than "| None" in older versions.
# ruff: noqa: UP045


@dataclass
class TargetSection:
    path: str = MISSING  # a Hugging Face folder or name, or "embedded"
    dtype: Optional[str] = None  # float32 on a CPU, else bfloat16
    attention: str = "sdpa"  # Hugging Face attention implementation, of decoding and of packed rows on a CPU
    compile: Optional[bool] = None  # packed rows through compiled layers and flex_attention; on a GPU
    trust_remote_code: bool = False
    dense_limit_gib: float = 4.0  # refuse a dense document mask beyond this


@dataclass
class DrafterSection:
    block_size: int = 8  # slots a block, the anchor included
    layers: int = 2
    features: int = 3  # target layers it reads
    anchors: int = 32  # blocks a row
    target_layer_ids: Optional[list[int]] = None  # the DFlash rule for `features` layers
    mask_token_id: Optional[int] = None  # the tokenizer's mask token, else its first unused id
    intermediate_size: Optional[int] = None  # the target's
    num_attention_heads: Optional[int] = None  # the target's
    num_key_value_heads: Optional[int] = None  # the target's
    head_dim: Optional[int] = None  # the target's
    causal: bool = False  # slots see only slots up to their own
    sliding_window: Optional[int] = None  # tokens of context that sliding layers see; None: no layer slides
    layer_types: Optional[list[str]] = None  # full_attention | sliding_attention of each; with a window all but the last slide
    path_width: int = 0  # of the head that conditions a slot on the draft tokens before it; 0: none
    path_candidates: int = 64  # tokens a slot that draft paths are made of, with that head
    rope_parameters: dict[str, Any] = field(default_factory=dict)  # empty: the target's
    initializer_range: Optional[float] = None  # the target's, more below a width of 1024
    feature_noise: float = 0.0  # uniform noise on the features while training, +- this; 0.05 is usual
    init_from: Optional[str] = None  # folder of an exported drafter to start from
    dense_limit_gib: float = 4.0  # refuse dense attention beyond this (CPU)
    compile: Optional[bool] = None  # on a GPU, where attention is never anything else


@dataclass
class ObjectiveSection:
    labels: str = "hard"  # hard (the target's text) | soft (forward KL to the target's distribution)
    temperature: Optional[float] = None  # of the target's distribution: that of the responses (1 if they are greedy)
    capacity: float = 1.0  # share of the slots whose loss a GPU computes; labels beyond it are left out and counted
    weights: str = "decay"  # decay | dpace | tree_survival
    gamma: Optional[float] = None  # suits the block size
    alpha: float = 0.5  # D-PACE's floor
    tree_budget: int = 64  # nodes of the tree in which tree_survival wants the text to stay
    tree_temperature: float = 2.0  # nats around the tree's edge that count
    floor: float = 0.3  # share of the weight that does not depend on the tree
    floor_weights: str = "decay"  # decay | dpace
    chunk_slots: int = 4096  # slots whose logits exist at a time
    use_reentrant: bool = False  # form of gradient checkpointing


@dataclass
class OptimizerSection:
    kind: str = "adamw"  # adamw | muon (matrices; AdamW for the rest)
    lr: float = 6e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup: float = 0.04  # share of the steps


@dataclass
class DataSection:
    kind: str = "prompts"  # prompts (the target writes the responses now) | chat (it wrote them before: they are in the data)
    prompts: Optional[str] = MISSING  # a .jsonl or .txt file; None: the standard library's sources
    path: Any = None  # of chat: file, folder, glob or data set, or a list of them
    split: str = "train"  # of a Hugging Face data set
    columns: dict[str, str] = field(default_factory=dict)  # other names of columns: {messages: conversation}
    thinking: Optional[str] = (
        "mixed"  # "on" | "off" (as it will be served) | mixed (as recorded) | None: the template is not told
    )
    thinking_argument: str = "enable_thinking"  # what the chat template calls it
    template_arguments: dict[str, Any] = field(default_factory=dict)  # further ones of the chat template
    skip_limit: float = 0.01  # share of the records that may be broken
    long: str = "split"  # documents longer than a row: split (with context) | truncate | reject
    workers: Optional[int] = None  # processes that tokenise; one a core
    held_out_share: float = 0.1  # of a prompts file or of chats; the standard library has its own split
    train_prompts: int = 640  # at most; of chat: documents
    val_prompts: int = 48
    prompt_tokens: int = 48  # of chat: of the prompts that are decoded, at most
    response_tokens: int = 208
    temperature: float = 0.7  # of the target's responses: near the one it will be served at; of chat: that they were drawn at
    responses_per_batch: int = 230  # prompts generated for at a time
    row_tokens: int = 256
    rows_per_batch: int = 4
    validate_on_train: bool = False  # for debug=overfit
    offline: bool = False  # write the target's features once, and read them in every epoch and run; for small data
    offline_limit_gib: float = 64.0  # refuse to write more
    policy_documents: int = 32  # of chat: held-out documents that are checked for being the target's own text; 0: none
    cache_dir: Optional[str] = None  # XDG_CACHE_HOME/dflash_lit


@dataclass
class PlacementSection:
    kind: str = (
        "colocated"  # colocated (each drafter's process holds a target, too) | split (targets in processes of their own)
    )
    drafters: int = 1  # processes a host that train, data-parallel
    targets: int = 0  # processes a host that hold the target, of a split run
    hosts: int = 1
    prefetch: Optional[int] = None  # requests in flight while a drafter trains on a batch: targets / drafters, and one more
    share: bool = False  # let ranks share GPUs where there are too few (slow)
    timeout_s: float = 15.0  # a process not heard of for so long ends the run
    tolerate: int = 0  # target processes that may be missing at a time: training goes on with the others
    interface: Optional[str] = (
        None  # of the network; loopback on one host, else the one that leads to host 0; "all": listen on all
    )
    message_limit_gib: float = 4.0  # refuse messages between drafters and targets that are larger; features are none


@dataclass
class TrainerSection:
    max_steps: int = 500
    accelerator: str = "auto"  # auto | cpu | gpu
    precision: Optional[str] = None  # 32-true on a CPU, else bf16-mixed (fp32 masters either way)
    accumulate_grad_batches: int = 1
    gradient_clip_val: Optional[float] = 1.0
    val_every: Optional[int] = None  # steps; a fifth of the run
    limit_val_batches: Optional[int] = None
    num_sanity_val_steps: int = 0
    log_every_n_steps: int = 5
    enable_progress_bar: bool = True
    threads: Optional[int] = None  # CPU threads of torch; torch's own choice
    max_time: Optional[str] = None  # DD:HH:MM:SS or hours, from the program's start: then it saves and ends with 0
    save_within_s: float = 60.0  # of SIGTERM, SIGUSR1 or max_time: a run that has not ended by then fails
    requeue: Optional[bool] = None  # after SIGUSR1 let SLURM start the run again; in a batch job


@dataclass
class EvaluationSection:
    prompts: int = 10  # held-out prompts decoded after training
    max_new_tokens: Optional[int] = None  # data.response_tokens: as long as what was trained on
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7])
    tree_budgets: list[int] = field(default_factory=lambda: [16, 64, 256])  # of the teacher-forced val/tree_eal@...
    budgets: list[int] = field(default_factory=lambda: [16, 64])  # of the draft trees decoded after training; may be empty
    compile: Optional[bool] = None  # chains and the target alone by compiled passes; on a GPU, if the target's code allows it


@dataclass
class PathsSection:
    output_dir: str = MISSING  # the run folder


@dataclass
class TrainConfig:
    target: TargetSection = field(default_factory=TargetSection)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    data: DataSection = field(default_factory=DataSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    paths: PathsSection = field(default_factory=PathsSection)
    callbacks: dict[str, Any] = field(default_factory=dict)  # name -> {_target_: ..., ...}
    logger: dict[str, Any] = field(default_factory=dict)  # name -> {_target_: ..., ...}
    seed: int = 0
    ckpt_path: Optional[str] = None  # resume from this Lightning checkpoint
    optimized_metric: Optional[str] = None  # key of summary.json that a sweeper maximises


def wandb_offline() -> bool:
    """Whether W&B has to stay offline: no key in the environment or in ``~/.netrc``, and no mode asked for."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode != "online"
    if os.environ.get("WANDB_API_KEY"):
        return False
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is None
    except (OSError, netrc.NetrcParseError):
        return True


def register() -> None:
    """Make the schema known to Hydra under the name ``schema``, and the resolvers that conf/ uses."""
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    # A resolver, so that `--cfg job` shows the key and not one machine's answer.
    OmegaConf.register_new_resolver("wandb_offline", wandb_offline, replace=True)
    ConfigStore.instance().store(name="schema", node=TrainConfig)
