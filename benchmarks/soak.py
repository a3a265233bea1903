"""A long run of tiny steps on a split placement: does anything grow that should not?

    python benchmarks/soak.py --steps 20000 --out soak

trains a small drafter for a small target of random weights, as ``python train.py`` does, kills each target rank once and starts it again
by the line that the run prints, and samples every process meanwhile: memory, file handles, threads, names in ``/dev/shm``; queue
depth from the run's metrics. ``soak.json`` has the samples and the verdict, ``soak.png`` the picture. Exit code 1 if anything grew.

Flat means, for each process while it trains or serves, after the first fifth of that time (caches, allocators):

- memory: of a line through its samples (least squares), at most ``--mib`` MiB in 10,000 steps, or in all of a shorter run; resident
  memory of the process's own (``RssAnon``), without pages of files: libraries' come as they are first used, and go as the kernel likes;
- file handles, threads: with as many targets missing, the median of the last quarter of the samples not above that of the first
  quarter by more than 2 (a loader or a checkpoint may be open);
- ``/dev/shm``: the same, by 0;
- queue depth: never above ``prefetch + 1``, and its line changes by less than 1 over the run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lit.target.frozen import EMBEDDED, TargetInfo

ROOT = Path(__file__).parent.parent
MARK = "DFLASH_LIT_SOAK"
RESTART = re.compile(r"lost: rank (\d+) .*to start it again on its host: (.*)")
BACK = re.compile(r"rank (\d+) .* is back")
FIGURES = ("own_mib", "handles", "threads", "shm")


@dataclass(frozen=True)
class Sample:
    """One process at one moment.

    Attributes:
        who: its rank, and of one that was started again how often.
        seconds: since the run began.
        step: the newest that the run had logged.
        rss_mib: resident memory.
        own_mib: of it, what is not of files.
        shm: names in /dev/shm that it has mapped.
        missing: target ranks that were lost and not back.
    """

    who: str
    seconds: float
    step: int
    rss_mib: float
    own_mib: float
    handles: int
    threads: int
    shm: int
    missing: int = 0


def prepare(folder: Path, rows: int, tokens: int) -> None:
    """A target of random weights with the embedded one's tokenizer, and texts of random tokens."""
    torch.manual_seed(0)
    info = TargetInfo.load(EMBEDDED)
    config = Qwen3Config(
        vocab_size=info.text.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=info.text.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    info.tokenizer.save_pretrained(folder / "target")
    drawn = np.random.default_rng(0)
    with (folder / "texts.jsonl").open("w") as file:
        for _ in range(rows):
            ids = drawn.integers(10, 500, tokens).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (tokens - 4)}) + "\n")


class Held(Callback):
    """Holds training up after a step until there is a file; targets that come back are taken in meanwhile.

    In a short run, which would be over before a process has started.
    """

    def __init__(self, step: int, until: str) -> None:
        self.step, self.until = step, Path(until)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        while trainer.global_step == self.step and not self.until.exists():
            trainer.strategy.source._channel.targets()  # type: ignore[attr-defined]
            time.sleep(0.1)


class Run:
    """The processes of a training run, in a session of their own, found by a mark in their environment."""

    def __init__(self, folder: Path, *overrides: str, script: str, **environment: str) -> None:
        self.mark, self.script = uuid.uuid4().hex, Path(script).name.encode()
        self.said_at = folder / "said.txt"
        self.environment = os.environ | {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_CONFIG_HOME": str(folder / "config"),  # where those that are started again find the run's secret
            "WANDB_MODE": "disabled",
            **environment,
        }
        self.again: list[subprocess.Popen[bytes]] = []
        self.began = time.monotonic()
        with self.said_at.open("w") as said:
            self.first = subprocess.Popen(
                [sys.executable, script, *overrides], cwd=ROOT, env=self.environment, stdout=said, stderr=said
            )

    def said(self) -> str:
        return self.said_at.read_text()

    def step(self) -> int:
        return int((re.findall(r"step ([\d,]+)/", self.said()) or ["0"])[-1].replace(",", ""))

    def restart(self, line: str) -> None:
        """A lost rank, by the line that the run has printed."""
        *variables, _, script = shlex.split(line)
        told = dict(variable.split("=", 1) for variable in variables)
        with self.said_at.open("a") as said:
            self.again.append(
                subprocess.Popen(
                    [sys.executable, script],
                    cwd=ROOT,
                    env=self.environment | told,
                    stdout=said,
                    stderr=said,
                    stdin=subprocess.DEVNULL,
                )
            )

    def marked(self) -> dict[int, bytes]:
        """Environments of all that the run has started and that live, whatever they do, by pid."""
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and f"{MARK}={self.mark}".encode() in (raw := (folder / "environ").read_bytes()):
                    found[int(folder.name)] = raw
        return found

    def processes(self) -> dict[int, str]:
        """Names of the ranks that live, by pid."""
        found = {}
        restarted = [process.pid for process in self.again]
        for pid, raw in self.marked().items():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if self.script not in Path(f"/proc/{pid}/cmdline").read_bytes():  # workers that compile
                    continue
                values = dict(item.split("=", 1) for item in raw.decode().split("\0") if "=" in item)
                rank = values.get("DFLASH_LIT_REJOIN", values.get("DFLASH_LIT_LOCAL_RANK", "0"))
                found[pid] = f"rank {rank}" + (" again" if pid in restarted else "")
        return found

    def sample(self) -> list[Sample]:
        said = self.said()
        missing = len(RESTART.findall(said)) - len(BACK.findall(said))
        step, seconds, samples = self.step(), round(time.monotonic() - self.began, 1), []
        for pid, who in self.processes().items():
            with contextlib.suppress(OSError, KeyError):  # it may end meanwhile
                proc = Path(f"/proc/{pid}")
                status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
                maps = set(re.findall(r"/dev/shm/\S+", (proc / "maps").read_text()))
                handles = len(list((proc / "fd").iterdir()))
                resident, own = (round(int(status[name].split()[0]) / 1024, 2) for name in ("VmRSS", "RssAnon"))
                samples.append(Sample(who, seconds, step, resident, own, handles, int(status["Threads"]), len(maps), missing))
        return samples

    def end(self) -> None:
        for process in (self.first, *self.again):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def slope(steps: list[float], values: list[float]) -> float:
    """Of a line through the points by least squares."""
    return float(np.polyfit(steps, values, 1)[0]) if len(set(steps)) > 1 else 0.0


def _ends(values: Sequence[float]) -> dict[str, float]:
    """Medians of the first and of the last quarter."""
    quarter = len(values) // 4
    return {"first": statistics.median(values[:quarter]), "last": statistics.median(values[-quarter:])}


def judge(
    samples: list[Sample], depths: list[tuple[int, float]], since: dict[str, float], *, steps: int, mib: float, prefetch: int
) -> dict[str, Any]:
    """What grew, by process and figure; see the head of this file.

    Args:
        depths: (step, queue depth).
        since: when those that were started again began to serve.
        steps: of the run.
        mib: MiB in 10,000 steps that memory may grow by.
    """
    verdict: dict[str, Any] = {"processes": {}, "grew": []}
    for who in sorted({sample.who for sample in samples}):
        own = [sample for sample in samples if sample.who == who and 0 < sample.step < steps]
        own = [sample for sample in own if sample.seconds > since.get(who, 0)]
        own = own[len(own) // 5 :]
        if len(own) < 8:
            continue
        span = own[-1].step - own[0].step
        figures: dict[str, Any] = {"samples": len(own), "steps": span}
        memory = [sample.own_mib for sample in own]
        rise = 10_000 * slope([float(sample.step) for sample in own], memory)
        figures["own_mib"] = {**_ends(memory), "rise_in_10000_steps": round(rise, 3)}
        figures["rss_mib"] = _ends([sample.rss_mib for sample in own])
        if rise * min(span / 10_000, 1) > mib:
            verdict["grew"].append(f"{who}: own_mib by {rise:.1f} MiB in 10,000 steps")
        for missing in sorted({sample.missing for sample in own}):
            alike = [sample for sample in own if sample.missing == missing]
            if len(alike) < 8:
                continue
            for name, spare in (("handles", 2), ("threads", 2), ("shm", 0)):
                ends = _ends([getattr(sample, name) for sample in alike])
                figures.setdefault(name, {})[f"{missing} missing"] = ends
                if ends["last"] - ends["first"] > spare:
                    verdict["grew"].append(f"{who}: {name} {ends['first']:g} -> {ends['last']:g}")
        verdict["processes"][who] = figures
    if len(depths) >= 8:
        rise = slope([float(step) for step, _ in depths], [depth for _, depth in depths]) * (depths[-1][0] - depths[0][0])
        deepest = max(depth for _, depth in depths)
        verdict["queue_depth"] = {
            "rise": round(rise, 3),
            "max": deepest,
            "mean": round(statistics.mean(d for _, d in depths), 3),
        }
        if deepest > prefetch + 1 or abs(rise) >= 1:
            verdict["grew"].append(f"queue depth: by {rise:.2f}, at most {deepest:g}")
    return verdict


def draw(samples: list[Sample], depths: list[tuple[int, float]], events: list[dict[str, Any]], path: Path) -> None:
    """All figures by step, a line a process."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    for axis, name, label in zip(axes, FIGURES[:3], ("own memory, MiB", "file handles", "threads"), strict=False):
        for who in sorted({sample.who for sample in samples}):
            own = [sample for sample in samples if sample.who == who]
            axis.plot([sample.step for sample in own], [getattr(sample, name) for sample in own], label=who, linewidth=1)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[3].plot([step for step, _ in depths], [depth for _, depth in depths], color="black", linewidth=0.8)
    axes[3].set_ylabel("batches that lay ready")
    axes[3].set_xlabel("optimizer step")
    axes[3].set_ylim(bottom=0)
    for axis in axes:
        for event in events:
            axis.axvline(event["step"], color="grey", linewidth=0.6, linestyle="--" if event["kind"].startswith("SIG") else ":")
    axes[0].legend(ncols=3, fontsize="small")
    figure.savefig(path, dpi=110)


def settings(folder: Path, steps: int) -> list[str]:
    """Of a run with whatever placement, in a folder that :func:`prepare` has filled."""
    return [
        f"target.path={folder / 'target'}",
        "data=chat",
        f"data.path={folder / 'texts.jsonl'}",
        "data.policy_documents=0",
        "data.held_out_share=0.1",
        "data.prompt_tokens=16",
        "data.response_tokens=16",
        "data.row_tokens=128",
        "data.rows_per_batch=1",
        "drafter.layers=1",
        "drafter.features=1",
        "drafter.block_size=4",
        "drafter.anchors=4",
        "drafter.intermediate_size=32",
        "optimizer=adamw",
        f"trainer.max_steps={steps}",
        f"trainer.val_every={max(steps // 20, 2)}",
        f"trainer.log_every_n_steps={max(steps // 400, 1)}",
        "trainer.threads=1",
        "callbacks.acceptance=null",
        "callbacks.checkpoint=null",
        f"+callbacks.progress.lines={2 * 400}",
        "evaluation.prompts=1",
        "evaluation.temperatures=[]",
        "evaluation.tree_budgets=[16]",
        "logger=csv",
    ]


@dataclass(frozen=True)
class Kill:
    """What is done to a target rank once the run has come to a step, and all that are to be started again have been.

    Attributes:
        rank: local, as the process was first started.
        signal: SIGKILL, or SIGSTOP: it then is lost for having been silent.
    """

    step: int
    rank: int
    signal: signal.Signals


def soak(
    folder: Path,
    *overrides: str,
    steps: int,
    targets: int,
    drafters: int = 1,
    prefetch: int = 3,
    every: float = 5.0,
    mib: float = 4.0,
    kills: Sequence[Kill] = (),
    restarts: int = 0,
    planted: int = 0,
    timeout_s: float = 60.0,
    script: str = "train.py",
    **environment: str,
) -> dict[str, Any]:
    """Run, disturb, sample and judge.

    Args:
        folder: that :func:`prepare` has filled; the run's own is ``folder / "run"``.
        overrides: further settings of the run.
        kills: in order.
        restarts: so many of the target ranks that are lost first are started again.
        planted: so many are lost before the first of ``kills``, by ``script``.
    """
    run = Run(
        folder,
        "placement=split",
        f"placement.targets={targets}",
        f"placement.drafters={drafters}",
        f"placement.prefetch={prefetch}",
        "placement.tolerate=1",
        f"placement.timeout_s={timeout_s:g}",
        *settings(folder, steps),
        f"hydra.run.dir={folder / 'run'}",
        "+callbacks.held._target_=benchmarks.soak.Held",
        f"+callbacks.held.step={round(0.8 * steps)}",
        f"+callbacks.held.until={folder / 'go'}",
        *overrides,
        script=script,
        **environment,
    )
    samples: list[Sample] = []
    events: list[dict[str, Any]] = []
    waiting, started, back = list(kills), 0, 0
    try:
        while run.first.poll() is None:
            samples += run.sample()
            said, step, seconds = run.said(), run.step(), round(time.monotonic() - run.began, 1)
            lost, returned = RESTART.findall(said), BACK.findall(said)
            for rank in returned[back:]:
                events.append({"kind": "back", "rank": int(rank), "step": step, "seconds": seconds})
            back = len(returned)
            if started < min(len(lost), restarts):
                rank, line = lost[started]
                run.restart(line)
                events.append({"kind": "restarted", "rank": int(rank), "step": step, "seconds": seconds})
                started += 1
            all_lost = len(lost) == planted + len(kills) - len(waiting)
            if waiting and step >= waiting[0].step and all_lost and back == min(len(lost), restarts):
                kill = waiting.pop(0)
                (pid,) = (pid for pid, who in run.processes().items() if who == f"rank {kill.rank}")
                os.kill(pid, kill.signal)
                events.append({"kind": kill.signal.name, "rank": kill.rank, "step": step, "seconds": seconds})
            if not waiting and back == restarts:
                (folder / "go").touch()
            time.sleep(every)
        code = run.first.wait()
        deadline = time.monotonic() + 30
        while any(process.poll() is None for process in run.again) and time.monotonic() < deadline:
            time.sleep(0.1)
        ended = [process.poll() for process in run.again]
    finally:
        run.end()
    if code or waiting or back != restarts or any(ended) or None in ended:
        raise SystemExit(f"the run ended with {code}, restarted ones with {ended}, {back} came back:\n{run.said()[-3000:]}")
    depths = [
        (int(row["step"]), float(row["pipeline/queue_depth"]))
        for row in csv.DictReader((folder / "run" / "csv" / "metrics.csv").open())
        if row.get("pipeline/queue_depth")
    ]
    since = {f"rank {event['rank']} again": event["seconds"] for event in events if event["kind"] == "back"}
    return {
        "steps": steps,
        "seconds": round(time.monotonic() - run.began, 1),
        "placement": {"targets": targets, "drafters": drafters, "prefetch": prefetch},
        "mib_in_10000_steps": mib,
        "events": events,
        "verdict": judge(samples, depths, since, steps=steps, mib=mib, prefetch=prefetch),
        "queue_depth": depths,
        "samples": [asdict(sample) for sample in samples],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--targets", type=int, default=2)
    parser.add_argument("--drafters", type=int, default=1)
    parser.add_argument(
        "--restarts", type=int, default=2, help="target ranks that are killed and started again, one after the other"
    )
    parser.add_argument("--prefetch", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200, help="texts, a row each; a tenth of them is for validation")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--mib", type=float, default=4.0, help="MiB that a process may grow by in 10,000 steps")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="OUT.json and OUT.png")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    kills = [
        # One target rank after the other.
        Kill(round(args.steps * (0.3 + 0.3 * turn / max(args.restarts, 1))), args.drafters + turn, signal.SIGKILL)
        for turn in range(args.restarts)
    ]
    try:
        prepare(folder, rows=args.rows, tokens=100)
        result = soak(
            folder,
            steps=args.steps,
            targets=args.targets,
            drafters=args.drafters,
            prefetch=args.prefetch,
            every=args.every,
            mib=args.mib,
            kills=kills,
            restarts=args.restarts,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    args.out.with_suffix(".json").write_text(json.dumps(result) + "\n")
    draw(
        [Sample(**sample) for sample in result["samples"]],
        result["queue_depth"],
        result["events"],
        args.out.with_suffix(".png"),
    )
    print(json.dumps({key: result[key] for key in ("steps", "seconds", "events", "verdict")}, indent=1))
    return 1 if result["verdict"]["grew"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
