"""A large data set from its store to batches: a line of JSON. No GPU is needed.

    python benchmarks/data.py --documents 1100000

Documents of log-normal lengths and random tokens are written into a store once (4 bytes a token). A process of its own then does what
a run does at its start when everything has been tokenised before: key, index, split, plan of the rows (``start_s`` from the first
import to the first batch; ``peak_gib`` of memory until then). Then it loads random rows for some seconds (``loader_tokens_per_s``).
Tokenising is timed apart, with generated conversations, in one process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

DEMAND = 15_000
"""Tokens/s that a drafter trains at on one H200, target included; docs/performance.md."""

# The words of conversations that are tokenised; ChatML.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def section(source: Path, row_tokens: int) -> Any:
    from dflash_lit.config import DataSection

    return DataSection(
        kind="chat",
        prompts=None,
        path=str(source),
        row_tokens=row_tokens,
        train_prompts=10**9,
        val_prompts=256,
        held_out_share=0.01,
        prompt_tokens=4096,
        workers=1,
    )


def generate(folder: Path, documents: int, median: float, sigma: float, longest: int) -> None:
    """Write a store as tokenising would have left it, part by part, of random tokens."""
    import numpy as np
    import pyarrow

    from dflash_lit.data.chat_data import store_settings
    from dflash_lit.data.skips import Skips
    from dflash_lit.data.sources import find_sources
    from dflash_lit.data.store import SCHEMA, fingerprint, write_index
    from dflash_lit.target.frozen import EMBEDDED, TargetInfo

    source = folder / "generated.jsonl"
    source.write_text("{}\n")
    info = TargetInfo.load(EMBEDDED)
    settings = store_settings(section(source, 4096), vocab_size=int(info.text.vocab_size), mask_token_id=2)
    store = folder / "documents" / f"documents-{fingerprint(find_sources(str(source)), info.tokenizer, settings)[:32]}"
    store.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, first in enumerate(range(0, documents, 4096)):
        count = min(4096, documents - first)
        lengths = np.clip(rng.lognormal(np.log(median), sigma, count), 16, longest).astype(np.int64)
        # One conversation in four has three turns: a prompt and a response in each third.
        turns = np.where((rng.random(count) < 0.25) & (lengths > 60), 3, 1)
        spans = []
        for length, number in zip(lengths.tolist(), turns.tolist(), strict=True):
            ends = [length * (turn + 1) // number for turn in range(number)]
            starts = [
                end - int(length / number * share) for end, share in zip(ends, rng.uniform(0.4, 0.9, number), strict=True)
            ]
            spans.append([place for pair in zip((max(s, 1) for s in starts), ends, strict=True) for place in pair])
        tokens = pyarrow.array(rng.integers(3, 500, int(lengths.sum()), dtype=np.int32))
        offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        numbers = np.arange(first, first + count)
        columns = [
            pyarrow.ListArray.from_arrays(offsets, tokens),
            pyarrow.array(spans, type=pyarrow.list_(pyarrow.int32())),
            pyarrow.array([f"generated.jsonl:{number + 1}" for number in numbers]),
            pyarrow.array(np.arange(count, dtype=np.int32)),
            pyarrow.array(numbers.astype(np.int64)),
            pyarrow.array(np.ones(count, dtype=np.bool_)),
            pyarrow.array(rng.random(count)),
            pyarrow.array(_sums(tokens.to_numpy(), lengths), type=pyarrow.uint32()),
        ]
        with (
            pyarrow.OSFile(str(store / f"{part:06d}.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, SCHEMA) as writer,
        ):
            writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=SCHEMA))
    write_index(store, Skips(seen=documents), 0.0)


def _sums(tokens: Any, lengths: Any) -> list[int]:
    """Of the tokens of each document."""
    ends = lengths.cumsum().tolist()
    return [zlib.crc32(tokens[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]


def measure(folder: Path, row_tokens: int, rows_per_batch: int, seconds: float, began: float) -> dict[str, Any]:
    import numpy as np

    from dflash_lit.data.chat_data import chat_data
    from dflash_lit.data.datamodule import RowDataModule
    from dflash_lit.data.row_plan import plan_rows
    from dflash_lit.target.frozen import EMBEDDED, TargetInfo

    info = TargetInfo.load(EMBEDDED)
    imported = time.perf_counter()
    made = chat_data(
        section(folder / "generated.jsonl", row_tokens),
        info,
        mask_token_id=2,
        seed=0,
        cache_dir=folder,
        decoded=10,
        progress=False,
    )
    assert made.from_cache
    module = RowDataModule(made.train, made.val, rows_per_batch, seed=0)
    next(iter(module.train_dataloader()))
    started = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    spans = made.store.supervision.take(made.train.documents)
    began_plan = time.perf_counter()
    plan_rows(spans, row_tokens, seed=1)
    planned = time.perf_counter() - began_plan

    loader, batches = module.train_dataloader(), 0
    loading = time.perf_counter()
    for _ in loader:
        batches += 1
        if time.perf_counter() - loading > seconds:
            break
    rate = batches * rows_per_batch * row_tokens / (time.perf_counter() - loading)

    figures, plan = made.figures(512), made.train.plan
    quartile = np.searchsorted(np.quantile(spans.lengths, [0.25, 0.5, 0.75]), spans.lengths)[plan.documents]
    rows = np.random.default_rng(0).permutation(len(plan))
    steps = rows[: len(rows) // rows_per_batch * rows_per_batch].reshape(-1, rows_per_batch)
    classes = sum((plan.per_row((quartile == q).astype(int)) > 0)[steps].any(axis=1).astype(int) for q in range(4))
    return {
        "documents": figures["documents"],
        "tokens": figures["document_tokens"],
        "rows": len(plan),
        "row_tokens": row_tokens,
        "start_s": round(started - began, 1),
        "start_without_imports_s": round(started - imported, 1),
        "plan_s": round(planned, 1),
        "peak_gib": round(peak, 2),
        "packing_efficiency": round(plan.packed, 4),
        "padding": round(1 - plan.filled, 5),
        "window_context": round(plan.window_context, 4),
        "steps_of_one_length_quartile": round(float(np.mean(classes == 1)), 5),
        "steps_of_all_length_quartiles": round(float(np.mean(classes == 4)), 5),
        "loader_rows_per_s": round(rate / row_tokens),
        "loader_tokens_per_s": round(rate),
        "loader_against_demand": round(rate / DEMAND, 1),
        "peak_with_loading_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def tokenise(folder: Path, conversations: int) -> dict[str, Any]:
    """Conversations of words through a chat template and the embedded tokenizer, in this process."""
    from dflash_lit.data.store import StoreSettings, build_store
    from dflash_lit.target.frozen import EMBEDDED, TargetInfo

    draw = random.Random(0)
    words = [f"{a}{b}" for a in ("re", "con", "de", "in", "pro") for b in ("turn", "test", "fine", "form", "gress", "call")]
    path = folder / "talks.jsonl"
    with path.open("w") as file:
        for _ in range(conversations):
            turns = [
                {"role": role, "content": " ".join(draw.choices(words, k=int(draw.lognormvariate(4.5, 0.8)) + 2))}
                for role in ("user", "assistant") * draw.choice((1, 1, 1, 3))
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    tokenizer = TargetInfo.load(EMBEDDED).tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    began = time.perf_counter()
    store, known = build_store(str(path), tokenizer, StoreSettings(), folder / "talks", workers=1, progress=False)
    seconds = time.perf_counter() - began
    assert not known
    return {
        "tokenised_records_per_s": round(store.skips.seen / seconds),
        "tokenised_tokens_per_s": round(float(store.lengths.sum()) / seconds),
        "tokenised_mb_per_s": round(path.stat().st_size / seconds / 1e6, 2),
    }


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument(
        "--median", type=float, default=735.0, help="tokens of a document (default: %(default)s, a mean of 1,010)"
    )
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of the tokens (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=40_000, help="tokens of a document (default: %(default)s)")
    parser.add_argument("--row-tokens", type=int, default=4096, help="(default: %(default)s)")
    parser.add_argument("--rows-per-batch", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of loading (default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=3000, help="that are tokenised (default: %(default)s)")
    parser.add_argument("--folder", help="where the store is kept (default: a temporary folder)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # the process of its own
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Path(args.measure), args.row_tokens, args.rows_per_batch, args.seconds, began)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "documents").exists():
            generate(folder, args.documents, args.median, args.sigma, args.longest)
        options = ["--row-tokens", str(args.row_tokens), "--rows-per-batch", str(args.rows_per_batch)]
        command = [sys.executable, __file__, "--measure", str(folder), *options, "--seconds", str(args.seconds)]
        measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(json.dumps({**measured, **tokenise(Path(temporary), args.conversations)}))


if __name__ == "__main__":
    main()
