"""Cold starts in a row, the compile cache deleted between them and during them: a line of JSON, and exit code 1 if one failed.

    python benchmarks/compile_torture.py --starts 50 --at-once 4 --shape tiny --delete during

Each start is a process of its own that fits a drafter on random features through the Trainer, with the warm-up callback: it
compiles cold, trains and validates with the seal closed, and saves a checkpoint. Those of a wave compile at the same time, into
one cache. On a CPU (``--shape tiny``) the drafter's graphs have a dense mask.

With ``--starts 2 --at-once 1 --delete never`` the first start is cold and the second warm. ``--starts 1 --steps 500`` is a long
run in which nothing may compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def worker(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(HERE.parent))
    began = time.monotonic()
    import lightning as L
    import numpy as np
    import torch
    from common import SHAPES, qwen3_8b, random_ends
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torch import Tensor

    from callbacks.compile_warmup import CompileWarmup
    from dflash_lit.compilation.cache import use_cache
    from dflash_lit.data.datamodule import RowDataModule
    from dflash_lit.data.packing import PackedRows
    from dflash_lit.module import DrafterModule
    from dflash_lit.placement.feature_loader import FeatureLoader

    use_cache()
    imported = time.monotonic() - began
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    shape = SHAPES[args.shape]
    config = qwen3_8b(shape.block, tiny=args.shape == "tiny")
    if args.layers:
        config = dataclasses.replace(config, num_hidden_layers=args.layers)
    torch.manual_seed(0)  # all starts train the same: their losses are compared

    class RandomFeatures(SingleDeviceStrategy):
        """Features of a fixed random table: what a target would send, without one."""

        table = torch.randn(1, shape.tokens, config.feature_size, dtype=torch.bfloat16)

        def with_features(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            if self.table.device != device:
                self.table = self.table.to(device)
            return {**batch, "features": self.table.expand(batch["input_ids"].shape[0], -1, -1).contiguous()}

        def process_dataloader(self, dataloader: object) -> FeatureLoader:
            return FeatureLoader(dataloader, self)

    def rows(count: int) -> PackedRows:
        ids = np.random.default_rng(0).integers(4, config.vocab_size - 400, (count, shape.tokens), dtype=np.int32)
        place = np.broadcast_to(np.arange(shape.tokens, dtype=np.int32), ids.shape).copy()
        return PackedRows(ids, np.zeros_like(ids), place, np.ones(ids.shape, dtype=np.bool_))

    with device:
        module = DrafterModule(
            config.to_dict(), random_ends(config, device), {"weights": "dpace"}, anchors=shape.anchors, compile_on_cpu=True
        )
    warmup = CompileWarmup()
    with tempfile.TemporaryDirectory() as folder:
        save = ModelCheckpoint(folder, save_top_k=1, every_n_train_steps=max(args.steps // 2, 1), save_weights_only=True)
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            strategy=RandomFeatures(device=device),
            precision="bf16-mixed",
            max_steps=args.steps,
            max_epochs=-1,
            gradient_clip_val=1.0,
            val_check_interval=max(args.steps // 2, 1),
            check_val_every_n_epoch=None,
            limit_val_batches=2,
            num_sanity_val_steps=1,
            inference_mode=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[warmup, save],
            default_root_dir=folder,
        )
        # Five validation rows: the last batch of validation is a partial one.
        trainer.fit(module, datamodule=RowDataModule(rows(8 * shape.rows), rows(shape.rows + 1), shape.rows, 0))
    facts = {
        "warmup_s": round(sum(made.seconds for made in warmup.made), 2),
        "imports_s": round(imported, 2),
        "graphs": sum(made.graphs for made in warmup.made),
        "hits": sum(made.hits for made in warmup.made),
        "misses": sum(made.misses for made in warmup.made),
        "recompiles": int(trainer.callback_metrics["compile/recompiles"]),
        "loss": float(trainer.callback_metrics["train/loss"]),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
    }
    print("FACTS " + json.dumps(facts))


def start(args: argparse.Namespace, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--worker", "--shape", args.shape, "--steps", str(args.steps)]
    command += ["--layers", str(args.layers)] if args.layers else []
    environment = {**os.environ, "DFLASH_LIT_COMPILE_CACHE": str(cache)}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment.pop(name, None)
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("S", "M", "L", "P", "tiny"), default="tiny")
    parser.add_argument("--starts", type=int, default=50, help="processes in all (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="processes that start together (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="training steps of each (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the drafter: all have one graph, fewer need less memory (default: 5)")
    parser.add_argument("--delete", choices=("never", "between", "during"), default="during")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of deletion")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0

    cache = Path(tempfile.mkdtemp(prefix="torture_"))
    moments = random.Random(args.seed)
    done = threading.Event()
    deletions = 0

    def deleting() -> None:
        nonlocal deletions
        while not done.wait(moments.uniform(0.5, 6.0)):
            shutil.rmtree(cache, ignore_errors=True)
            deletions += 1

    if args.delete == "during":
        threading.Thread(target=deleting, daemon=True).start()
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    began = time.monotonic()
    for first in range(0, args.starts, args.at_once):
        if args.delete != "never":
            shutil.rmtree(cache, ignore_errors=True)
        for process in [start(args, cache) for _ in range(min(args.at_once, args.starts - first))]:
            output, _ = process.communicate()
            found = [line.removeprefix("FACTS ") for line in output.splitlines() if line.startswith("FACTS ")]
            if process.returncode == 0 and found:
                results.append(json.loads(found[0]))
            else:
                failures.append(output[-2000:])
                print(f"a start failed with code {process.returncode}:\n{output[-2000:]}", file=sys.stderr, flush=True)
        print(f"{len(results)} of {args.starts} survived, {len(failures)} failed", file=sys.stderr, flush=True)
    done.set()
    shutil.rmtree(cache, ignore_errors=True)
    seconds = [result["warmup_s"] for result in results]
    losses = [result["loss"] for result in results]
    line = {
        "starts": args.starts,
        "failures": len(failures),
        "deletions": deletions,
        "at_once": args.at_once,
        "shape": args.shape,
        "layers": args.layers,
        "steps": args.steps,
        "recompiles": sum(result["recompiles"] for result in results),
        "warmup_s": {"first": seconds[0], "median": statistics.median(seconds), "most": max(seconds)} if seconds else None,
        "loss_spread": max(losses) / min(losses) - 1 if losses else None,
        "graphs": sorted({result["graphs"] for result in results}),
        "last": results[-1] if results else None,
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(line))
    # What was not tested must not pass: no deletion, or losses that a compile changed. On a GPU the reductions' tiles are
    # chosen by timing them, so that two compilations of one graph add in different orders.
    fine = not failures and not line["recompiles"] and line["loss_spread"] is not None and line["loss_spread"] < 1e-3
    return 0 if fine and (args.delete != "during" or deletions) else 1


if __name__ == "__main__":
    raise SystemExit(main())
