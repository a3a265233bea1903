"""Does a head that sees the draft tokens before a slot pay? Drafters trained from one init on the same batches, decoded for real.

    python benchmarks/path_head.py --out records.jsonl            # trains, decodes, appends a line a run
    python benchmarks/path_head.py --table records.jsonl          # the tables of docs/path_head.md

On the embedded target and a CPU. Every variant of a seed starts from the same weights and sees the same batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from dflash_lit.blocks import row_noise
from dflash_lit.config import TrainConfig, register
from dflash_lit.decode.acceptance import decoding
from dflash_lit.decode.chain import decode_chain
from dflash_lit.decode.lattice import make_lattice
from dflash_lit.decode.tree import decode_tree_batch
from dflash_lit.drafter.model import Drafter
from dflash_lit.drafter.path_head import PathHead
from dflash_lit.job import Job
from dflash_lit.module import DrafterModule
from dflash_lit.objective.head import tree_lengths
from dflash_lit.objective.metrics import accepted_lengths
from dflash_lit.objective.path import path_lengths
from dflash_lit.optimizer import make_optimizer
from dflash_lit.placement.strategy import LocalTarget
from dflash_lit.plan import make_plan
from dflash_lit.target.frozen import FrozenTarget

BUDGETS = (16, 64, 256)
Batch = dict[str, Tensor]


class FirstOrder(PathHead):
    """Knows the token before the slot and nothing else of the path."""

    def read(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        x = F.rms_norm(embeddings.to(self.token_proj.weight.dtype), (embeddings.shape[-1],), eps=self.eps)
        added = self.token_proj(x)
        return torch.zeros_like(added), added


class Blind(PathHead):
    """Knows no token at all: what the additional layer does by itself."""

    def read(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        nothing = embeddings.new_zeros(*embeddings.shape[:-1], self.token_proj.out_features)
        return nothing, nothing


class Product(PathHead):
    """Token and slot multiplied, as in DFlash 2's selector, with the recurrent state."""

    def activate(self, asked: Tensor, state: Tensor) -> Tensor:
        return asked * state


class FirstOrderProduct(FirstOrder, Product):
    """A low-rank bilinear form of neighbouring tokens, gated by the slot: DFlash 2's selector."""


class Deep(PathHead):
    """One more layer behind the sum of slot and state."""

    def __init__(self, hidden_size: int, width: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, width, eps)
        self.mid = torch.nn.Linear(width, width, bias=False)

    def activate(self, asked: Tensor, state: Tensor) -> Tensor:
        inner = super().activate(asked, state)
        return inner + F.silu(self.mid(inner))


KINDS: dict[str, type[PathHead]] = {
    "recurrent": PathHead,
    "first": FirstOrder,
    "deep": Deep,
    "blind": Blind,
    "product": Product,
    "first-product": FirstOrderProduct,
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the head is trained.

    "none": there is none. "detached": by a loss of its own, of which nothing reaches the drafter; so several heads, by kind and
    width, are trained on one and the same drafter. "both": that loss reaches the drafter, too, beside the one without the head.
    "drop": one loss, in half of the blocks without the head. "only": the loss with the head alone.
    """

    name: str
    training: str = "none"
    heads: tuple[tuple[str, int], ...] = (("recurrent", 256),)
    causal: bool = False


_HEADS = (*((kind, 256) for kind in KINDS), ("recurrent", 64), ("recurrent", 512))
VARIANTS = {
    v.name: v
    for v in (
        Variant("plain", heads=()),
        Variant("causal", heads=(), causal=True),
        Variant("detached", "detached", (("recurrent", 256), ("first", 256), ("blind", 256))),
        Variant("heads", "detached", _HEADS),
        *(Variant(training, training) for training in ("both", "drop", "only")),
        *(Variant(f"first/{training}", training, (("first", 256),)) for training in ("both", "drop")),
        Variant("causal+both", "both", causal=True),
        Variant("causal+drop", "drop", causal=True),
    )
}


class Bench:
    """Target, rows with features, and prompts, made once for all variants of a seed."""

    def __init__(self, seed: int, overrides: list[str], decoded: int) -> None:
        register()
        with initialize_config_dir(str(Path(__file__).parent.parent.resolve() / "conf"), version_base="1.3"):
            fixed = ["trainer.accelerator=cpu", f"evaluation.prompts={decoded}", "logger=csv"]
            folder = tempfile.mkdtemp(prefix="path-head-")
            composed = compose("train", overrides=[*fixed, f"paths.output_dir={folder}", *overrides])
        cfg = OmegaConf.to_object(composed)
        assert isinstance(cfg, TrainConfig)
        self.cfg, self.plan, self.seed = cfg, make_plan(cfg), seed
        job = Job(cfg, self.plan)
        target = job.target()
        assert isinstance(target, FrozenTarget)
        self.target, data = target, job.data(target)
        self.prompts = data.eval_prompts
        self.module_data = data.module
        self.module_data.seed = seed
        self.local = LocalTarget(target, self.plan.drafter.target_layer_ids, teacher=self.plan.objective.needs_teacher)
        self._kept: dict[tuple[str, int], dict[str, Tensor]] = {}

    def with_features(self, side: str, batch: Batch) -> Batch:
        """The target's part of a batch; rows keep theirs from epoch to epoch and from variant to variant."""
        ids = batch["row_ids"].tolist()
        if any((side, i) not in self._kept for i in ids):
            made = self.local.with_features(batch)
            for n, i in enumerate(ids):
                self._kept[side, i] = {name: made[name][n].clone() for name in ("features", "last_hidden") if name in made}
        names = self._kept[side, ids[0]]
        return {**batch, **{name: torch.stack([self._kept[side, i][name] for i in ids]) for name in names}}

    def train_batches(self) -> Iterator[tuple[int, Batch]]:
        epoch = 0
        while True:
            loader = self.module_data.train_dataloader()
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for batch in loader:
                yield epoch, self.with_features("train", batch)
            epoch += 1

    def module(self, variant: Variant, candidates: int) -> DrafterModule:
        """The same weights for all variants of a seed."""
        config = dataclasses.replace(self.plan.drafter, causal=variant.causal, path_candidates=candidates)
        torch.manual_seed(self.seed)
        return DrafterModule(
            config.to_dict(),
            self.target.ends(),
            self.plan.objective.to_dict(),
            anchors=self.cfg.drafter.anchors,
            seed=self.seed,
        )


def previous(module: DrafterModule, blocks: Any) -> Tensor:
    anchors = blocks.noise_ids.view(*blocks.anchors.shape, -1)[..., :1]
    before = torch.cat([anchors, blocks.labels[..., :-1]], dim=-1).flatten(0, 1)
    return F.embedding(before, module.embed)  # type: ignore[arg-type]


def train(bench: Bench, module: DrafterModule, variant: Variant, steps: int) -> tuple[dict[str, PathHead], float]:
    """Train the drafter of ``module``; its heads by name, and seconds."""
    module.train()
    config, cfg = module.config, bench.cfg.optimizer
    heads = {f"{kind}-{r}": KINDS[kind](config.hidden_size, r, config.rms_norm_eps) for kind, r in variant.heads}
    optimizers = []
    for part in (module.drafter, *heads.values()):
        made = make_optimizer(part, cfg.kind, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), weight_decay=cfg.weight_decay)
        schedule = get_cosine_schedule_with_warmup(made, round(cfg.warmup * steps), steps)
        optimizers.append((part, made, schedule))
    began = time.perf_counter()

    def loss(hidden: Tensor) -> Tensor:
        result = module.loss(batch, blocks, hidden)
        return result.numerator / result.denominator.clamp(min=1e-9)

    for step, (epoch, batch) in enumerate(bench.train_batches()):
        if step == steps:
            break
        blocks = module.blocks(batch, epoch)
        hidden = module(batch, blocks)
        before = previous(module, blocks)
        total = loss(hidden) if variant.training in ("none", "detached", "both") else hidden.new_zeros(())
        for head in heads.values():
            told = head(hidden.detach() if variant.training == "detached" else hidden, before)
            if variant.training == "drop":
                dropped = row_noise(bench.seed + 1, epoch, batch["row_ids"], blocks.anchors.shape[1]).flatten() < 0.5
                told = torch.where(dropped[:, None, None], hidden, told)
            total = total + loss(told)
        total.backward()
        for part, optimizer, schedule in optimizers:  # clipped apart: "detached" trains the very drafter of "plain"
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
    module.eval()
    return heads, time.perf_counter() - began


@torch.no_grad()
def teacher_forced(bench: Bench, module: DrafterModule, candidates: list[int]) -> dict[str, float]:
    """Mean lengths on the validation rows, bonus included, of the plain slots and for several numbers of candidates."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    head, budgets = module.drafter.path_head, BUDGETS[:2]

    def add(name: str, lengths: Tensor, complete: Tensor) -> None:
        sums[name][0] += float(((lengths + 1) * complete).sum())
        sums[name][1] += float(complete.sum())

    for batch in bench.module_data.val_dataloader():
        batch = bench.with_features("val", batch)
        blocks = module.blocks(batch, -1)
        hidden = module(batch, blocks)
        result = module.loss(batch, blocks, hidden, top=max(budgets))
        ok = blocks.label_ok.flatten(0, 1)
        complete = ok.all(dim=-1)
        add("slots chain", accepted_lengths(result.hit), complete)
        for n, budget in enumerate(budgets):
            add(f"slots @{budget}", tree_lengths(result, budgets)[:, n], complete)
        if head is None:
            continue
        logits = F.linear(hidden, module.head)
        anchors = blocks.noise_ids.view(*blocks.anchors.shape, -1)[..., 0].flatten()
        for k in candidates:
            lattice = make_lattice(head, bench.target.ends(), anchors, hidden, logits, k)
            chain, trees = path_lengths(lattice, blocks.labels.flatten(0, 1), ok, budgets)
            add(f"paths{k} chain", chain, complete)
            for n, budget in enumerate(budgets):
                add(f"paths{k} @{budget}", trees[:, n], complete)
    return {name: total / count for name, (total, count) in sums.items()}


def decode(bench: Bench, drafter: Drafter, tokens: int, temperatures: list[float]) -> dict[str, Any]:
    """Tau of the chain and of trees by real decoding, with standard errors over prompts; rounds of each prompt for the record."""
    found: dict[str, Any] = {}
    with decoding(drafter):
        for heat in temperatures:
            for budget in (0, *BUDGETS):
                generator = torch.Generator().manual_seed(bench.seed)
                if budget:
                    got = decode_tree_batch(
                        bench.target, drafter, bench.prompts, tokens, budget, temperature=heat, generator=generator
                    )
                else:
                    got = [
                        decode_chain(bench.target, drafter, p, tokens, temperature=heat, generator=generator)
                        for p in bench.prompts
                    ]
                found[f"T={heat:g} @{budget}"] = [[len(d.rounds), sum(d.rounds)] for d in got]
    return found


Rounds = list[list[int]]
"""Of each prompt: how many verify passes, and the tokens they yielded."""


def tau(rounds: Rounds) -> tuple[float, list[float]]:
    """Tokens a pass, and what each prompt adds to its error (the ratio linearised)."""
    passes = sum(count for count, _ in rounds)
    mean = sum(total for _, total in rounds) / passes
    return mean, [(total - mean * count) * len(rounds) / passes for count, total in rounds]


def error(shares: list[list[float]]) -> float:
    """Standard error over prompts of the mean over seeds, from each seed's share of each prompt."""
    prompts = [statistics.mean(of_prompt) for of_prompt in zip(*shares, strict=True)]
    return statistics.stdev(prompts) / math.sqrt(len(prompts))


def table(files: list[Path]) -> None:
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for setting in dict.fromkeys(line["setting"] for line in lines):
        runs = {(line["variant"], line["seed"]): line for line in lines if line["setting"] == setting}
        names = list(dict.fromkeys(variant for variant, _ in runs))
        found = {v: [run for (name, _), run in runs.items() if name == v] for v in names}
        decoded = [v for v in names if any(run["decoded"] for run in found[v])]
        keys = list(dict.fromkeys(key for run in runs.values() for key in run["decoded"]))
        print(f"\n{setting}. Tau by real decoding; in brackets, the difference to `plain` on the same prompts\n")
        print("| | seeds | " + " | ".join(key.replace("@0", "chain") for key in keys) + " |\n" + "|---" * (len(keys) + 2) + "|")
        for v in decoded:
            cells = []
            for key in keys:
                # All seeds decode the same prompts: their shares of the error are averaged prompt by prompt.
                means, gains = [], []
                shares: list[list[float]] = []
                gain_shares: list[list[float]] = []
                for run in found[v]:
                    mean, own = tau(run["decoded"][key])
                    plain, others = tau(runs["plain", run["seed"]]["decoded"][key])
                    means.append(mean)
                    gains.append(mean - plain)
                    shares.append(own)
                    gain_shares.append([a - b for a, b in zip(own, others, strict=True)])
                cell = f"{statistics.mean(means):.2f} ± {error(shares):.2f}"
                if v != "plain":
                    cell += f" ({statistics.mean(gains):+.2f} ± {error(gain_shares):.2f})"
                cells.append(cell)
            print(f"| {v} | {len(found[v])} | " + " | ".join(cells) + " |")
        figures = list(dict.fromkeys(name for run in runs.values() for name in run["forced"]))
        print("\nTeacher-forced on validation rows, each seed\n")
        print("| | " + " | ".join(figures) + " |\n" + "|---" * (len(figures) + 1) + "|")
        for v in names:
            cells = [" / ".join(f"{run['forced'][name]:.2f}" for run in found[v] if name in run["forced"]) for name in figures]
            print(f"| {v} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["detached", "both", "drop", "causal"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=16, help="decoded (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="a response (default: %(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0])
    parser.add_argument(
        "--candidates", type=int, nargs="+", default=[32, 64], help="of the teacher-forced figures; the last also of decoding"
    )
    parser.add_argument(
        "--decode",
        nargs="*",
        default=["plain", "causal", "detached recurrent-256", "both recurrent-256", "drop recurrent-256"],
        help="names in the table of those that are decoded for real",
    )
    parser.add_argument("--set", nargs="*", default=[], help="overrides of conf/, as for train.py")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the trained weights")
    parser.add_argument("--table", type=Path, nargs="+")
    args = parser.parse_args()
    if args.table:
        table(args.table)
        return
    torch.set_num_threads(1)
    for seed in args.seeds:
        bench = Bench(seed, args.set, args.prompts)
        for name in args.variants:
            variant = VARIANTS[name]
            module = bench.module(variant, args.candidates[-1])
            heads, seconds = train(bench, module, variant, args.steps)
            chosen: dict[str, PathHead | None] = dict(heads)
            if variant.training in ("none", "detached"):
                chosen = {"": None, **chosen}
            for label, head in chosen.items():
                module.drafter.path_head = head
                own = "plain" if head is None and variant.training == "detached" else f"{name} {label}".strip()
                began = time.perf_counter()
                forced = teacher_forced(bench, module, args.candidates)
                decoded = decode(bench, module.drafter, args.tokens, args.temperatures) if own in args.decode else {}
                line = {
                    "setting": f"{bench.plan.objective}, B={bench.plan.drafter.block_size}, {args.steps} steps",
                    "variant": own,
                    "seed": seed,
                    "train_s": round(seconds, 1),
                    "eval_s": round(time.perf_counter() - began, 1),
                    "forced": forced,
                    "decoded": decoded,
                }
                if args.keep:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    torch.save(module.drafter.state_dict(), args.keep / f"{own.replace(' ', '-')}-{seed}.pt")
                if args.out:
                    with args.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                figures = {k: round(tau(v)[0], 2) for k, v in decoded.items()}
                shown = {k: round(v, 3) for k, v in forced.items()}
                print(own, seed, line["train_s"], line["eval_s"], figures, shown, flush=True)


if __name__ == "__main__":
    main()
