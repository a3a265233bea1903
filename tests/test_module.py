from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from dflash_lit.data.datamodule import RowDataModule
from dflash_lit.data.packing import PackedRows
from dflash_lit.drafter.compiled import CompiledDrafter
from dflash_lit.errors import UserError
from dflash_lit.export import drafter_from_checkpoint
from dflash_lit.module import DrafterModule
from dflash_lit.placement.strategy import ColocatedStrategy
from dflash_lit.target.frozen import FrozenTarget
from tests.helpers import embedded_config, packed_rows, random, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics"),
]

# Rows with very different numbers of labels, one with none at all.
UNEVEN: list[list[tuple[int, int]]] = [
    [(128, 0)],
    [(60, 58), (20, 18)],
    [(50, 10), (70, 60)],
    [(30, 30)],
    [(128, 100)],
    [(9, 2), (9, 2), (100, 50)],
    [(64, 0), (64, 60)],
    [(128, 120)],
]


class Watch(L.Callback):
    """The gradients of every optimizer step, and the loss it logged."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps += 1
            self.gradients.append(torch.cat([p.grad.flatten().clone() for p in module.drafter.parameters()]))
            self.losses.append(float(trainer.callback_metrics["train/loss"]))


def build(
    target: FrozenTarget, *, drafter: dict[str, Any] | None = None, weights: str = "dpace", labels: str = "hard", **changes: Any
) -> DrafterModule:
    torch.manual_seed(0)
    config = embedded_config(**{"target_fingerprint": target.fingerprint, **(drafter or {})})
    settings: dict[str, Any] = {"anchors": 8, "seed": 3, "lr": 1e-2, "tree_budgets": [4, 16]}
    return DrafterModule(config.to_dict(), target.ends(), {"weights": weights, "labels": labels}, **{**settings, **changes})


def rows_of(pieces: Sequence[Sequence[tuple[int, int]]], rows_per_batch: int, val: PackedRows | None = None) -> RowDataModule:
    train = packed_rows(pieces)
    return RowDataModule(train, val if val is not None else packed_rows(UNEVEN[:3], seed=1), rows_per_batch, seed=1)


def trainer(target: FrozenTarget, folder: Path, **settings: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "max_epochs": -1,
        "default_root_dir": folder,
        "log_every_n_steps": 1,
    }
    return L.Trainer(**{**quiet, "strategy": ColocatedStrategy(target, embedded_config().target_layer_ids), **settings})


def weights_of(module: DrafterModule) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.drafter.parameters()])


# -- one denominator


@pytest.mark.parametrize(("weights", "path_width"), [("decay", 0), ("dpace", 0), ("tree_survival", 0), ("dpace", 8)])
def test_the_gradient_is_the_same_for_any_accumulation(
    embedded: FrozenTarget, tmp_path: Path, weights: str, path_width: int
) -> None:
    results = []
    for rows_per_batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        watch, module = Watch(), build(embedded, weights=weights, lr=1e-4, drafter={"path_width": path_width})
        fitter = trainer(embedded, tmp_path, max_steps=2, accumulate_grad_batches=accumulate, callbacks=[watch])
        fitter.fit(module, rows_of(UNEVEN, rows_per_batch))
        assert len(watch.gradients) == 2
        results.append((watch, weights_of(module)))
        if weights == "tree_survival":  # of all rows of the first step, to be used by the second
            assert float(module.floor_ratio) not in (0.0, 1.0)
    (one, end), *others = results
    assert one.losses[0] != one.losses[1]
    for watch, weight in others:
        for mine, whole in zip(watch.gradients, one.gradients, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max()))
        assert watch.losses == pytest.approx(one.losses, rel=1e-5)
        torch.testing.assert_close(weight, end, rtol=1e-4, atol=2e-5)


def test_feature_noise_is_the_rows_own_and_ends_with_training(embedded: FrozenTarget, tmp_path: Path) -> None:
    """Equal for any accumulation, another each epoch, and none of it in validation."""
    losses, validated = {}, {}
    for name, rows_per_batch, accumulate, noise in (("one", 4, 1, 3.0), ("split", 1, 4, 3.0), ("none", 4, 1, 0.0)):
        watch, module = Watch(), build(embedded, lr=0.0, feature_noise=noise)
        settings = {"accumulate_grad_batches": accumulate, "val_check_interval": 2 * accumulate, "limit_val_batches": None}
        fitter = trainer(embedded, tmp_path, max_steps=4, callbacks=[watch], check_val_every_n_epoch=None, **settings)
        fitter.fit(module, rows_of(UNEVEN, rows_per_batch))
        losses[name], validated[name] = watch.losses, float(fitter.callback_metrics["val/loss"])
    assert losses["split"] == pytest.approx(losses["one"], rel=1e-5)
    assert len(set(losses["one"])) == 4  # two epochs of two steps
    assert all(abs(mine - none) > 1e-4 for mine, none in zip(losses["one"], losses["none"], strict=True))
    assert validated["one"] == pytest.approx(validated["none"], rel=1e-6)


@pytest.mark.parametrize(("weights", "labels"), [("decay", "hard"), ("dpace", "hard"), ("dpace", "soft")])
def test_the_gradient_is_that_of_the_mean(embedded: FrozenTarget, tmp_path: Path, weights: str, labels: str) -> None:
    """The trainer's gradient against plain autograd on sum / sum over all rows of the step."""
    watch, module, rows = Watch(), build(embedded, weights=weights, labels=labels), packed_rows(UNEVEN)
    data = rows_of(UNEVEN, 2)
    strategy = ColocatedStrategy(embedded, module.config.target_layer_ids, teacher=labels == "soft")
    settings = {"max_steps": 1, "accumulate_grad_batches": 4, "strategy": strategy}
    trainer(embedded, tmp_path, callbacks=[watch], **settings).fit(module, data)
    again = build(embedded, weights=weights, labels=labels)
    batch = {
        **{name: torch.from_numpy(getattr(rows, name)) for name in ("document_ids", "position_ids", "supervised")},
        "input_ids": torch.from_numpy(rows.input_ids).long(),
        "row_ids": torch.arange(len(rows)),
    }
    batch = strategy.with_features(batch)
    blocks = again.blocks(batch, epoch=0)
    result = again.loss(batch, blocks, again(batch, blocks))
    (result.numerator / result.denominator).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in again.drafter.parameters()])
    torch.testing.assert_close(watch.gradients[0], expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert watch.losses[0] == pytest.approx(float((result.numerator / result.denominator).detach()), rel=1e-5)


def test_it_learns(embedded: FrozenTarget, tmp_path: Path) -> None:
    watch = Watch()
    fitter = trainer(embedded, tmp_path, max_steps=12, callbacks=[watch], gradient_clip_val=1.0)
    fitter.fit(build(embedded, lr=3e-3), rows_of(UNEVEN[:2], 2))
    assert watch.losses[-1] < watch.losses[0] - 0.3


# -- rows without labels


def test_rows_without_any_anchor_train_on(embedded: FrozenTarget, tmp_path: Path) -> None:
    watch, module = Watch(), build(embedded, drafter={"causal": True})
    start = weights_of(module)
    empty = [[(40, 40)], []]
    fitter = trainer(embedded, tmp_path, max_steps=2, callbacks=[watch], gradient_clip_val=1.0, limit_val_batches=1)
    fitter.fit(module, rows_of(empty, 2, val=packed_rows(empty)))
    assert watch.losses == [0, 0]
    assert all((gradient == 0).all() for gradient in watch.gradients)
    assert torch.equal(weights_of(module), start)


def test_padding_rows_change_nothing(embedded: FrozenTarget, tmp_path: Path) -> None:
    results = []
    for pieces in (UNEVEN[:2], [*UNEVEN[:2], [], [(40, 40)]]):
        watch = Watch()
        data = RowDataModule(packed_rows(pieces), packed_rows(UNEVEN[:1]), len(pieces), seed=1)
        trainer(embedded, tmp_path, max_steps=1, callbacks=[watch]).fit(build(embedded), data)
        results.append(watch)
    few, many = results
    assert few.losses == pytest.approx(many.losses, rel=1e-5)
    torch.testing.assert_close(many.gradients[0], few.gradients[0], rtol=1e-3, atol=1e-5 * float(few.gradients[0].abs().max()))


# -- validation


def test_validation_metrics(embedded: FrozenTarget, tmp_path: Path) -> None:
    found = []
    for rows_per_batch in (1, 3):
        fitter = trainer(embedded, tmp_path, limit_val_batches=None)
        fitter.validate(build(embedded), rows_of(UNEVEN, rows_per_batch, packed_rows(UNEVEN)), verbose=False)
        found.append({name: float(value) for name, value in fitter.callback_metrics.items()})
    slots = [f"val/{name}_slot_{slot}" for name in ("accuracy", "acceptance") for slot in (1, 2, 3)]
    assert set(found[0]) == {"val/loss", "val/chain_eal", "val/tree_eal@4", "val/tree_eal@16", *slots}
    assert found[0] == pytest.approx(found[1], rel=1e-5)  # the last batch of three is filled up with an empty row
    metrics = found[0]
    assert math.isfinite(metrics["val/loss"])
    assert 1 <= metrics["val/chain_eal"] <= 4
    assert metrics["val/chain_eal"] == pytest.approx(1 + sum(metrics[name] for name in slots[3:]))
    assert metrics["val/tree_eal@4"] <= metrics["val/tree_eal@16"]
    assert metrics["val/acceptance_slot_1"] == metrics["val/accuracy_slot_1"]


# -- with a path head


def with_features(
    target: FrozenTarget, module: DrafterModule, pieces: Sequence[Sequence[tuple[int, int]]]
) -> dict[str, Tensor]:
    batch = token_batch(pieces)
    return ColocatedStrategy(target, module.config.target_layer_ids).with_features(batch)


def test_slots_are_told_the_tokens_of_the_text(embedded: FrozenTarget) -> None:
    module = build(embedded, drafter={"path_width": 8})
    batch = with_features(embedded, module, UNEVEN[:3])
    blocks = module.blocks(batch, 0)
    told: list[Tensor] = []
    assert module.drafter.path_head is not None
    handle = module.drafter.path_head.register_forward_pre_hook(lambda _, inputs: told.append(inputs[1]))
    module.tell(module(batch, blocks), blocks)
    handle.remove()
    told_rows = told[0].unflatten(0, blocks.anchors.shape)
    for row in range(3):
        for block, anchor in enumerate(blocks.anchors[row].tolist()):
            for slot in range(module.config.block_size - 1):
                if blocks.label_ok[row, block, slot]:
                    token = batch["input_ids"][row, anchor + slot]  # of slot + 1, the one before
                    assert torch.equal(told_rows[row, block, slot], embedded.ends().embed[token])


def test_the_drafter_is_the_very_one_it_would_be_without(embedded: FrozenTarget, tmp_path: Path) -> None:
    """Clipped hard, with other weights, and accumulated: nothing of the head reaches the rest."""
    found = []
    for width in (0, 8):
        module, watch = build(embedded, drafter={"path_width": width}), Watch()
        fitter = trainer(embedded, tmp_path, max_steps=4, callbacks=[watch], gradient_clip_val=0.05, accumulate_grad_batches=2)
        fitter.fit(module, rows_of(UNEVEN, 2))
        found.append((module.drafter.state_dict(), watch.losses))
    (plain, losses), (with_head, same) = found
    assert losses == same
    assert all(torch.equal(with_head[name], value) for name, value in plain.items())
    assert (with_head["path_head.out_proj.weight"] != 0).any()


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_the_gradient_of_a_path_head_is_that_of_its_own_mean(embedded: FrozenTarget, tmp_path: Path, labels: str) -> None:
    def make() -> DrafterModule:
        module = build(embedded, drafter={"path_width": 8}, labels=labels)
        with torch.no_grad():
            module.drafter.path_head.out_proj.weight.copy_(random(256, 8) * 0.1)  # type: ignore[union-attr]
        return module

    module, watch = make(), Watch()
    strategy = ColocatedStrategy(embedded, module.config.target_layer_ids, teacher=labels == "soft")
    settings = {"max_steps": 1, "accumulate_grad_batches": 4, "strategy": strategy}
    fitter = trainer(embedded, tmp_path, callbacks=[watch], **settings)
    fitter.fit(module, rows_of(UNEVEN, 2))
    again = make()
    batch = strategy.with_features(token_batch(UNEVEN))
    blocks = again.blocks(batch, epoch=0)
    result = again.loss(batch, blocks, again.tell(again(batch, blocks), blocks))
    mean = result.numerator / result.denominator
    mean.backward()
    assert again.drafter.fc.weight.grad is None
    expected = torch.cat([p.grad.flatten() for p in again.drafter.path_head.parameters()])  # type: ignore[union-attr]
    got = watch.gradients[0][-len(expected) :]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    assert float(fitter.callback_metrics["train/path_loss"]) == pytest.approx(float(mean.detach()), rel=1e-5)


def test_it_is_validated_as_it_decodes(embedded: FrozenTarget, tmp_path: Path) -> None:
    """As many candidates as tokens: the chain is then the leading hits of the slots that were told the text."""
    found = []
    for compiled in (False, True):
        module = build(embedded, drafter={"path_width": 8, "path_candidates": 512}, compile_on_cpu=compiled)
        module._compiled = CompiledDrafter(module.drafter, backend="eager")
        with torch.no_grad():
            module.drafter.path_head.out_proj.weight.copy_(random(256, 8))  # type: ignore[union-attr]
        fitter = trainer(embedded, tmp_path, limit_val_batches=None, inference_mode=False)
        fitter.validate(module, rows_of(UNEVEN, 3, packed_rows(UNEVEN)), verbose=False)
        found.append({name: float(value) for name, value in fitter.callback_metrics.items()})
    metrics = found[0]
    assert found[1] == pytest.approx(metrics, rel=1e-4)
    assert metrics["val/path_loss"] != metrics["val/loss"]
    assert metrics["val/chain_eal"] == pytest.approx(1 + sum(metrics[f"val/acceptance_slot_{slot}"] for slot in (1, 2, 3)))
    assert metrics["val/chain_eal"] <= metrics["val/tree_eal@4"] <= metrics["val/tree_eal@16"]


def test_a_path_head_learns_and_resumes(embedded: FrozenTarget, tmp_path: Path) -> None:
    module, watch, _ = run(embedded, tmp_path / "whole", max_steps=6, drafter={"path_width": 8})
    assert (module.drafter.path_head.out_proj.weight != 0).any()  # type: ignore[union-attr]
    again = {"drafter": {"path_width": 8}, "ckpt_path": str(tmp_path / "whole" / "step=3.ckpt")}
    resumed, rest, _ = run(embedded, tmp_path / "rest", max_steps=6, **again)
    assert rest.losses == watch.losses[3:]
    assert torch.equal(weights_of(resumed), weights_of(module))


def test_a_checkpoint_from_before_sliding_layers_resumes(embedded: FrozenTarget) -> None:
    saved = dict(build(embedded).hparams.items())
    later = ("layer_types", "sliding_window", "causal", "path_width", "path_candidates")
    saved["drafter"] = {name: value for name, value in saved["drafter"].items() if name not in later}
    build(embedded).on_load_checkpoint({"hyper_parameters": saved})
    slides = {"layer_types": ("sliding_attention",), "sliding_window": 16}
    with pytest.raises(UserError, match=r"drafter\.layer_types=\[\], this run \['sliding_attention'\]"):
        build(embedded, drafter=slides).on_load_checkpoint({"hyper_parameters": saved})


def test_a_checkpoint_from_before_path_heads_resumes(embedded: FrozenTarget) -> None:
    saved = dict(build(embedded).hparams.items())
    saved["drafter"] = {name: value for name, value in saved["drafter"].items() if not name.startswith("path_")}
    build(embedded).on_load_checkpoint({"hyper_parameters": saved})
    with pytest.raises(UserError, match=r"drafter\.path_width=0, this run 8"):
        build(embedded, drafter={"path_width": 8}).on_load_checkpoint({"hyper_parameters": saved})


# -- checkpoints and resuming


def run(target: FrozenTarget, folder: Path, **settings: Any) -> tuple[DrafterModule, Watch, dict[str, Any]]:
    """Up to six steps of two batches each; an epoch has eight batches, so steps 3 and 6 end within one."""
    watch, module = Watch(), build(target, drafter=settings.pop("drafter", None))
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    fit = {"ckpt_path": settings.pop("ckpt_path", None)}
    fitter = trainer(target, folder, enable_checkpointing=True, callbacks=[watch, keep], accumulate_grad_batches=2, **settings)
    fitter.fit(module, rows_of(UNEVEN * 2, 2), **fit, weights_only=True)
    return module, watch, fitter.optimizers[0].state_dict()


@pytest.fixture(scope="module")
def whole(embedded: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of six steps without a break, and its folder with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(embedded, folder, max_steps=6)


def test_resuming_is_exact(embedded: FrozenTarget, tmp_path: Path, whole: tuple[Path, Any]) -> None:
    folder, (module, watch, optimizer) = whole
    resumed, rest, state = run(embedded, tmp_path, max_steps=6, ckpt_path=str(folder / "step=3.ckpt"))
    assert len(watch.losses) == 6
    assert rest.losses == watch.losses[3:]
    assert torch.equal(weights_of(resumed), weights_of(module))
    for mine, theirs in zip(state["state"].values(), optimizer["state"].values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_resuming_goes_on_with_the_mixture_of_weights(embedded: FrozenTarget, tmp_path: Path) -> None:
    losses = []
    for folder, resumed in ((tmp_path / "a", None), (tmp_path / "b", str(tmp_path / "a" / "step=2.ckpt"))):
        watch = Watch()
        keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        fitter = trainer(embedded, folder, enable_checkpointing=True, callbacks=[watch, keep], max_steps=4)
        fitter.fit(
            build(embedded, weights="tree_survival", labels="hard"), rows_of(UNEVEN, 2), ckpt_path=resumed, weights_only=True
        )
        losses.append(watch.losses)
    assert losses[1] == losses[0][2:]


def test_a_checkpoint_holds_the_drafter_alone(whole: tuple[Path, Any]) -> None:
    folder, (module, *_) = whole
    saved = torch.load(folder / "step=6.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == {f"drafter.{name}" for name in module.drafter.state_dict()}
    assert all(value.dtype == torch.float32 for value in saved["state_dict"].values())
    assert saved["hyper_parameters"]["drafter"] == module.config.to_dict()
    # Weights and two moments, and some bytes of names: no room for the target's 20 MB.
    expected = 3 * sum(parameter.numel() * 4 for parameter in module.drafter.parameters())
    assert (folder / "step=6.ckpt").stat().st_size < expected + 200_000
    loaded = drafter_from_checkpoint(folder / "step=6.ckpt")
    assert loaded.config == module.config
    assert all(torch.equal(value, module.drafter.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": 5}, ["drafter.mask_token_id=2", "5"]),
        ({"block_size": 5}, ["drafter.block_size=4", "5"]),
        ({"target_layer_ids": (1, 2, 4)}, ["drafter.target_layer_ids=[1, 2, 3]", "[1, 2, 4]"]),
        ({"target_fingerprint": "another"}, ["drafter.target_fingerprint=", "another"]),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_drafter_is_not_resumed(
    embedded: FrozenTarget, tmp_path: Path, whole: tuple[Path, Any], change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        run(embedded, tmp_path, max_steps=6, ckpt_path=str(whole[0] / "step=3.ckpt"), drafter=change)
    assert all(word in str(caught.value) for word in words)


# -- limits


def test_large_attention_is_refused(embedded: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"drafter\.dense_limit_gib"):
        trainer(embedded, tmp_path, max_steps=1).fit(build(embedded, dense_limit_gib=1e-4), rows_of(UNEVEN, 4))


def test_a_soft_label_is_what_the_target_says_there(embedded: FrozenTarget) -> None:
    """Slot k's teacher is the target's distribution after token a + k - 1: of one document, what the model itself says."""
    module = build(embedded, labels="soft")
    rows = packed_rows([[(90, 10)]])
    batch = {
        "input_ids": torch.from_numpy(rows.input_ids).long(),
        **{name: torch.from_numpy(getattr(rows, name)) for name in ("document_ids", "position_ids", "supervised")},
        "row_ids": torch.arange(1),
    }
    batch = ColocatedStrategy(embedded, module.config.target_layer_ids, teacher=True).with_features(batch)
    blocks = module.blocks(batch, 0)
    teacher = module._teacher(batch["last_hidden"], blocks) @ module.head.T
    with torch.no_grad():
        logits = embedded.model(batch["input_ids"][:, :90]).logits[0]
    for block, anchor in enumerate(blocks.anchors[0].tolist()):
        for slot in range(1, module.config.block_size):
            if blocks.label_ok[0, block, slot - 1]:
                assert blocks.labels[0, block, slot - 1] == batch["input_ids"][0, anchor + slot]
                torch.testing.assert_close(teacher[block, slot - 1], logits[anchor + slot - 1], rtol=1e-3, atol=1e-3)


def test_a_checkpoint_from_before_soft_labels_resumes(embedded: FrozenTarget) -> None:
    module = build(embedded)
    saved = dict(module.hparams.items())
    for name in ("labels", "temperature", "capacity"):
        saved["objective"] = {key: value for key, value in saved["objective"].items() if key != name}
    module.on_load_checkpoint({"hyper_parameters": saved})
    with pytest.raises(UserError, match=r"objective\.weights=dpace, this run tree_survival"):
        build(embedded, weights="tree_survival").on_load_checkpoint({"hyper_parameters": saved})
    with pytest.raises(UserError, match=r"objective\.labels=hard, this run soft"):
        build(embedded, labels="soft").on_load_checkpoint({"hyper_parameters": saved})
