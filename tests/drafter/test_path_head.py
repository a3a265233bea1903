from __future__ import annotations

import torch

from dflash_lit.drafter.model import Drafter
from dflash_lit.drafter.path_head import PathHead
from tests.helpers import drafter_config, random


def taught() -> PathHead:
    head = PathHead(16, 8)
    with torch.no_grad():
        head.out_proj.weight.copy_(random(16, 8))
    return head


def test_it_starts_as_the_plain_drafter_and_can_leave_it() -> None:
    head, hidden = PathHead(16, 8), random(3, 5, 16)
    told = head(hidden, random(3, 5, 16, seed=1))
    assert torch.equal(told, hidden)
    (told * random(3, 5, 16, seed=2)).sum().backward()
    assert head.out_proj.weight.grad is not None
    assert (head.out_proj.weight.grad != 0).all()


def test_a_slot_knows_all_tokens_before_it_and_none_after() -> None:
    head, hidden, previous = taught(), random(2, 6, 16), random(2, 6, 16, seed=1)
    told = head(hidden, previous)
    for slot in range(6):
        other = previous.clone()
        other[:, slot] = random(2, 16, seed=2)
        changed = (head(hidden, other) != told).any(dim=-1)
        assert not changed[:, :slot].any()
        assert changed[:, slot:].all()


def test_the_size_of_embeddings_does_not_matter() -> None:
    """Targets differ in it by orders of magnitude."""
    head, hidden, previous = taught(), random(2, 6, 16), random(2, 6, 16, seed=1)
    torch.testing.assert_close(head(hidden, previous * 0.02), head(hidden, previous), rtol=1e-2, atol=1e-2)


def test_the_other_weights_of_a_seed_are_those_without_it() -> None:
    made = []
    for width in (0, 8):
        torch.manual_seed(3)
        made.append(Drafter(drafter_config(path_width=width)))
    plain, with_head = (drafter.state_dict() for drafter in made)
    assert all(torch.equal(with_head[name], value) for name, value in plain.items())
    assert {name for name in with_head if name not in plain} == {
        f"path_head.{name}_proj.weight" for name in ("token", "forget", "hidden", "out")
    }
