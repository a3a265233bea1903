"""Options that several commands have."""

from __future__ import annotations

import pytest
import torch

from dflash_lit.errors import UserError
from dflash_lit.options import device_of


def test_a_device_that_is_asked_for_is_there_or_the_option_is_named() -> None:
    there = torch.cuda.is_available()
    assert device_of("cpu") == torch.device("cpu")
    assert device_of("auto") == torch.device("cuda" if there else "cpu")
    if there:
        assert device_of("cuda") == torch.device("cuda")
    else:
        with pytest.raises(UserError, match="--device cuda: torch sees no GPU here"):
            device_of("cuda")
