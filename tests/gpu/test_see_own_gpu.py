"""Processes that others have started narrow themselves to the GPU of their local rank; the driver tells whether they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.test_train import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

# The uuid is that of the GPU that holds a tensor, whatever its number.
SAY = """
def say():
    seen = device_seen(torch.device("cuda", LOCAL))
    uuid = str(torch.cuda.get_device_properties(torch.ones(1, device=seen).device).uuid)
    print(json.dumps({"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "host": gpus_of_host(), "seen": str(seen), "uuid": uuid}))
"""
HEAD = "import json, os, torch\nfrom dflash_lit.placement.own_gpu import device_seen, gpus_of_host, see_own\n"


def run(script: str, local: int, **variables: str | None) -> dict[str, Any]:
    environment = {**os.environ, **{name: value for name, value in variables.items() if value is not None}}
    for name in ("DFLASH_LIT_LOCAL_RANK", *(name for name, value in variables.items() if value is None)):
        environment.pop(name, None)
    code = HEAD + SAY.replace("LOCAL", str(local)) + script
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


@pytest.fixture
def all_visible() -> None:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("numbers of the GPUs are those of this process only if it sees all")


@pytest.mark.usefixtures("all_visible")
class TestSeeOwn:
    def test_the_gpu_of_the_local_rank_as_the_first(self) -> None:
        count = torch.cuda.device_count()
        assert run("see_own(1); say()", 1) == {"visible": "1", "host": count, "seen": "cuda:0", "uuid": uuid(1)}
        said = run("see_own(1); say()", 1, CUDA_VISIBLE_DEVICES="1,0")
        assert said == {"visible": "0", "host": 2, "seen": "cuda:0", "uuid": uuid(0)}

    @pytest.mark.parametrize("early", ["torch.ones(1, device='cuda')", "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"])
    @pytest.mark.parametrize("visible", [None, "1,0"])
    def test_too_late(self, early: str, visible: str | None) -> None:
        """Also where torch does not know that CUDA has been initialised, and would count one."""
        said = run(f"{early}; see_own(1); say()", 1, CUDA_VISIBLE_DEVICES=visible)
        count, own = (2, uuid(0)) if visible else (torch.cuda.device_count(), uuid(1))
        assert said == {"visible": visible, "host": count, "seen": "cuda:1", "uuid": own}

    def test_one_that_sees_one(self) -> None:
        """As SLURM does with ``--gpus-per-task``."""
        said = run(
            "see_own(1); print(json.dumps([os.environ['CUDA_VISIBLE_DEVICES'], gpus_of_host()]))", 1, CUDA_VISIBLE_DEVICES="1"
        )
        assert said == ["1", 1]

    def test_what_it_starts_was_told_nothing(self) -> None:
        child = "import torch; from dflash_lit.placement.own_gpu import gpus_of_host; print(gpus_of_host())"
        said = run(f"see_own(1); import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)", 1)
        assert said == 1

    @pytest.mark.parametrize(("launcher", "seen"), [("torchrun", "1"), ("hand", "1,0")])
    def test_at_the_start_of_a_run(self, launcher: str, seen: str) -> None:
        torchrun = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
        script = "from dflash_lit.ranks import launch\nraise SystemExit(launch(say, None, ''))"
        said = run(script, 0, CUDA_VISIBLE_DEVICES="1,0", **(torchrun if launcher == "torchrun" else {}))
        assert said == {"visible": seen, "host": 2, "seen": "cuda:0", "uuid": uuid(1)}
