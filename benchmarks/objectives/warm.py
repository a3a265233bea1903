"""Fill the compile cache before there is a target: the graphs of a step depend on sizes alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from dflash_lit.compilation.cache import use_cache
from dflash_lit.target.embedded import build
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo
from objectives.settings import Job, Settings
from objectives.training import Workbench

__all__ = ["warm_up"]


def warm_up(settings: Settings, folder: Path) -> None:
    """Train, measure and decode for a moment with a random target of the sizes of the one that will be built."""
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        use_cache()
    arguments = [part for name, value in settings.recipe.items() for part in (f"--{name}", str(value))]
    args = build.options().parse_args(["--out", str(folder), *arguments])
    tokenizer = TargetInfo.load(EMBEDDED).tokenizer
    config = build.model_config(tokenizer, args)  # type: ignore[arg-type]
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    target = FrozenTarget(TargetInfo("random", config, tokenizer), model)

    shape = (settings.rows, settings.row_tokens)
    place = torch.arange(shape[1], dtype=torch.int32, device=device).repeat(shape[0], 1)
    rows = {
        "input_ids": torch.randint(args.vocabulary, shape, device=device),
        "document_ids": torch.zeros_like(place),
        "position_ids": place,
        "supervised": place >= settings.prompt_tokens,
        "row_ids": torch.arange(shape[0], device=device),
    }
    prompts = rows["input_ids"][:2, : settings.prompt_tokens].tolist()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Workbench(settings, Path(temporary), target, rows, rows, prompts)
        for objective in ("soft-dpace", "ce-decay", "soft-mix-T2", "soft-dpace-path"):
            job = Job("warm-up", objective, 0, 3)
            bench.run(job, lambda record: print({name: record[name] for name in record if name != "blocks"}, flush=True), set())
