"""The embedded target, loaded once a session."""

from __future__ import annotations

import pytest
import torch

from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo


@pytest.fixture(scope="session")
def embedded() -> FrozenTarget:
    return FrozenTarget.load(TargetInfo.load(EMBEDDED), dtype=torch.float32)
