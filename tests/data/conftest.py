"""The embedded target's tokenizer, loaded once, without the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import dflash_lit.target.embedded

FOLDER = Path(dflash_lit.target.embedded.__path__[0])


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)
