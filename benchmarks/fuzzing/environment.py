"""Environment variables that are wrong, missing or those of another launcher. A start is a clear error, or what it is without them."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzzing.case import Case, Wrong
from fuzzing.process import SCRIPT, Ended, cleaned, forked, outcome
from fuzzing.tiny_run import TINY

__all__ = ["Fuzzed"]

_NUMBERS = ("banana", "", "-1", "0", "1", "2", "7", "1.5", "1e9", "99999999999999999999", " 1 ", "0x1", "None", "é")
_PLACES = (
    "",
    "<file>",
    "<file>/below",
    "<nowhere>/a/b",
    "/proc/fuzz",
    "relative",
    "<dangling>",
    "<loop>",
    "~",
    "~nobody/x",
    "/dev/null",
    "é",
    "a\nb",
    "x" * 300,
)
_WORDS = ("banana", "", "0", "1", "true", "{}", "é" * 5, "x" * 3000, " ", "a=b", "'", "\n")
_HOSTS = (
    "",
    "nowhere.invalid",
    "256.1.1.1",
    "localhost",
    "127.0.0.1",
    "::1",
    "0.0.0.0",
    " ",
    "a b",
    "é",
    "x" * 300,
    "http://a",
    "10.255.255.1",
)
_SECRETS = ("", "short", "x" * 15, "x" * 64, "é" * 20, "\n" * 20)

_VALUES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("MASTER_PORT",), (*_NUMBERS, "99999", "65536", "29500", "80")),
    **dict.fromkeys(("MASTER_ADDR",), _HOSTS),
    **dict.fromkeys(
        (
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RESTART_COUNT", "SLURM_NTASKS",
            "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES",
            "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
            "DFLASH_LIT_LOCAL_RANK", "DFLASH_LIT_HOST", "DFLASH_LIT_PARENT", "DFLASH_LIT_GPUS",
        ),
        _NUMBERS,
    ),
    **dict.fromkeys(
        (
            "HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "DFLASH_LIT_COMPILE_CACHE", "DFLASH_LIT_RUNS", "DFLASH_LIT_SECRET_FILE",
            "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "HF_HOME",
            "MPLCONFIGDIR", "NETRC",
        ),
        _PLACES,
    ),
    **dict.fromkeys(
        (
            "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST",
            "SLURM_JOB_NAME", "ENVIRONMENT", "SLURM_ARRAY_JOB_ID",
            "SLURM_ARRAY_TASK_ID", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME", "WANDB_TAGS",
            "WANDB_RUN_GROUP", "WANDB_BASE_URL", "WANDB_SILENT", "DFLASH_LIT_TRIAL", "TERM", "COLUMNS", "LINES", "CI", "NO_COLOR",
            "TZ", "LANG", "LC_ALL", "PATH", "USER", "CUDA_VISIBLE_DEVICES", "PYTHONWARNINGS", "PL_GLOBAL_SEED", "TOKENIZERS_PARALLELISM",
            "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "DFLASH_LIT_API_KEY",
            "OMP_NUM_THREADS", "MKL_NUM_THREADS", "http_proxy", "SOURCE_DATE_EPOCH",
        ),
        _WORDS,
    ),
    **dict.fromkeys(("TORCHINDUCTOR_COMPILE_THREADS", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_OFFLINE", "MPLBACKEND"), _NUMBERS),
    "WANDB_MODE": ("banana", "", "offline", "disabled", "dryrun", "é"),
    "DFLASH_LIT_SECRET": _SECRETS,
    "HYDRA_FULL_ERROR": tuple(word for word in _WORDS if word != "1"),  # which asks for tracebacks
}  # fmt: skip
_LAUNCHERS: tuple[dict[str, str], ...] = (
    {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
     "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "node1", "SLURM_RESTART_COUNT": "0", "ENVIRONMENT": "BATCH"},
    {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
     "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node1"},
    {"DFLASH_LIT_LOCAL_RANK": "1", "DFLASH_LIT_HOST": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DFLASH_LIT_SECRET": "x" * 64},
    {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
)  # fmt: skip
_COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    (),
    ("logger=default",),
    ("drafter.compile=true",),
    ("placement.drafters=2",),
    ("placement.hosts=2",),
    ("trainer.requeue=true",),
)
_FRESH = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONWARNINGS", "TMPDIR", "HOME", "LANG", "TZ", "MPLCONFIGDIR", "MPLBACKEND", "XDG_CACHE_HOME",
    "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_OFFLINE", "HF_HOME", "TRITON_CACHE_DIR",
)  # fmt: skip
"""Read while importing: worth an interpreter of its own."""


class Fuzzed:
    """Starts runs under strange variables."""

    name = "environment"

    def __init__(self, scratch: Path) -> None:
        self.python = forked()
        self.scratch = scratch
        self.cache = scratch / "cache"
        self.weights = b""

    def _reference(self) -> None:
        """Of a run that nothing is wrong with."""
        reference = self.scratch / "reference"
        reference.mkdir()
        self._whole(reference, {**cleaned(), "HOME": str(self.scratch), "XDG_CACHE_HOME": str(self.cache)})
        self.weights = (reference / "run" / "drafter" / "model.safetensors").read_bytes()

    def case(self, rng: random.Random, folder: Path) -> Case:
        home = folder / "home"
        (home / ".config").mkdir(parents=True)
        work = folder / "work"
        work.mkdir()
        (folder / "file").write_text("mine")
        (folder / "dangling").symlink_to(folder / "nothing")
        (folder / "loop").symlink_to(folder / "loop")
        (folder / "open").write_text("s" * 64)
        kind = rng.choices(("probe", "whole", "fresh"), (92, 5, 3))[0]
        told: dict[str, str] = {}
        if kind == "probe" and rng.random() < 0.3:
            # Those who wait for others that never come take their time.
            told |= rng.choices(_LAUNCHERS, (6, 6, 1, 1, 1))[0]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            name = rng.choice([*_VALUES, *told] if kind != "fresh" else _FRESH)
            if name in told and rng.random() < 0.4:
                del told[name]
            else:
                value = rng.choice(_VALUES.get(name, _WORDS))
                for mark in ("file", "dangling", "loop", "nowhere"):
                    value = value.replace(f"<{mark}>", str(folder / mark))
                told[name] = value
        if "DFLASH_LIT_SECRET_FILE" in told and rng.random() < 0.3:
            told["DFLASH_LIT_SECRET_FILE"] = str(folder / "open")  # which others can read
        words = rng.choice(_COMMANDS) if kind == "probe" else ()
        variables = {
            **cleaned(),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(self.cache if kind != "probe" else home / "cache"),
            **told,
        }
        variables = {name: value for name, value in variables.items() if "\0" not in value}
        about = " ".join([*(f"{name}={value[:40]!r}" for name, value in sorted(told.items())), *words, kind])
        names = [*told, *(value for value in told.values() if len(value) > 3), *(word.split("=")[0] for word in words), *_ALSO]
        if kind != "probe" and not self.weights:
            self._reference()
        if kind == "probe":
            seen = folder / "seen"
            act: Callable[[], Any] = lambda: self._probed(work, variables, words, seen)  # noqa: E731
            check: Callable[[Any], None] = lambda found: _as_asked(found, told, words)  # noqa: E731
        else:
            act, check = lambda: self._whole(folder, variables, fresh=kind == "fresh"), self._same
        written = ["home", "work", "run", "seen", "log", "nowhere", *(path.name for path in folder.glob("seen*"))]
        return Case(about, act, names, check, may_write=written, limit_s=120)

    def _probed(
        self, work: Path, variables: dict[str, str], words: tuple[str, ...], seen: Path
    ) -> tuple[Ended, dict[str, Any] | None]:
        variables = {**variables, "FUZZ_SEEN": str(seen)}
        try:
            ended = outcome([self.python, str(SCRIPT), *TINY, "placement.timeout_s=5", *words], work, variables, limit_s=60)
        finally:
            for path in seen.parent.glob("seen.*.pid"):
                path.unlink()
        return ended, json.loads(seen.read_text()) if seen.exists() else None

    def _whole(self, folder: Path, variables: dict[str, str], *, fresh: bool = False) -> Path:
        work = folder / "work"
        work.mkdir(exist_ok=True)
        overrides = [word for word in TINY if word != "callbacks.export=null"]
        command = [sys.executable if fresh else self.python, str(SCRIPT), *overrides, f"hydra.run.dir={folder}/run"]
        ended = outcome(command, work, {**variables, "FUZZ_WHOLE": "1"}, limit_s=90)
        if ended.code:
            raise Wrong(f"exit {ended.code}: {ended.said[-600:]}")
        return folder / "run"

    def _same(self, run: Path) -> None:
        if (run / "drafter" / "model.safetensors").read_bytes() != self.weights:
            raise Wrong("another drafter than without these variables")
        if not (run / "summary.json").is_file() or not (run / "checkpoints" / "last.ckpt").is_file():
            raise Wrong("no summary, or no checkpoint")


_ALSO = ("SLURM", "rank 0", "rank 1 (drafter, host 0) has not been heard of", "placement.", "MASTER_ADDR", "secret")
"""What a launcher's variables are about; it may have promised a process that nobody starts."""


def _as_asked(found: tuple[Ended, dict[str, Any] | None], told: dict[str, str], words: tuple[str, ...]) -> None:
    ended, facts = found
    if ended.code:
        raise Wrong(f"exit {ended.code}: {ended.said[-600:]}")
    if facts is None:
        raise Wrong(f"ended with 0 without a run: {ended.said[-300:]}")
    asked = 2 if "placement.drafters=2" in words or "placement.hosts=2" in words else 1
    if facts["world"] != asked:
        raise Wrong(f"{facts['world']} processes, {asked} were asked for")
    if not facts["offline"]:
        mode = told.get("WANDB_MODE")
        if mode is None or (mode not in ("", "online") or not told.get("WANDB_API_KEY")):
            raise Wrong(f"online, with WANDB_MODE={mode!r}")
    if os.sep not in facts["folder"]:
        raise Wrong(f"the run's folder is {facts['folder']!r}")
