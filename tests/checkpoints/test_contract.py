"""What a run must have in common with the one it goes on from, all of it said at once."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest

from dflash_lit.checkpoints.contract import BATCHES, CONTENT, CONTRACT, compare, contract_of, settings
from dflash_lit.errors import UserError
from tests.test_conf import configured, planned

INSIDE = {"loops": {"fit_loop": {"state_dict": {"combined_loader": [{"batches": 2, "order": {"batches": 3}}]}}}}


def saved(**more: Any) -> dict[str, Any]:
    return {**deepcopy(_saved()), **more}


@cache
def _saved() -> dict[str, Any]:
    cfg = configured("trainer.accelerator=cpu")
    hyper_parameters = planned().module_settings(cfg, "f1")
    plan = {CONTENT: "d1", "data.row_tokens": 256, **dict(zip(BATCHES, (4, 2, 1), strict=True))}
    return {"hyper_parameters": hyper_parameters, CONTRACT: {**settings(hyper_parameters), **plan}}


def test_it_names_the_target_its_tokenizer_the_drafter_and_the_data() -> None:
    contract = contract_of(saved())
    assert contract["drafter.target_fingerprint"] == "f1"
    assert (contract["drafter.mask_token_id"], contract["drafter.block_size"]) == (2, 8)
    assert contract["drafter.target_layer_ids"] == list(planned().drafter.target_layer_ids)
    assert len(contract["target (digest of its tokenizer)"]) == 24
    assert (contract[CONTENT], contract["data.rows_per_batch"], contract["seed"]) == ("d1", 4, 0)


def test_all_that_differs_is_said_at_once_with_both_values() -> None:
    compare(saved(), contract_of(saved()))
    theirs = saved()
    ours = {
        **contract_of(theirs),
        "drafter.block_size": 6,
        "drafter.mask_token_id": 5,
        "optimizer.lr": 1.0,
        CONTENT: "d2",
        "new": 1,
    }
    with pytest.raises(UserError) as caught:
        compare(theirs, ours)
    said = str(caught.value)
    assert said.startswith("ckpt_path: the checkpoint has drafter.block_size=8, this run 6; ")
    for words in ("drafter.mask_token_id=2, this run 5", f"{CONTENT}=d1, this run d2", "this run 1.0", "drafter.init_from"):
        assert words in said
    assert "\n" not in said
    assert "new=" not in said


def test_what_is_not_known_yet_or_was_not_stored_is_not_compared() -> None:
    compare(saved(), {"drafter.target_fingerprint": "", CONTENT: "d1"})
    earlier = saved()
    del earlier[CONTRACT], earlier["hyper_parameters"]["tokenizer"]
    compare(earlier, {**contract_of(saved()), CONTENT: "other"})


def test_batches_may_be_cut_otherwise_between_epochs_only() -> None:
    other = {"data.rows_per_batch": 2, "drafter ranks": 4, "trainer.accumulate_grad_batches": 2}
    compare(saved(), other)
    with pytest.raises(UserError) as caught:
        compare(saved(**INSIDE), other)
    for words in (
        "data.rows_per_batch=4, this run 2",
        "drafter ranks=2, this run 4",
        "trainer.accumulate_grad_batches=1, this run 2",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize("changes", [{"hyper_parameters": None}, {"hyper_parameters": {"drafter": 1}}, {CONTRACT: [1]}])
def test_what_holds_no_contract(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not a checkpoint of this project"):
        contract_of({**saved(), **changes})


def test_the_digest_of_a_tokenizer_does_not_depend_on_its_last_call() -> None:
    info, other = planned().info, planned().info
    info.tokenizer(["a", "a b c d"], padding=True, truncation=True, max_length=3)
    assert info.tokenizer_digest == other.tokenizer_digest
    third = planned().info
    third.tokenizer.add_tokens(["<new>"])
    assert third.tokenizer_digest != info.tokenizer_digest
