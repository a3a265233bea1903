"""The embedded target, loaded once a session."""

from __future__ import annotations

import pytest
import torch

from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo

# The models are tiny: a second thread gains nothing, and tests run side by side on the same cores.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def embedded() -> FrozenTarget:
    return FrozenTarget.load(TargetInfo.load(EMBEDDED), dtype=torch.float32)
