"""Overrides of a run's config. What is accepted has to give a plan of just these values, and a first step whose loss is finite."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from dflash_lit.config import TrainConfig, register
from dflash_lit.drafter.model import Drafter
from dflash_lit.job import Job
from dflash_lit.module import DrafterModule
from dflash_lit.plan import Plan
from dflash_lit.target.ends import read_ends
from dflash_lit.target.frozen import EMBEDDED, TargetEnds, TargetInfo
from fuzzing.case import Case, Wrong
from fuzzing.damage import bytes_damaged, entry_damaged, odd_value, text_edited, torn
from fuzzing.tiny_run import CONF, planned

__all__ = ["Fuzzed"]

_SMALL = ("debug=fast", "data.train_prompts=8", "logger=csv", "placement.timeout_s=5")
_WORDS = (
    "nonsense", "''", "null", "true", "0", "1", "-1", "2", "3", "8", "16", "100", "128", "0.5", "-0.1", "1e-9", "1e9", "1e30", "1e400",
    "nan", "inf", "-inf", "4294967296", "99999999999999999999", "[]", "[1]", "[-1]", "[1,2]", "[0.1,0.2]", "[a]", "{}", "{a: 1}", "'é'",
    "${seed}", "${nowhere}", "${oc.env:NOWHERE}", "${trainer}", "auto", "cpu", "gpu", "soft", "embedded", "/", "/dev/null", "/dev/zero", "..",
    "adamw", "split", "chat", "full_attention", "[full_attention,sliding_attention]", "1_000", "0x10", "'1'", "1.0", "off",
)  # fmt: skip
_SHAPED = ("'", "[", "{a", "a=b", "${", "\\", "a,b", "range(1,3)", "choice()", "interval(0,1)", "@", "  ", "!!", '"', "\t")
_GROUPS = (
    "target",
    "drafter",
    "objective",
    "optimizer",
    "data",
    "placement",
    "trainer",
    "callbacks",
    "logger",
    "debug",
    "sweep",
)


def _keys() -> list[str]:
    """Every key of the schema that is one value."""
    found: list[str] = []

    def walk(node: Any, prefix: str) -> None:
        for field in fields(node):
            value = getattr(node, field.name)
            if is_dataclass(value):
                walk(value, f"{prefix}{field.name}.")
            elif field.name not in ("callbacks", "logger") and prefix != "paths.":
                found.append(f"{prefix}{field.name}")

    walk(TrainConfig(), "")
    return found


class Fuzzed:
    """Composes, plans and begins runs."""

    name = "config"

    def __init__(self, scratch: Path) -> None:
        register()
        self.keys = _keys()
        self.ends: TargetEnds | None = None
        self.callbacks = [str(key) for key in OmegaConf.load(CONF / "callbacks" / "default.yaml")]
        self.generator = torch.Generator()

    def case(self, rng: random.Random, folder: Path) -> Case:
        return self._files(rng, folder) if rng.random() < 0.3 else self._words(rng, folder)

    def _files(self, rng: random.Random, folder: Path) -> Case:
        """A file of conf/ as people leave it, or a disk."""
        conf = folder / "conf"
        shutil.copytree(CONF, conf)
        experiment = rng.choice([(), (), ("+experiment=ddtree",), ("optimizer=adamw",), ("objective=soft",)])
        read = [
            "train",
            "target/embedded",
            "drafter/small",
            "optimizer/muon",
            "trainer/default",
            "callbacks/default",
            "logger/csv",
            "debug/fast",
        ]
        path = conf / f"{rng.choice(read)}.yaml"
        kind = rng.choice(("bytes", "torn", "text", "value", "value", "value", "entry"))
        data = path.read_bytes()
        if kind == "entry":
            about = entry_damaged(path, rng)
        elif kind == "value":
            about = _value_edited(path, rng)
        else:
            change: Any = {"bytes": bytes_damaged, "torn": torn, "text": text_edited}[kind]
            changed, about = change(data, rng)
            path.write_bytes(changed)
        written = [f"paths.output_dir={folder}/run", f"data.cache_dir={folder}/cache", *_SMALL, *experiment]
        name = path.relative_to(conf).with_suffix("").as_posix()
        return Case(
            f"conf/{name}.yaml: {about}",
            lambda: planned([*written], conf),
            # Hydra names what it was composing; a wrong value is named as if it had been given.
            [name, path.stem, str(conf), name.split("/")[0], "defaults", *(key.rsplit(".", 1)[-1] for key in self.keys)],
            lambda made: self._begins(*made),
            may_write=["run", f"conf/away_{path.name}", f"away_{path.name}"],
            limit_s=60,
        )

    def _words(self, rng: random.Random, folder: Path) -> Case:
        overrides: list[str] = []
        names: list[str] = []
        for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
            key, override = self._override(rng)
            overrides.append(override)
            names += [key.rsplit(".", 1)[-1], override]
        written = [f"paths.output_dir={folder}/run", f"data.cache_dir={folder}/cache", *_SMALL]
        return Case(
            " ".join(overrides),
            lambda: planned([*written, *overrides]),
            # What a key does to another is said with the other's name.
            [*names, *(word for name in names for word in _GOES_WITH.get(name, ()))],
            lambda made: self._begins(*made),
            may_write=["run"],
            limit_s=60,
        )

    def _override(self, rng: random.Random) -> tuple[str, str]:
        key = rng.choice(self.keys)
        match rng.randrange(12):
            case 0:  # no such key
                key = rng.choice([f"{key}_", f"{key}.more", key.title(), "nowhere", f"nowhere.{key}"])
                return key, f"{rng.choice(['', '+', '~'])}{key}={rng.choice(_WORDS)}"
            case 1:
                group = rng.choice(_GROUPS)
                return group, f"{group}={rng.choice(['nothing', '../train', '', 'null', '[a]', 'small', 'default'])}"
            case 2:
                name = rng.choice(self.callbacks)
                field = rng.choice(["_target_", "nothing", "every", "monitor", "prompts"])
                value = rng.choice(
                    ["nothing", "os.system", "callbacks.nothing.Nothing", "1", "null", "[]", "-1", "builtins.print"]
                )
                return f"callbacks.{name}", f"++callbacks.{name}.{field}={value}"
            case 3:
                return key, f"{key}={rng.choice(_SHAPED)}"
            case 4:
                return key, f"{key}={_as_word(odd_value(rng))}"
            case _:
                return key, f"{key}={rng.choice(_WORDS)}"

    def _begins(self, cfg: TrainConfig, plan: Plan) -> None:
        """Callbacks can be made, and a first step has a loss and gradients that are finite."""
        Job(cfg, plan).instances()
        sizes = plan.drafter
        slots = cfg.data.rows_per_batch * cfg.drafter.anchors * sizes.block_size
        with torch.device("meta"):
            weights = sum(value.numel() for value in Drafter(sizes).parameters())
        if (
            weights > 3e6
            or slots > 1024
            or cfg.data.row_tokens > 512
            or sizes.path_candidates > 512
            or cfg.target.path != EMBEDDED
        ):
            return
        if self.ends is None:
            self.ends = read_ends(TargetInfo.load(EMBEDDED), device="cpu", dtype=torch.float32)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = DrafterModule(
                sizes.to_dict(),
                self.ends,
                plan.objective.to_dict(),
                anchors=cfg.drafter.anchors,
                seed=cfg.seed,
                optimizer=cfg.optimizer.kind,
                lr=cfg.optimizer.lr,
                betas=list(cfg.optimizer.betas),
                weight_decay=cfg.optimizer.weight_decay,
                warmup=cfg.optimizer.warmup,
                dense_limit_gib=cfg.drafter.dense_limit_gib,
            )
            batch = _batch(cfg, plan)
        blocks = module.blocks(batch, 0)
        result = module.loss(batch, blocks, module(batch, blocks), top=plan.objective.top)
        loss = result.numerator / result.denominator.clamp(min=1e-9)
        loss.backward()
        gradients = [value.grad for value in module.drafter.parameters() if value.grad is not None]
        if not bool(loss.isfinite()) or not all(bool(value.isfinite().all()) for value in gradients):
            raise Wrong(f"the first step's loss is {float(loss)}, or its gradients are not finite")


_GOES_WITH: dict[str, Sequence[str]] = {
    "kind": ["targets", "prompts", "path"],
    "target_layer_ids": ["layer"],
    "placement": ["targets"],
    "data": ["prompts", "path"],
    "target": ["target.path"],
    "drafter": ["dense attention"],
    "max_position_embeddings": ["positions"],
    **dict.fromkeys(
        ("anchors", "rows_per_batch", "row_tokens", "block_size", "num_attention_heads"), ("dense attention", "sliding_window")
    ),
    **dict.fromkeys(["prompt_tokens", "response_tokens", "max_new_tokens"], ("positions",)),
    "block_size": ["dense attention", "sliding_window", "positions"],
    "layers": ["layer_types", "sliding_window"],
    "drafters": ["hosts", "processes", "MASTER_ADDR"],
    "hosts": ["MASTER_ADDR", "processes"],
    "num_key_value_heads": ["num_attention_heads"],
    "num_attention_heads": ["num_key_value_heads"],
    "causal": ["sliding"],
    "tree_budgets": ["monitor"],
    "labels": ["temperature"],
}


def _value_edited(path: Path, rng: random.Random) -> str:
    """Another value, name, indentation or kind of entry in one line."""
    lines = path.read_text().splitlines()
    place = rng.choice([number for number, line in enumerate(lines) if ":" in line and not line.lstrip().startswith("#")])
    key, _, rest = lines[place].partition(":")
    match rng.randrange(5):
        case 0:
            lines[place] = f"{key}_:{rest}"
        case 1:
            lines[place] = f"  {lines[place]}"
        case 2:
            lines[place] = f"- {lines[place]}"
        case 3:
            lines[place] = f"{key}{rest}"
        case _:
            lines[place] = f"{key}: {rng.choice(_WORDS)}"
    path.write_text("\n".join(lines) + "\n")
    return repr(lines[place][:60])


def _as_word(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.encode("utf-8", "replace").decode().replace("\0", "").replace("\\", "") + "'"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _batch(cfg: TrainConfig, plan: Plan) -> dict[str, torch.Tensor]:
    """Random rows of the config's shapes, each of one document."""
    rows, tokens = cfg.data.rows_per_batch, cfg.data.row_tokens
    return {
        "input_ids": torch.randint(4, plan.drafter.vocab_size - 1, (rows, tokens)),
        "document_ids": torch.zeros(rows, tokens, dtype=torch.int32),
        "position_ids": torch.arange(tokens, dtype=torch.int32).expand(rows, tokens).contiguous(),
        "supervised": torch.ones(rows, tokens, dtype=torch.bool),
        "row_ids": torch.arange(rows),
        "features": torch.randn(rows, tokens, plan.drafter.feature_size),
        "last_hidden": torch.randn(rows, tokens, plan.drafter.hidden_size),
    }
