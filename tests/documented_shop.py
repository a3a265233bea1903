"""A folder in which the documented commands find what they name, and a process that runs one after the other in it.

``Qwen/Qwen3-8B`` is a tiny random model with the embedded tokenizer there, ``outputs/RUN`` a run of two steps.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_lit.target.frozen import EMBEDDED, TargetInfo
from tests.fork_server import ROOT, forked_python
from tests.responses.wayward_server import WaywardServer

__all__ = ["TINY", "Shop"]

TINY = """
    trainer.max_steps=2 trainer.val_every=2 trainer.threads=1 trainer.accelerator=cpu trainer.limit_val_batches=1
    data.train_prompts=12 data.val_prompts=4 data.prompt_tokens=16 data.response_tokens=40 data.row_tokens=128 data.rows_per_batch=1
    drafter.anchors=4 evaluation.prompts=1 evaluation.max_new_tokens=4 evaluation.temperatures=[0] evaluation.budgets=[]
    callbacks.acceptance.prompts=1 callbacks.acceptance.max_new_tokens=4
""".split()
"""Appended to a training command."""

_DRIVER = """
import json, os, runpy, sys, traceback
from hydra.core.global_hydra import GlobalHydra
from dflash_lit.cli import main

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    arguments, said = json.loads(line)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    program, *rest = arguments
    GlobalHydra.instance().clear()
    sys.argv, code = arguments, 0
    try:
        if program == "dflash-lit":
            code = main(rest)
        elif program == "-m":
            sys.argv = rest
            sys.modules.pop(rest[0], None)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(program)
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = "raised"
    sys.stdout.flush()
    sys.stderr.flush()
    print(json.dumps(code), file=answers, flush=True)
"""


class Shop:
    """Args: ``folder``: an empty one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        info = TargetInfo.load(EMBEDDED)
        self.model = folder / "model"
        config = Qwen3Config(
            vocab_size=info.text.vocab_size,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            pad_token_id=info.pad_id,
            eos_token_id=info.reserved_ids["eos"],
            bos_token_id=None,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            Qwen3ForCausalLM(config).save_pretrained(self.model)
        info.tokenizer.save_pretrained(self.model)
        turns = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        prompt = "{% if add_generation_prompt %}<assistant>{% endif %}"
        (self.model / "chat_template.jinja").write_text(turns + prompt)
        texts = [f"def function_{number}(value):\n    return value + {number}\n" for number in range(40)]
        self._write("prompts.jsonl", [{"prompt": text[:20]} for text in texts])
        self._write("responses.jsonl", [{"prompt": text[:20], "response": text[20:]} for text in texts])
        (self.folder / "chat.jsonl").write_text((self.folder / "responses.jsonl").read_text())
        self.server = WaywardServer().__enter__()
        variables = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "DFLASH_LIT_COMPILE_CACHE": str(folder / "compiled"),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            [forked_python(), "-c", _DRIVER],
            cwd=folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _write(self, name: str, records: list[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    def run(self, *arguments: str) -> tuple[Any, str]:
        """The exit code of a command (None and 0: good), and all that it said; ``dflash-lit``, ``-m MODULE`` or a file of the project."""
        said = self.folder / "said.txt"
        program = arguments[0] if arguments[0] in ("dflash-lit", "-m") else str(ROOT / arguments[0])
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([[program, *arguments[1:]], str(said)]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"{arguments} ended the process: {said.read_text()[-2000:]}"
        return json.loads(answer), said.read_text()

    def train(self, folder: str, *overrides: str) -> Path:
        """A tiny run in this folder, once."""
        place = self.folder / folder
        if not place.exists():
            code, said = self.run("train.py", *overrides, *TINY, f"hydra.run.dir={place}", f"hydra.sweep.dir={place}")
            assert code in (None, 0), said[-3000:]
        return place

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.server.__exit__(None, None, None)
