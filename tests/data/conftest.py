"""The embedded target, loaded once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash_lit.target.embedded

FOLDER = Path(dflash_lit.target.embedded.__path__[0])


@dataclass
class Target:
    model: Any
    tokenizer: Any
    fingerprint: str
    device: torch.device


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="session")
def target(tokenizer: Any) -> Target:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return Target(model, tokenizer, "embedded", torch.device("cpu"))
