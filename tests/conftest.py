"""The embedded target, loaded once a session."""

from __future__ import annotations

import os
import signal

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton: its kernels are then run by its interpreter, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo

# A shell starts what it puts into the background with Ctrl-C ignored, and children would inherit that; here some are told to stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The models are tiny: a second thread gains nothing, and tests run side by side on the same cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def embedded() -> FrozenTarget:
    return FrozenTarget.load(TargetInfo.load(EMBEDDED), dtype=torch.float32)
