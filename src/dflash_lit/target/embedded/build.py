"""Make the embedded target again: ``python -m dflash_lit.target.embedded.build --out FOLDER``.

A small Qwen3 language model of Python source code, trained from scratch with its own byte-level BPE tokenizer on text that
every machine has (:mod:`.corpus`). It exists so that a first run can use a *real* target on a laptop: real text, real
entropy, a real tokenizer, and the very files and loading code a large model has.

With ``--lookahead K`` an auxiliary loss asks the last feature layer to predict up to K further tokens through small heads
that are thrown away (multi-token prediction, Gloeckle et al., arXiv 2404.19737). Large models plan ahead without being
told; a model this small does so only when trained for it.

Prints the held-out bits per byte: the mean negative log2-likelihood of the files of the held-out tenth over their bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash_lit.target.embedded.corpus import SourceFile, is_held_out, package_files, stdlib_files

END, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"

# Permissively licensed (BSD, MIT, Apache-2.0, PSF) and installed wherever this project is, or on a machine with a GPU.
PACKAGES = (
    "accelerate attrs datasets einops fsspec httpx huggingface_hub hydra-core hypothesis jax jinja2 lightning matplotlib mpmath"
    " networkx numpy omegaconf optax pandas pip pydantic pygments pytest pytorch-lightning rich scikit-learn scipy setuptools"
    " sympy torch torchmetrics torchvision transformers triton typer wandb"
).split()


def collect(stdlib: str | None, packages: Sequence[str], most: int | None = None) -> tuple[list[SourceFile], list[SourceFile]]:
    """Return (training files, held-out files of the standard library), without exact duplicates.

    Args:
        stdlib: folder of the standard library; default: the running interpreter's.
        packages: names of distributions; those not installed are passed over.
        most: take only so many training files (for a quick trial).
    """
    seen: set[str] = set()
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for file in stdlib_files(stdlib, with_tests=True):
        if file.text not in seen:
            seen.add(file.text)
            (held_out if is_held_out(file.name) else train).append(file)
    for file in package_files(packages):
        if file.text not in seen and not is_held_out(file.name):
            seen.add(file.text)
            train.append(file)
    return train[:most], held_out


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``size`` entries; digits apart, runs of spaces together, as code wants it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END, PAD, MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, mask_token=MASK)


def encode(tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> Tensor:
    """All files as one int32 stream, each ended by the end token."""
    end = tokenizer.eos_token_id
    parts: list[Tensor] = []
    for start in range(0, len(files), 256):  # an encoding is far larger than its ids: keep few at a time
        texts = [file.text for file in files[start : start + 256]]
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts)
        parts += [torch.tensor([*encoding.ids, end], dtype=torch.int32) for encoding in encodings]
    return torch.cat(parts)


class Lookahead(nn.Module):
    """Heads for the 2nd..K+1-th next token on one layer's output; used in training only."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.maps = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(count))

    def loss(self, states: Tensor, ids: Tensor, head: Tensor) -> Tensor:
        states = self.norm(states)
        total = states.new_zeros(())
        for k, linear in enumerate(self.maps, start=2):
            logits = F.linear(linear(states[:, :-k]), head)
            total = total + F.cross_entropy(logits.flatten(0, 1).float(), ids[:, k:].flatten()) * 0.8 ** (k - 2)
        return total


def batches(stream: Tensor, rows: int, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless random windows int64 [rows, length] of the token stream."""
    while True:
        starts = torch.randint(len(stream) - length, (rows, 1), generator=generator, device=stream.device)
        yield stream[starts + torch.arange(length, device=stream.device)].long()


@torch.no_grad()
def bits_per_byte(model: Qwen3ForCausalLM, stream: Tensor, size: int, length: int = 512) -> float:
    """Mean negative log2-likelihood of ``stream`` (whole windows only) over the bytes it stands for.

    ``size`` is the number of bytes of the whole stream; the windows' share of it is taken by tokens.
    """
    count = len(stream) // length
    windows = stream[: count * length].view(count, length).long()
    nll = 0.0
    for rows in windows.split(64):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        nll += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    predicted = count * (length - 1)
    return nll / predicted / math.log(2) * len(stream) / size


def model_config(tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> Qwen3Config:
    """The model's config by ``args`` of :func:`options`."""
    return Qwen3Config(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(args.heads // 2, 1),
        head_dim=args.hidden // args.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )


def train_model(tokenizer: PreTrainedTokenizerFast, train: Tensor, args: argparse.Namespace) -> tuple[Any, int]:
    """A new model, trained for ``args.minutes`` on the token stream ``train``, on its device; and how many tokens it saw.

    Args:
        args: of :func:`options`.
    """
    device = train.device
    config = model_config(tokenizer, args)
    model: Any = Qwen3ForCausalLM(config).to(device)  # type: ignore[arg-type]
    feature_layer = args.layers - 3  # the last layer a drafter may read
    lookahead = Lookahead(args.hidden, args.lookahead).to(device)
    matrices = [p for n, p in model.model.layers.named_parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim < 2), *lookahead.parameters()]
    # Muon on the matrices: at equal steps a clearly better small model than AdamW alone.
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"),
    ]

    def loss_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = model.model(input_ids=ids, use_cache=False, output_hidden_states=args.lookahead > 0)
            logits = F.linear(out.last_hidden_state[:, :-1], model.lm_head.weight)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            if not args.lookahead:
                return loss, loss
            states = out.hidden_states[feature_layer + 1]
            return loss, loss + args.lookahead_weight * lookahead.loss(states, ids, model.lm_head.weight)

    step_loss = torch.compile(loss_of) if device.type == "cuda" else loss_of
    feed = batches(train, args.rows, 512, torch.Generator(device).manual_seed(args.seed))
    begin = time.monotonic()
    step, done = 0, 0.0
    while done < 1.0:
        # Progress is time: the recipe is "this many minutes of this machine".
        done = min((time.monotonic() - begin) / (args.minutes * 60), 1.0)
        scale = min(step / 100, 1.0) * (1.0 if done < 0.6 else max(1.0 - (done - 0.6) / 0.4, 0.0))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * scale
        loss, total = step_loss(next(feed))
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 200 == 0:
            print(
                f"step {step}  loss {loss.item():.3f}  total {total.item():.3f}  {step * args.rows * 512 / 1e6:.0f} M tokens  {100 * done:.0f} %",
                flush=True,
            )
            if step == 0:
                begin = time.monotonic()  # compilation is not training
        step += 1
    return model, step * args.rows * 512


def build(args: argparse.Namespace) -> dict[str, float | int | str]:
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    started = time.monotonic()

    train_files, held_files = collect(args.stdlib, args.packages, args.max_files)
    print(
        f"{len(train_files)} files to train on ({sum(len(f.text) for f in train_files) / 1e6:.0f} MB), {len(held_files)} held out"
    )
    sample = random.sample(train_files, min(len(train_files), 4000))
    tokenizer = train_tokenizer([file.text for file in sample], args.vocabulary)
    train = encode(tokenizer, random.sample(train_files, len(train_files))).to(device)
    held = encode(tokenizer, held_files).to(device)
    held_bytes = sum(len(file.text.encode()) + 1 for file in held_files)
    print(
        f"{len(train) / 1e6:.1f} M training tokens, {held_bytes / len(held):.2f} bytes a token, {time.monotonic() - started:.0f} s"
    )

    model, seen = train_model(tokenizer, train, args)
    model.to(torch.bfloat16).eval()
    score = bits_per_byte(model, held, held_bytes)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    facts: dict[str, float | int | str] = {
        "held_out_bits_per_byte": round(score, 4),
        "held_out_bytes": held_bytes,
        "bytes_per_token": round(held_bytes / len(held), 3),
        "training_tokens_seen": seen,
        "training_bytes": sum(len(file.text) for file in train_files),
        "parameters": sum(p.numel() for p in model.parameters()),
        "lookahead": args.lookahead,
        "minutes": args.minutes,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    (out / "build.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def options() -> argparse.ArgumentParser:
    """The recipe's settings, with those of the embedded target as defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write (Hugging Face layout)")
    parser.add_argument("--minutes", type=float, default=4.3, help="training time")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--stdlib", help="another interpreter's standard library folder")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="distributions whose sources are trained on, too")
    parser.add_argument("--max-files", type=int, help="train on so many files only (for a quick trial)")
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lookahead", type=int, default=7)
    parser.add_argument("--lookahead-weight", type=float, default=0.3)
    parser.add_argument("--rows", type=int, default=256, help="windows of 512 tokens a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: list[str] | None = None) -> None:
    facts = build(options().parse_args(argv))
    for name, value in facts.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
