from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_lit.decode.chain import one_block_attention
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.export import drafter_from_checkpoint, load_drafter, save_drafter
from tests.helpers import drafter_config, lively_drafter, random, random_ends

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Reader:
    """The format read from its description alone: JSON, safetensors and plain tensor code."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self.weights[name + ".weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.config["head_dim"] // 2
        angles = positions[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]  # [heads, T, half]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.config["head_dim"]).transpose(0, 1)

    def drafts(self, features: Tensor, anchor: int, embed: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states, tokens) of slots 1..B-1 after a context of ``features`` [T, n_ids * H]."""
        size, context = self.config["block_size"], len(features)
        x = embed[[anchor] + [self.config["dflash_config"]["mask_token_id"]] * (size - 1)]
        fused = self.norm(self.linear(features, "fc"), "hidden_norm")
        positions = torch.arange(context + size)
        visible = torch.ones(size, context + size).bool()
        if self.config["dflash_config"]["causal"]:
            visible = visible.tril(context)
        groups = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}.self_attn."
            y = self.norm(x, f"layers.{i}.input_layernorm")
            both = torch.cat([fused, y])
            q = self.turn(self.norm(self.heads(self.linear(y, name + "q_proj")), name + "q_norm"), positions[context:])
            k = self.turn(self.norm(self.heads(self.linear(both, name + "k_proj")), name + "k_norm"), positions)
            v = self.heads(self.linear(both, name + "v_proj"))
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            seen = visible
            if self.config["layer_types"][i] == "sliding_attention":  # pos(anchor) + slot - pos(key) < window, of the context
                distance = positions[context:, None] - positions
                seen = visible & ((distance < self.config["sliding_window"]) | (positions >= context))
            scores = (q @ k.transpose(1, 2)) / self.config["head_dim"] ** 0.5
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
            x = x + self.linear(out.transpose(0, 1).flatten(1), name + "o_proj")
            y = self.norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = (self.linear(y, f"layers.{i}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"layers.{i}.mlp.down_proj")
        hidden = self.norm(x, "norm")[1:]
        return hidden, (hidden @ head.T).argmax(-1)


def own_drafts(drafter: Drafter, features: Tensor, anchor: int, embed: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    config = drafter.config
    block = torch.tensor([[anchor] + [config.mask_token_id] * (config.block_size - 1)])
    positions = torch.arange(len(features) + config.block_size)[None]
    with torch.no_grad():
        context = drafter.context(features[None], positions[:, : len(features)])
        noise, near = F.embedding(block, embed), {"places": torch.tensor([len(features)]), "window": config.sliding_window}
        each = config.each_layer(one_block_attention(config.causal), one_block_attention(config.causal, **near))
        hidden = drafter.draft(noise, positions[:, len(features) :], context, each)[0, 1:]
    return hidden, (hidden @ head.T).argmax(-1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_drafter(lively_drafter(drafter_config(target_fingerprint="abc")), tmp_path / "drafter")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("context", [1, 40])
@pytest.mark.parametrize("sliding", [{}, {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 11}])
def test_a_from_scratch_reader_drafts_the_same(tmp_path: Path, causal: bool, context: int, sliding: dict[str, Any]) -> None:
    config = drafter_config(causal=causal, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **sliding)
    save_drafter(lively_drafter(config), tmp_path / "drafter")
    loaded, ends = load_drafter(tmp_path / "drafter"), random_ends(config)
    arguments = (random(context, config.feature_size, seed=7), 11, ends.embed, ends.head)
    theirs, ours = Reader(tmp_path / "drafter").drafts(*arguments), own_drafts(loaded, *arguments)
    torch.testing.assert_close(theirs[0], ours[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(theirs[1], ours[1])


def test_config_has_every_field_servers_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "max_position_embeddings": 32768,
        "vocab_size": 64,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "rope_theta": 10_000.0,
        "rope_scaling": None,
    }
    assert {name: config[name] for name in expected} == expected
    own = config["dflash_config"]
    assert (own["block_size"], own["mask_token_id"], own["target_layer_ids"], own["causal"]) == (4, 63, [1, 2], False)
    assert "auto_map" not in config
    described = json.loads((save_drafter(load_drafter(folder), folder, auto_map=True) / "config.json").read_text())
    assert "auto_map" in described


def test_weights_are_bf16_and_the_drafters_alone(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == 2 * 11 + 3
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert not [name for name in weights if name.startswith("model.") or "embed" in name or "head" in name or "rotary" in name]
    original = lively_drafter(drafter_config()).state_dict()
    assert all(torch.equal(value, original[name].bfloat16()) for name, value in weights.items())


@pytest.mark.parametrize(
    "rope", [{"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}]
)
def test_there_and_back(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = drafter_config(causal=True, rope_parameters=rope, target_fingerprint="abc")
    folder = save_drafter(lively_drafter(config), tmp_path / "drafter")
    assert load_drafter(folder).config == config
    # Servers and older files know the older two fields alone.
    described = json.loads((folder / "config.json").read_text())
    del described["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(described))
    assert load_drafter(folder).config == config
    assert load_drafter(folder, dtype=torch.bfloat16).fc.weight.dtype == torch.bfloat16


Change = Callable[[Path], object]


def test_a_path_head_is_a_file_of_its_own(tmp_path: Path) -> None:
    """Who does not know it finds an ordinary drafter, but for a word in ``dflash_config``."""
    drafter = lively_drafter(drafter_config(path_width=8, path_candidates=5))
    folder = save_drafter(drafter, tmp_path / "drafter")
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "path_head.safetensors"]
    assert len(load_file(folder / "model.safetensors")) == 2 * 11 + 3
    assert json.loads((folder / "config.json").read_text())["dflash_config"]["path_head"] == {"width": 8, "candidates": 5}
    loaded = load_drafter(folder)
    assert loaded.config == drafter.config
    assert all(torch.equal(value, drafter.state_dict()[name].bfloat16().float()) for name, value in loaded.state_dict().items())

    described = json.loads((folder / "config.json").read_text())
    del described["dflash_config"]["path_head"]
    (folder / "config.json").write_text(json.dumps(described))
    plain = load_drafter(folder)
    assert plain.path_head is None
    assert torch.equal(plain.fc.weight, loaded.fc.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "path_head.safetensors").unlink(), ["path_head.safetensors", "cannot be read"]),
        (lambda folder: save_file({}, folder / "path_head.safetensors"), ["path_head.forget_proj.weight", "missing"]),
        (lambda folder: change_config(own__path_head={"width": 9, "candidates": 5})(folder), ["path_head", "[9, 32]"]),
        (lambda folder: change_config(own__path_head={"width": 8})(folder), ["config.json", "candidates"]),
        (lambda folder: change_config(own__path_head={"width": 8, "candidates": 0})(folder), ["path_candidates=0"]),
    ],
)
def test_damage_of_a_path_head_is_named(tmp_path: Path, change: Change, words: list[str]) -> None:
    folder = save_drafter(lively_drafter(drafter_config(path_width=8, path_candidates=5)), tmp_path / "drafter")
    change(folder)
    with pytest.raises(UserError) as caught:
        load_drafter(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_export_without_a_path_head_replaces_one_with(tmp_path: Path) -> None:
    folder = save_drafter(lively_drafter(drafter_config(path_width=8)), tmp_path / "drafter")
    save_drafter(lively_drafter(drafter_config()), folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


# -- damaged folders


def change_config(**changes: Any) -> Change:
    """Set fields, or remove those given as ``...``; ``own__x`` stands for ``dflash_config["x"]``."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            place = config["dflash_config"] if name.startswith("own__") else config
            place[name.removeprefix("own__")] = value
            if value is ...:
                del place[name.removeprefix("own__")]
        (folder / "config.json").write_text(json.dumps(config))

    return change


def change_weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def truncate(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


DAMAGES: dict[str, tuple[Change, list[str]]] = {
    "no weights": (remove("model.safetensors"), ["model.safetensors"]),
    "no config": (remove("config.json"), ["config.json", "cannot be read"]),
    "truncated weights": (truncate("model.safetensors"), ["model.safetensors", "cannot be read"]),
    "truncated config": (truncate("config.json"), ["config.json", "not JSON"]),
    "other JSON": (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "dflash_config"]),
    "another model": (change_config(dflash_config=...), ["config.json", "dflash_config"]),
    "no mask token": (change_config(own__mask_token_id=...), ["config.json", "mask_token_id"]),
    "no block size": (change_config(own__block_size=..., block_size=...), ["config.json", "block_size"]),
    "no width": (change_config(hidden_size=...), ["config.json", "hidden_size"]),
    "width as text": (change_config(hidden_size="32"), ["config.json", "hidden_size"]),
    "layers as text": (change_config(own__target_layer_ids=["first"]), ["config.json", "target_layer_ids"]),
    "one layer, no list": (change_config(own__target_layer_ids=1), ["config.json", "target_layer_ids"]),
    "no rope": (change_config(rope_parameters=..., rope_theta=...), ["config.json", "rope_theta"]),
    "rope without theta": (change_config(rope_parameters={"rope_type": "default"}), ["config.json", "rope_theta"]),
    "rope that turns too fast": (
        change_config(rope_parameters={"rope_type": "default", "rope_theta": 1e-300}),
        ["config.json", "rope_theta=1e-300"],
    ),
    "rope of an impossible factor": (
        change_config(rope_parameters={"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}),
        ["rope_parameters", "'linear'", "not finite"],
    ),
    "mask token outside": (change_config(own__mask_token_id=64), ["config.json", "mask_token_id=64"]),
    "other layers": (change_config(layer_types=["linear_attention"] * 2), ["config.json", "linear_attention"]),
    "no window": (change_config(layer_types=["sliding_attention"] * 2), ["config.json", "sliding_window"]),
    "sliding without a word on causal": (
        change_config(layer_types=["sliding_attention"] * 2, sliding_window=8, own__causal=...),
        ["config.json", "dflash_config.causal"],
    ),
    "sliding and null for causal": (
        change_config(layer_types=["sliding_attention"] * 2, sliding_window=8, own__causal=None),
        ["config.json", "dflash_config.causal"],
    ),
    "biases": (change_config(attention_bias=True), ["config.json", "attention_bias"]),
    "missing tensor": (
        change_weights(lambda w: w.pop("layers.1.self_attn.q_norm.weight")),
        ["layers.1.self_attn.q_norm", "missing"],
    ),
    "foreign tensor": (change_weights(lambda w: w.update({"embed": torch.ones(1)})), ["'embed'", "does not belong"]),
    "wrong shape": (change_weights(lambda w: w.update({"norm.weight": torch.ones(31)})), ["norm.weight", "[31]", "[32]"]),
    "not finite": (change_weights(lambda w: w["fc.weight"][3].fill_(torch.nan)), ["fc.weight", "not finite"]),
    "more layers than weights": (change_config(num_hidden_layers=3), ["model.safetensors", "layers.2.", "missing"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(folder: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    change(folder)
    with pytest.raises(UserError) as caught:
        load_drafter(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert all(word in message for word in words), message


# -- writing


def test_an_existing_export_is_replaced_whole(folder: Path) -> None:
    save_drafter(lively_drafter(drafter_config(), seed=5), folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert os.listdir(folder.parent) == [folder.name]
    assert torch.equal(load_drafter(folder).fc.weight, lively_drafter(drafter_config(), seed=5).fc.weight.bfloat16().float())


@pytest.mark.parametrize("fault", ["not finite", "cannot be described"])
def test_a_failure_leaves_the_old_folder(folder: Path, fault: str) -> None:
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    drafter = lively_drafter(drafter_config(), seed=5)
    if fault == "not finite":
        with torch.no_grad():
            drafter.layers[1].mlp.up_proj.weight[3, 3] = torch.inf
        with pytest.raises(UserError, match=r"'layers\.1\.mlp\.up_proj\.weight'"):
            save_drafter(drafter, folder)
    else:
        drafter.config.rope_parameters["factor"] = {1, 2}  # no JSON
        with pytest.raises(TypeError):
            save_drafter(drafter, folder)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    assert os.listdir(folder.parent) == [folder.name]


# -- Lightning checkpoints


def checkpoint(path: Path, config: DrafterConfig, drafter: Drafter) -> Path:
    weights = {f"drafter.{name}": value for name, value in drafter.state_dict().items()}
    torch.save({"hyper_parameters": {"drafter": config.to_dict()}, "state_dict": weights}, path)
    return path


def test_the_drafter_of_a_checkpoint(tmp_path: Path) -> None:
    drafter = lively_drafter(drafter_config())
    loaded = drafter_from_checkpoint(checkpoint(tmp_path / "a.ckpt", drafter.config, drafter))
    assert loaded.config == drafter.config
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), drafter.state_dict().values(), strict=True))


def test_checkpoints_that_cannot_be_used(tmp_path: Path) -> None:
    drafter = lively_drafter(drafter_config())
    good = checkpoint(tmp_path / "good.ckpt", drafter.config, drafter)
    (tmp_path / "short.ckpt").write_bytes(good.read_bytes()[:5000])
    checkpoint(tmp_path / "other.ckpt", drafter_config(num_hidden_layers=3), drafter)
    checkpoint(tmp_path / "wide.ckpt", drafter_config(hidden_size=2**20), drafter)
    checkpoint(tmp_path / "odd.ckpt", drafter_config(rope_parameters={"rope_type": "odd", "rope_theta": 1e4}), drafter)
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    wrong = {
        "none": "no such",
        "short": "damaged",
        "other": "do not fit",
        "wide": r"do not fit its settings \(drafter\.",  # and nothing of that size is made
        "odd": "rope_type 'odd'",
        "foreign": "not a checkpoint",
    }
    for name, word in wrong.items():
        with pytest.raises(UserError, match=word) as caught:
            drafter_from_checkpoint(tmp_path / f"{name}.ckpt")
        assert f"{name}.ckpt" in str(caught.value)


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"hyper_parameters": Malicious(tmp_path / "ran"), "state_dict": {}}, tmp_path / "evil.ckpt")
    with pytest.raises(UserError, match=r"evil\.ckpt"):
        drafter_from_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "ran").exists()


def test_only_an_export_is_ever_replaced(tmp_path: Path) -> None:
    drafter = Drafter(drafter_config())
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes: holds 'a\.txt', which is no exported drafter"):
        save_drafter(drafter, notes)
    with pytest.raises(UserError, match=r"a\.txt: is a file"):
        save_drafter(drafter, notes / "a.txt")
    assert (notes / "a.txt").read_text() == "mine"
    out = save_drafter(drafter, tmp_path / "out")
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_what_others_leave_empty_is_left_out(tmp_path: Path) -> None:
    folder = save_drafter(lively_drafter(drafter_config()), tmp_path / "drafter")
    told = json.loads((folder / "config.json").read_text())
    told["initializer_range"] = None
    told["dflash_config"] |= {"causal": None, "target_fingerprint": None, "sha256": None}
    (folder / "config.json").write_text(json.dumps(told))
    config = load_drafter(folder).config
    assert (config.causal, config.initializer_range, config.target_fingerprint) == (False, 0.02, "")
