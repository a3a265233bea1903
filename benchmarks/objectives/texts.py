"""The target and the texts: a corpus of Python sources, a model trained on it, and what the model writes.

Files are told apart by the hash of their names: 80 % train the target, 16 % give the drafters' prompts, 4 % the held-out ones.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_lit.data.documents import Document
from dflash_lit.data.packing import PackedRows, pack
from dflash_lit.data.prompts import stdlib_prompts
from dflash_lit.data.repetition import is_repetitive
from dflash_lit.data.respond import PromptBatch, generate_batch
from dflash_lit.target.embedded import build
from dflash_lit.target.embedded.corpus import SourceFile
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from objectives.settings import RESPONSE_TEMPERATURE, Settings

__all__ = ["build_target", "choose_prompts", "corpus", "load_target", "pack_texts", "respond"]

SHARES = {"target": 80, "drafter": 16, "held out": 4}


def _files(roots: Sequence[str]) -> Iterator[tuple[str, Path]]:
    folders = [Path(root) for root in roots]
    if not folders:
        found = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sys.prefix}
        folders = [Path(place) for place in sorted(found)] + sorted(Path("/usr/lib").glob("python3*"))
    seen: set[Path] = set()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            real = path.resolve()
            if real not in seen:
                seen.add(real)
                yield path.relative_to(folder).as_posix(), path


def corpus(roots: Sequence[str]) -> dict[str, list[SourceFile]]:
    """Distinct ``*.py`` files of 200 to 400,000 bytes below ``roots``, by their use (see :data:`SHARES`)."""
    sides: dict[str, list[SourceFile]] = {side: [] for side in SHARES}
    seen: set[bytes] = set()
    for name, path in _files(roots):
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(raw).digest()
        if not 200 <= len(raw) <= 400_000 or digest in seen:
            continue
        seen.add(digest)
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
        side = "target" if place < 80 else "drafter" if place < 96 else "held out"
        sides[side].append(SourceFile(name, text))
    return sides


def _cut(stream: Tensor, count: int, size: int, end: int, seed: int) -> np.ndarray:
    """``count`` pieces [count, size] of the token stream that do not overlap and lie inside a file, in random order."""
    pieces = stream[: len(stream) // size * size].view(-1, size).numpy()
    pieces = np.unique(pieces[~(pieces == end).any(axis=1)], axis=0)
    order = np.random.default_rng(seed).permutation(len(pieces))
    return pieces[order[:count]].astype(np.int32)


def build_target(settings: Settings, folder: Path) -> None:
    """Train the target; ``folder/target`` and ``folder/prompts.npz``."""
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments = [part for name, value in settings.recipe.items() for part in (f"--{name}", str(value))]
    args = build.options().parse_args(["--out", str(folder / "target"), *arguments])
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    sides = corpus(settings.roots)
    print(f"{ {side: len(files) for side, files in sides.items()} } files, {time.monotonic() - began:.0f} s", flush=True)
    sample = rng.sample(sides["target"], min(len(sides["target"]), 4000))
    tokenizer = build.train_tokenizer([file.text for file in sample], args.vocabulary)
    streams = {side: build.encode(tokenizer, rng.sample(files, len(files))) for side, files in sides.items()}
    tokens = {side: len(stream) for side, stream in streams.items()}
    print(f"{tokens} tokens, {time.monotonic() - began:.0f} s", flush=True)

    end = int(tokenizer.eos_token_id)
    train = _cut(streams["drafter"], settings.train_prompts, settings.prompt_tokens, end, 0)
    held = _cut(streams["held out"], settings.held_prompts, settings.prompt_tokens, end, 1)
    np.savez(folder / "prompts.npz", train=train, held=held)

    model, seen = build.train_model(tokenizer, streams["target"].to(device), args)
    model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    held_stream = streams["held out"].to(device)
    size = sum(len(file.text.encode()) + 1 for file in sides["held out"])
    score = build.bits_per_byte(model, held_stream[: 512 * 512], size * min(len(held_stream), 512 * 512) // len(held_stream))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    facts = {
        "files": {side: len(files) for side, files in sides.items()},
        "tokens": tokens,
        "tokens_seen": seen,
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_bits_per_byte": round(score, 4),
        "lookahead": args.lookahead,
        "seconds": round(time.monotonic() - began, 1),
    }
    (folder / "target.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts), flush=True)


def choose_prompts(settings: Settings, folder: Path) -> None:
    """``folder/prompts.npz`` for a target that is there already: from the standard library, as the main job has it."""
    tokenizer = TargetInfo.load(settings.target or str(folder / "target")).tokenizer
    sides = {}
    for side, count, held_out in (("train", settings.train_prompts, False), ("held", settings.held_prompts, True)):
        found = stdlib_prompts(tokenizer, count=count, prompt_tokens=settings.prompt_tokens, held_out=held_out, seed=0)
        sides[side] = np.array([prompt.input_ids for prompt in found], dtype=np.int32)
    np.savez(folder / "prompts.npz", **sides)


def load_target(settings: Settings, folder: Path, device: torch.device) -> FrozenTarget:
    """The target, its weights as the product reads them."""
    return FrozenTarget.load(TargetInfo.load(settings.target or str(folder / "target")), device=device)


def respond(settings: Settings, folder: Path, part: int, parts: int) -> None:
    """Every ``parts``-th batch of prompts, answered by the target: ``folder/responses-PART.npz``.

    Rows are prompt and response, -1 behind its end. The batches are those of the main job and draw the same wherever they run.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(settings, folder, device)
    saved = np.load(folder / "prompts.npz")
    prompts = np.concatenate([saved["held"], saved["train"]])
    found: dict[str, list[np.ndarray]] = {"numbers": [], "texts": []}
    size, began = settings.responses_per_batch, time.monotonic()
    for number, start in enumerate(range(0, len(prompts), size)):
        if number % parts != part:
            continue
        chosen = prompts[start : start + size]
        batch = PromptBatch(
            tuple(tuple(prompt) for prompt in chosen.tolist()),
            number,
            max_new_tokens=settings.response_tokens,
            temperature=RESPONSE_TEMPERATURE,
            end_ids=target.eos_ids,
            pad_id=target.info.pad_id,
            seed=0,
        )
        texts = np.full((len(chosen), settings.row_tokens), -1, dtype=np.int32)
        texts[:, : settings.prompt_tokens] = chosen
        for row, response in enumerate(generate_batch(target, batch)):
            texts[row, settings.prompt_tokens : settings.prompt_tokens + len(response)] = response
        found["numbers"].append(np.arange(start, start + len(chosen)))
        found["texts"].append(texts)
        print(f"batch {number}: {len(chosen)} responses, {time.monotonic() - began:.1f} s", flush=True)
    empty = {"numbers": np.zeros(0, dtype=np.int64), "texts": np.zeros((0, settings.row_tokens), dtype=np.int32)}
    np.savez(folder / f"responses-{part}.npz", **{name: np.concatenate([empty[name], *parts]) for name, parts in found.items()})


def pack_texts(settings: Settings, folder: Path) -> dict[str, int]:
    """Texts into rows, one a row: ``folder/rows/train`` and ``folder/rows/held``; how many, and what was left out.

    As in the main job, a response that got stuck in a short cycle, or holds the mask token, is not learnt. Nor measured on.
    """
    info = TargetInfo.load(settings.target or str(folder / "target"))
    mask, end = info.default_mask_token(), info.tokenizer.eos_token_id
    numbers, texts = [], []
    for path in sorted(folder.glob("responses-*.npz")):
        saved = np.load(path)
        numbers.append(saved["numbers"])
        texts.append(saved["texts"])
    order = np.argsort(np.concatenate(numbers))
    everything = np.concatenate(texts)[order]
    held = len(np.load(folder / "prompts.npz")["held"])
    facts: dict[str, int] = {}
    for side, rows in (("held", everything[:held]), ("train", everything[held:])):
        documents, dropped = [], 0
        for number, row in enumerate(rows):
            ids = row[row >= 0]
            said = ids[settings.prompt_tokens :]
            if len(said) and said[-1] == end:
                said = said[:-1]
            if not len(said) or is_repetitive(said) or (ids == mask).any():
                dropped += 1
                continue
            documents.append(Document(ids, np.arange(len(ids)) >= settings.prompt_tokens, f"{side} {number}"))
        packed: PackedRows = pack(documents, settings.row_tokens, seed=0, pad_id=info.pad_id, one_per_row=True)
        packed.save(folder / "rows" / side)
        facts |= {f"{side}_texts": len(documents), f"{side}_dropped": dropped}
    (folder / "texts.json").write_text(json.dumps(facts) + "\n")
    return facts
