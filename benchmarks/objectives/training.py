"""One drafter from its first weights to its last record."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from dflash_lit.data.datamodule import RowDataset
from dflash_lit.data.packing import PackedRows
from dflash_lit.data.repetition import is_repetitive
from dflash_lit.decode.acceptance import decoding
from dflash_lit.decode.chain import Decoded
from dflash_lit.decode.chain_tree import draft_chain_tree
from dflash_lit.decode.tree import decode_tree_batch, draft_tree
from dflash_lit.drafter.config import DrafterConfig, feature_layers
from dflash_lit.drafter.model import Drafter
from dflash_lit.export import load_drafter, save_drafter
from dflash_lit.module import DrafterModule
from dflash_lit.objective.config import Objective
from dflash_lit.objective.head import HeadResult
from dflash_lit.placement.strategy import LocalTarget
from dflash_lit.target.frozen import FrozenTarget
from objectives.lengths import lengths_text
from objectives.settings import DRAFTERS, OBJECTIVES, RESPONSE_TEMPERATURE, Job, Settings
from objectives.texts import load_target

__all__ = ["Late", "Workbench", "drafter_config"]

Record = dict[str, Any]


class Late(Exception):  # noqa: N818 - not an error: the time given is over
    """The deadline came first."""


def drafter_config(settings: Settings, target: FrozenTarget) -> DrafterConfig:
    """A drafter for the target, by the rules of the main job."""
    text = target.info.text
    return DrafterConfig(
        hidden_size=text.hidden_size,
        intermediate_size=settings.intermediate or text.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        vocab_size=text.vocab_size,
        block_size=settings.block,
        mask_token_id=target.info.default_mask_token(),
        target_layer_ids=feature_layers(target.info.layers, settings.features),
        num_target_layers=target.info.layers,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(text.rope_parameters),
        initializer_range=max(text.initializer_range, 0.02 * (1024 / text.hidden_size) ** 0.5),
        target_fingerprint=target.fingerprint,
    )


def _on_device(rows: PackedRows, device: torch.device) -> dict[str, Tensor]:
    batch = RowDataset(rows).batch(range(len(rows)), len(rows))
    return {name: column.to(device) for name, column in batch.items()}


def _mean(result: HeadResult) -> Tensor:
    return result.numerator / torch.where(result.denominator == 0, 1.0, result.denominator)


@dataclass
class Workbench:
    """What the jobs of one process share: the target and the texts, on its device.

    Args:
        folder: of the experiment.
        train_rows, held_rows: columns of all texts, as in a batch.
        prompts: to decode.
        deadline: ``time.time()`` after which :class:`Late` is raised.
    """

    settings: Settings
    folder: Path
    target: FrozenTarget
    train_rows: dict[str, Tensor]
    held_rows: dict[str, Tensor]
    prompts: list[list[int]]
    deadline: float = float("inf")

    def __post_init__(self) -> None:
        self.device = self.target.device
        self.config = drafter_config(self.settings, self.target)
        self._modules: dict[str, DrafterModule] = {}

    @classmethod
    def load(cls, settings: Settings, folder: Path, deadline: float = float("inf")) -> Workbench:
        """Read target and texts."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        target = load_target(settings, folder, device)
        train, held = (_on_device(PackedRows.load(folder / "rows" / side), device) for side in ("train", "held"))
        prompts = np.load(folder / "prompts.npz")["held"][: settings.decode_prompts].tolist()
        return cls(settings, folder, target, train, held, prompts, deadline)

    def _in_time(self) -> None:
        if time.time() > self.deadline:
            raise Late

    # -- training

    def module(self, job: Job) -> DrafterModule:
        """The module with the first weights of the job: the same for all objectives of a seed.

        There is one module for all jobs of a process and kind of drafter, so that its graphs are compiled once.
        """
        settings, objective = self.settings, OBJECTIVES[job.objective]
        kind = DRAFTERS.get(job.objective, {})
        if objective["labels"] == "soft":
            objective = {**objective, "temperature": RESPONSE_TEMPERATURE}
        if (name := str(kind)) not in self._modules:
            self._modules[name] = DrafterModule(
                replace(self.config, **kind).to_dict(),
                self.target.ends(),
                anchors=settings.anchors,
                optimizer=settings.optimizer,
                lr=settings.lr,
                warmup=settings.warmup,
                tree_budgets=settings.budgets,
            ).to(self.device)
        module = self._modules[name]
        module.objective, module.seed = Objective(**objective), job.seed
        module.register_buffer("floor_ratio", torch.ones((), device=self.device))
        torch.manual_seed(job.seed)
        module.drafter.reset_parameters()
        if job.after is not None:
            module.drafter.load_state_dict(load_drafter(self.folder / "jobs" / job.after / "drafter").state_dict())
        for parameter in module.drafter.parameters():
            parameter.grad = None
        return module

    def batches(self, seed: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Endless (epoch, batch); the same for all objectives of a seed."""
        count, rows = len(self.train_rows["row_ids"]), self.settings.rows
        epoch = 0
        while True:
            order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(count)).to(self.device)
            for chosen in order[: max(count // rows, 1) * rows].split(rows):
                yield epoch, {name: column[chosen] for name, column in self.train_rows.items()}
            epoch += 1

    def train(self, job: Job, module: DrafterModule) -> Record:
        """Train in place, as ``DrafterModule.training_step`` does with one device and one micro-batch a step.

        A training that the deadline ends is saved, and taken up by the next call for the same job.

        Raises:
            Late: after the deadline.
        """
        local = LocalTarget(self.target, self.config.target_layer_ids, teacher=module.objective.needs_teacher)
        optimizer = module.make_optimizer()
        schedule = get_cosine_schedule_with_warmup(optimizer, round(module.warmup * job.steps), job.steps)
        module.train()
        losses: list[Tensor] = []
        first, seconds = 0, 0.0
        saved = self.folder / "jobs" / job.name / "training.pt"
        if saved.exists():
            state = torch.load(saved, map_location=self.device, weights_only=True)
            module.drafter.load_state_dict(state["drafter"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            module.floor_ratio.copy_(state["floor_ratio"])
            losses, seconds = list(state["losses"].unbind()), state["seconds"]
            first = len(losses)
        began = time.monotonic() - seconds
        for step, (epoch, rows) in zip(range(job.steps), self.batches(job.seed), strict=False):
            if step < first:
                continue
            batch = local.with_features(rows)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                blocks = module.blocks(batch, epoch)
                hidden = module(batch, blocks)
                result = module.loss(batch, blocks, hidden)
                path = None if module.drafter.path_head is None else module.loss(batch, blocks, module.tell(hidden, blocks))
            loss = _mean(result)
            (loss if path is None else loss + _mean(path)).backward()
            for part in module._parts():  # apart: a path head changes nothing of the drafter beside it
                torch.nn.utils.clip_grad_norm_(part, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if module.objective.top:
                tree, floor = module._weight_sums(result, blocks)
                module.floor_ratio.copy_(module.objective.floor_ratio(tree, floor))
            losses.append(loss.detach())
            if step % 50 == 49:
                # Read now and then: the host must not run so far ahead that the deadline passes unseen.
                value, seconds = float(losses[-1]), time.monotonic() - began
                if step % 500 == 499:
                    print(f"{job.name}: step {step + 1}, loss {value:.3f}, {seconds:.0f} s", flush=True)
                if time.time() > self.deadline:
                    saved.parent.mkdir(parents=True, exist_ok=True)
                    state = {
                        "drafter": module.drafter.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(),
                        "floor_ratio": module.floor_ratio,
                        "losses": torch.stack(losses),
                        "seconds": seconds,
                    }
                    torch.save(state, saved.with_suffix(".tmp"))
                    os.replace(saved.with_suffix(".tmp"), saved)
                    raise Late
        curve = torch.stack(losses).cpu()
        tenth = max(len(curve) // 10, 1)
        return {
            "steps": job.steps,
            "train_seconds": round(time.monotonic() - began, 1),
            "loss": [round(float(part.mean()), 4) for part in curve.split(tenth)],
        }

    # -- measuring

    def measure(self, module: DrafterModule) -> Record:
        """Accepted lengths on the held-out texts, block by block: the same blocks for all drafters."""
        settings = self.settings
        local = LocalTarget(self.target, self.config.target_layer_ids, teacher=module.objective.needs_teacher)
        seed, module.seed = module.seed, 0
        texts: dict[str, list[str]] = {"chain": [], **{str(budget): [] for budget in settings.budgets}}
        nll: list[Tensor] = []
        count = len(self.held_rows["row_ids"])
        try:
            for start in range(0, count, settings.rows):
                # Whole batches only have the shapes of training: the last one goes back over rows that were measured already.
                first = max(min(start, count - settings.rows), 0)
                batch = local.with_features({name: x[first : first + settings.rows] for name, x in self.held_rows.items()})
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                    blocks = module.blocks(batch, -1)
                    result, _, chain, trees = module._measured(batch, blocks)
                complete = blocks.label_ok.flatten(0, 1).all(dim=-1)
                new = slice((start - first) * settings.anchors, None)
                lengths = torch.cat([chain[:, None], trees], dim=1)
                for column, name in enumerate(texts):
                    texts[name].append(lengths_text(lengths[new, column].tolist(), complete[new].tolist()))
                nll.append(result.nll[complete].mean())
        finally:
            module.seed = seed
        return {
            "blocks": {name: "".join(parts) for name, parts in texts.items()},
            "anchors": settings.anchors,
            "nll": round(float(torch.stack(nll).mean()), 4),
        }

    def decode(self, drafter: Drafter, temperature: float, budget: int) -> Record:
        """Real decoding of the held-out prompts; budget 0 is the chain."""
        made: list[Decoded] = []
        began = time.monotonic()
        size = self.settings.decode_batch
        start = 0
        with decoding(drafter):
            while start < len(self.prompts):
                self._in_time()
                generator = torch.Generator(self.device).manual_seed(start)
                try:
                    made += decode_tree_batch(
                        self.target,
                        drafter,
                        self.prompts[start : start + size],
                        self.settings.new_tokens,
                        budget or self.config.block_size - 1,
                        temperature=temperature,
                        generator=generator if temperature else None,
                        draft=draft_tree if budget else draft_chain_tree,
                    )
                except torch.OutOfMemoryError:
                    if size == 1:
                        raise
                    size = (size + 1) // 2
                    torch.cuda.empty_cache()
                    continue
                start += size
        return {
            "tokens": [sum(d.rounds) for d in made],
            "rounds": [len(d.rounds) for d in made],
            "loops": [int(is_repetitive(np.array(d.ids))) for d in made],
            "texts": [zlib.crc32(np.array(d.ids, dtype=np.int32).tobytes()) for d in made],
            "decode_seconds": round(time.monotonic() - began, 1),
        }

    # -- the whole of a job

    def run(self, job: Job, write: Callable[[Record], None], done: set[tuple[Any, ...]]) -> None:
        """Train unless its drafter is there, then decode what is not among ``done`` (regime, objective, seed, T, budget)."""
        folder = self.folder / "jobs" / job.name
        about = {
            "target": self.target.fingerprint,
            "regime": job.regime,
            "objective": job.objective,
            "seed": job.seed,
        }
        if not (folder / "drafter").is_dir():
            module = self.module(job)
            trained = self.train(job, module)
            measured = self.measure(module)
            write({"kind": "trained", **about, **trained, **measured, "settings": module.objective.to_dict()})
            save_drafter(module.drafter, folder / "drafter")
            (folder / "training.pt").unlink(missing_ok=True)
        drafter = load_drafter(folder / "drafter").to(self.device, self.target.dtype)
        for temperature in self.settings.temperatures:
            for budget in (0, *self.settings.budgets):
                if (job.regime, job.objective, job.seed, temperature, budget) in done:
                    continue
                decoded = self.decode(drafter, temperature, budget)
                write({"kind": "decoded", **about, "temperature": temperature, "budget": budget, **decoded})
        (folder / "done").write_text(json.dumps({"at": time.time()}) + "\n")
