"""The main job, small, as a user runs it: real processes, and what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.fork_server import forked_python

ROOT = Path(__file__).parent.parent
QUICK = [
    "debug=fast",
    "trainer.threads=1",
    "data.responses_per_batch=32",
    "callbacks.acceptance.prompts=1",
    "callbacks.acceptance.max_new_tokens=8",
    "evaluation.temperatures=[0.0]",
    "evaluation.budgets=[]",
    "evaluation.max_new_tokens=12",
    "logger=csv",
]


def run(*arguments: str, folder: Path, python: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Of this repository; by default in a process that has imported everything, as have those that it starts."""
    # The last two are set by tests that compile in this process, and would be taken for the user's choice.
    told = ("WANDB_API_KEY", "WANDB_MODE", "HYDRA_FULL_ERROR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    keep = {k: v for k, v in os.environ.items() if k not in told}
    variables = {
        **keep,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "DFLASH_LIT_RUNS": str(folder / "runs"),
        "HOME": str(folder),  # no key in a ~/.netrc
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [python or forked_python(), *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=400, check=False)


def train(*overrides: str, folder: Path, **environment: str) -> Path:
    run_folder = folder / "runs" / f"run{len(list(folder.glob('runs/*')))}"
    done = run("train.py", *QUICK, f"hydra.run.dir={run_folder}", *overrides, folder=folder, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    (run_folder / "stdout.txt").write_text(done.stdout)
    (run_folder / "stderr.txt").write_text(done.stderr)
    return run_folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def whole(shelf: Path) -> Path:
    return train(
        "+callbacks.checkpoint.every_n_train_steps=1",
        "callbacks.checkpoint.save_top_k=-1",
        "callbacks.checkpoint.monitor=null",
        "evaluation.temperatures=[0.0,0.7]",
        "evaluation.budgets=[16,64]",
        "logger=default",
        folder=shelf,
    )


def summary_of(run_folder: Path) -> dict[str, Any]:
    return json.loads((run_folder / "summary.json").read_text())


def test_summary_report_and_table(whole: Path) -> None:
    summary = summary_of(whole)
    for key in (
        "tau_greedy tau_t0.7 tau_untrained lossless val/chain_eal val/tree_eal@16 val/tree_eal@64 val/tree_eal@256 "
        "tau_greedy@16 tau_greedy@64 tau_greedy@64_error tau_t0.7@64 val/tau@64 "
        "tokens_per_s_plain tokens_per_s_drafted wall_s peak_rss_gib export_dir"
    ).split():
        assert summary[key] is not None, key
    assert summary["lossless"] is True
    assert summary["tau_greedy"] >= 1.0
    assert summary["tau_greedy@64"] >= 1.0
    assert summary["steps"] == 4
    assert summary["val/chain_eal"] <= summary["val/tree_eal@64"] <= summary["val/tree_eal@256"]
    page = (whole / "report.html").read_text()
    assert page.count("<svg") >= 3
    table = (whole / "stdout.txt").read_text()
    assert "tau greedy" in table
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "not known yet: no run of these shapes has ended here; said after step 2" in (whole / "stderr.txt").read_text()


def test_export_is_the_served_format(whole: Path) -> None:
    with safe_open(whole / "drafter" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert all(file.get_tensor(name).dtype == torch.bfloat16 for name in names)
    assert len(names) == 2 * 11 + 3
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= names
    config = json.loads((whole / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 8


def test_metrics_go_to_csv_and_to_an_offline_wandb_run(whole: Path) -> None:
    header = (whole / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {
        "train/loss",
        "val/chain_eal",
        "val/tree_eal@64",
        "val/acceptance_slot_1",
        "acceptance/tau_greedy",
        "val/tau@64",
    } <= set(header)
    runs = list((whole / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 1
    read = subprocess.run(
        ["wandb", "leet", "inspect", "--json", str(runs[0])], capture_output=True, text=True, timeout=60, check=False
    )
    assert read.returncode == 0, read.stderr
    for name in ("val/chain_eal", "train/loss", "summary/tau_greedy"):
        assert name in read.stdout, name


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(whole: Path, shelf: Path) -> None:
    checkpoint = whole / "checkpoints" / "step=2.ckpt"
    resumed = train(f"ckpt_path='{checkpoint}'", "evaluation.temperatures=[0.0,0.7]", folder=shelf)
    weights = [torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for folder in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    first, second = summary_of(whole), summary_of(resumed)
    for key in ("train_loss", "val/loss", "val/tree_eal@64", "tau_greedy"):
        assert first[key] == second[key], key
    assert second["responses_from_cache"] is True


def test_a_checkpoint_of_other_settings_or_data_is_refused(whole: Path, shelf: Path) -> None:
    resume = f"ckpt_path='{whole / 'checkpoints' / 'step=2.ckpt'}'"
    done = run("train.py", *QUICK, resume, "drafter.block_size=6", "seed=3", "optimizer.lr=0.5", folder=shelf)
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ckpt_path: the checkpoint has drafter.block_size=8, this run 6; ")
    for words in ("optimizer.lr=0.01, this run 0.5", "seed=0, this run 3"):
        assert words in line
    assert "target" not in done.stderr.split("error:")[0], "it is said before the target is read"
    done = run("train.py", *QUICK, resume, "data.train_prompts=16", folder=shelf)
    assert done.returncode == 2
    assert "the checkpoint has data (digest of the training rows)=" in done.stderr.strip().splitlines()[-1]


def test_a_finished_run_is_not_resumed_in_silence(whole: Path, shelf: Path) -> None:
    done = run("train.py", *QUICK, f"ckpt_path='{whole}/checkpoints/last.ckpt'", folder=shelf)
    assert done.returncode == 2
    assert "is of step 4, and trainer.max_steps=4: nothing is left to train" in done.stderr.strip().splitlines()[-1]


def test_warm_start_from_an_export(whole: Path, shelf: Path) -> None:
    started = train(f"drafter.init_from={whole / 'drafter'}", "optimizer.lr=1e-9", folder=shelf)
    # Nothing was learnt on top, so the export comes back (twice through bf16).
    from safetensors.torch import load_file

    before, after = (load_file(folder / "drafter" / "model.safetensors") for folder in (whole, started))
    assert all(torch.allclose(value.float(), after[name].float(), atol=1e-5) for name, value in before.items())
    done = run("train.py", *QUICK, f"drafter.init_from={whole / 'drafter'}", "drafter.block_size=6", folder=shelf)
    assert done.returncode == 2
    assert "error: drafter.init_from: that drafter has block_size=8, this run 6" in done.stderr


def test_progress_in_a_terminal(shelf: Path) -> None:
    """One line over the run with tokens/s, kept up to date where there is a terminal; plain lines elsewhere (see the next test)."""
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    environment = {**os.environ, "XDG_CACHE_HOME": str(shelf / "cache"), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    environment.pop("CI", None)
    folder = shelf / "runs" / "terminal"
    command = [forked_python(), "train.py", *QUICK, "trainer.max_steps=10", f"hydra.run.dir={folder}"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # how Linux says that the other end was closed
                break
            if not part:
                break
            shown += part
    os.close(main)
    assert process.returncode == 0, shown[-3000:]
    # Drawn over itself: what stands between moves of the cursor is one state of the line.
    states = [part for part in re.split(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]", shown.decode()) if "/10" in part]
    assert any("10/10" in state and "Ktok/s" in state and "left" in state for state in states)
    assert max(map(len, states)) <= 80
    assert shown.count(b"10/10") >= 1
    assert b"\x1b[?25h" in shown  # the cursor is back


def test_everything_optional_can_be_left_out(shelf: Path) -> None:
    off = [
        "callbacks.checkpoint=null",
        "callbacks.last_checkpoint=null",
        "callbacks.export=null",
        "callbacks.acceptance=null",
        "trainer.enable_progress_bar=false",
    ]
    folder = train(
        *off,
        "logger=default",
        "logger.csv=null",
        "evaluation.temperatures=[1.0]",
        "trainer.accumulate_grad_batches=2",
        folder=shelf,
        WANDB_MODE="disabled",
    )
    assert not list(folder.rglob("*.ckpt"))
    assert not list(folder.rglob("*.wandb"))
    assert (folder / "drafter" / "model.safetensors").exists()
    summary = summary_of(folder)
    assert summary["tau_t1"] >= 1.0
    assert "tau T=1 " in (folder / "stdout.txt").read_text()


def test_ctrl_c_ends_with_a_word_and_130(shelf: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(shelf / "cache"), "OMP_NUM_THREADS": "1"}
    folder = shelf / "runs" / "interrupted"
    command = [
        forked_python(),
        "train.py",
        *QUICK,
        "trainer.max_steps=4000",
        f"hydra.run.dir={folder}",
        "+callbacks.progress.lines=4000",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 130, rest
    assert "interrupted; ckpt_path=" in rest
    assert "Traceback" not in rest


def test_own_prompts(shelf: Path) -> None:
    prompts = shelf / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def function_{i}(value):\n    return"}) + "\n" for i in range(30)))
    own = ["data=file", f"data.prompts={prompts}", "data.prompt_tokens=32", "data.row_tokens=256", "data.train_prompts=20"]
    folder = train(*own, "data.response_tokens=40", folder=shelf)
    assert not (folder / "wandb").exists()
    summary = summary_of(folder)
    assert summary["lossless"] is True
    assert summary["responses"] > 10


def test_a_sweep_trains_each_and_a_failed_job_does_not_look_like_success(shelf: Path) -> None:
    folder = shelf / "sweep"
    done = run("train.py", "-m", "seed=1,2", *QUICK, f"hydra.sweep.dir={folder}", folder=shelf)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (summary_of(folder / str(job)) for job in range(2))
    assert first["train_loss"] != second["train_loss"]
    assert re.search(r"time      first step after .* in all .* as the last run of these shapes here", done.stderr)
    done = run("train.py", "-m", "drafter.block_size=1", f"hydra.sweep.dir={shelf / 'bad'}", folder=shelf)
    assert done.returncode == 1
    assert "error: job 0: drafter.block_size=1" in done.stderr


def test_text_that_holds_the_mask_token_is_refused(shelf: Path) -> None:
    prompts = shelf / "masked.txt"
    prompts.write_text("".join(f"x = {i} <|mask|> y\n" for i in range(30)))
    done = run(
        "train.py",
        *QUICK,
        "data=file",
        f"data.prompts={prompts}",
        "data.response_tokens=20",
        "data.row_tokens=256",
        folder=shelf,
    )
    assert done.returncode == 2
    assert "error: drafter.mask_token_id=2 occurs in the data" in done.stderr


def test_wrong_input_is_one_line_and_leaves_no_run(shelf: Path) -> None:
    for override, says in (("trainer.maxsteps=3", "maxsteps"), ("drafter.block_size=1", "drafter.block_size=1")):
        folder = shelf / "never"
        done = run("train.py", override, f"hydra.run.dir={folder}", folder=shelf)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert says in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (folder / "csv").exists()


def test_cfg_job_shows_every_section(shelf: Path) -> None:
    done = run("train.py", "--cfg", "job", folder=shelf)
    assert done.returncode == 0
    for section in "target drafter objective optimizer data placement trainer evaluation callbacks logger".split():
        assert f"\n{section}:" in f"\n{done.stdout}"


def test_evaluate_and_export_commands(whole: Path, shelf: Path) -> None:
    out = shelf / "exported"
    done = run("-m", "dflash_lit.cli", "export", str(whole / "checkpoints" / "last.ckpt"), "--out", str(out), folder=shelf)
    assert done.returncode == 0, done.stderr
    assert (out / "model.safetensors").read_bytes() == (whole / "drafter" / "model.safetensors").read_bytes()
    done = run(
        "-m",
        "dflash_lit.cli",
        "evaluate",
        str(out),
        "--count",
        "2",
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
        "0.7",
        "--budgets",
        "0,8",
        "--json",
        folder=shelf,
    )
    assert done.returncode == 0, done.stderr
    greedy, tree, sampled, _ = json.loads(done.stdout)
    assert greedy["lossless"] is tree["lossless"] is True
    assert sampled["lossless"] is None
    assert greedy["tau"] >= 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("evaluate", "/no/such/drafter"), "error: /no/such/drafter/config.json"),
        (("export", "/no/such.ckpt"), "error: /no/such.ckpt: no such checkpoint"),
        (("evaluate", "x", "--count", "0"), "is not 1 or more"),
    ],
)
def test_commands_refuse_wrong_input(arguments: tuple[str, ...], says: str, shelf: Path) -> None:
    done = run("-m", "dflash_lit.cli", *arguments, folder=shelf)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
