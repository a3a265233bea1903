from __future__ import annotations

import torch

from dflash_lit.placement.feature_loader import FeatureLoader
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import token_batch

LAYERS = (1, 3)


def test_batches_get_features(embedded: FrozenTarget) -> None:
    batch = token_batch([[(40, 0), (20, 0)]], 64)
    strategy = ColocatedStrategy(embedded, LAYERS)
    loader = strategy.process_dataloader([batch, batch])
    assert isinstance(loader, FeatureLoader)
    first, _ = loader
    assert set(first) == {*batch, "features"}
    assert first["features"].shape == (1, 64, 2 * 256)
    assert torch.equal(first["features"], strategy.with_features(batch)["features"])


def test_a_teacher_gives_its_last_hidden_state_too(embedded: FrozenTarget) -> None:
    batch = token_batch([[(40, 0), (20, 0)]], 64)
    (got,) = ColocatedStrategy(embedded, LAYERS, teacher=True).process_dataloader([batch])
    assert set(got) == {*batch, "features", "last_hidden"}
    assert torch.equal(got["features"], ColocatedStrategy(embedded, LAYERS).with_features(batch)["features"])
    # What the head makes of it are the logits of each document alone.
    with torch.no_grad():
        alone = embedded.model(batch["input_ids"][:, 40:60]).logits
    torch.testing.assert_close(got["last_hidden"][:, 40:60] @ embedded.ends().head.T, alone, rtol=1e-3, atol=1e-2)
