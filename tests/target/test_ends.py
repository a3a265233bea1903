"""The embedding and the head, read alone: those of the loaded target, whatever the checkpoint calls them, and nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dflash_lit.target.ends as ends_module
from dflash_lit.errors import UserError
from dflash_lit.target.ends import read_ends
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetEnds, TargetInfo

V, H = 512, 16
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXT: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
Save = Callable[..., Path]


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**{**TEXT, "tie_word_embeddings": False, **changes}))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**TEXT, tie_word_embeddings=False))


def neox() -> GPTNeoXForCausalLM:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**TEXT, tie_word_embeddings=False))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=H, n_layer=3, n_head=2, n_positions=256))


def gemma3() -> Gemma3ForConditionalGeneration:
    """Its language model is nested; ``AutoModelForCausalLM`` builds the vision tower, too."""
    config = Gemma3Config(
        text_config={**TEXT, "pad_token_id": 0},
        vision_config={**VISION, "num_hidden_layers": 1},
        mm_tokens_per_image=4,
    )
    return Gemma3ForConditionalGeneration(config)


def qwen3_5() -> Qwen3_5ForConditionalGeneration:
    """Saved with a vision tower; ``AutoModelForCausalLM`` builds the language model alone, under other names."""
    linear = {f"linear_{x}": y for x, y in {"num_value_heads": 2, "num_key_heads": 1, "key_head_dim": 8}.items()}
    config = Qwen3_5Config(
        text_config={
            **TEXT,
            **linear,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        },
        vision_config={"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 1, "out_hidden_size": H},
        tie_word_embeddings=False,
    )
    return Qwen3_5ForConditionalGeneration(config)


@pytest.fixture
def save(embedded: FrozenTarget, tmp_path: Path) -> Save:
    def saved(model: Any, shard: str = "1GB", name: str = "target") -> Path:
        """A folder of the model with random weights and a tokenizer."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        folder = tmp_path / name
        model.save_pretrained(folder, max_shard_size=shard)
        embedded.tokenizer.save_pretrained(folder)
        return folder

    return saved


@pytest.fixture
def no_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names must come of Transformers' own rules: a version that moved them shows here."""
    monkeypatch.delattr(ends_module, "_closest")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """In memory of their own: of a mapped file they would change with it."""
    return load((folder / WHOLE).read_bytes())


def rename(folder: Path, change: Callable[[str], str | None]) -> Path:
    """The model under other names; those that become None are left out."""
    weights = tensors_of(folder)
    renamed = {new: tensor for old, tensor in weights.items() if (new := change(old)) is not None}
    save_file(renamed, folder / WHOLE, metadata={"format": "pt"})
    return folder


def rewrite(folder: Path, **tensors: Tensor | None) -> Path:
    """The model with tensors added, changed or (None) left out. Names with ``__`` for dots."""
    weights = tensors_of(folder) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: x for name, x in weights.items() if x is not None}, folder / WHOLE, metadata={"format": "pt"})
    return folder


def place_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def read(folder: Path | str, dtype: torch.dtype = torch.float32) -> TargetEnds:
    return read_ends(TargetInfo.load(str(folder)), device="cpu", dtype=dtype)


def same_as_loaded(folder: Path | str, dtype: torch.dtype = torch.float32) -> TargetEnds:
    """Read, compared bit for bit with those of the whole model."""
    found = read(folder, dtype)
    expected = FrozenTarget.load(TargetInfo.load(str(folder)), dtype=dtype).ends()
    assert (found.embed is found.head) == (expected.embed is expected.head)
    for ours, theirs in ((found.embed, expected.embed), (found.head, expected.head)):
        assert ours.dtype == dtype
        assert not ours.requires_grad
        assert torch.equal(ours, theirs)
    return found


def refusal(folder: Path | str) -> str:
    with pytest.raises(UserError, match=r"target\.path=") as error:
        read(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_the_embedded_target(dtype: torch.dtype) -> None:
    same_as_loaded(EMBEDDED, dtype)


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_of_a_tied_and_an_untied_target_in_one_file_and_in_several(save: Save, tied: bool, shard: str) -> None:
    folder = save(qwen3(tie_word_embeddings=tied), shard)
    assert (folder / INDEX).exists() == (shard == "20KB")
    assert (same_as_loaded(folder).head.shape) == (V, H)
    same_as_loaded(folder, torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "shard"), [(llama, "20KB"), (neox, "1GB"), (gpt2, "1GB"), (gemma3, "20KB"), (qwen3_5, "20KB")]
)
@pytest.mark.usefixtures("no_guess")
def test_of_other_families(save: Save, make: Callable[[], Any], shard: str) -> None:
    same_as_loaded(save(make(), shard))


@pytest.mark.parametrize(
    ("make", "change"),
    [
        # Nested the other way round than it is saved, and base models saved alone.
        (
            gemma3,
            lambda name: name.replace("language_model.model.", "model.language_model.").replace("vision_", "model.vision_"),
        ),
        (gpt2, lambda name: name.removeprefix("transformer.")),
        (llama, lambda name: name.removeprefix("model.")),
    ],
    ids=["gemma3", "gpt2", "llama"],
)
@pytest.mark.usefixtures("no_guess")
def test_of_checkpoints_with_other_names(save: Save, make: Callable[[], Any], change: Callable[[str], str]) -> None:
    folder = save(make())
    before = tensors_of(folder).keys()
    after = tensors_of(rename(folder, change)).keys()
    assert not {name for name in before & after if "embed" in name or "wte" in name}
    same_as_loaded(folder)


@pytest.mark.parametrize("left_out", ["model__embed_tokens__weight", "lm_head__weight"])
def test_of_a_tied_target_with_either_tensor(save: Save, left_out: str) -> None:
    folder = save(qwen3(tie_word_embeddings=True))
    embed = tensors_of(folder)[EMBED]
    rewrite(folder, **{"lm_head__weight": embed.clone(), left_out: None})
    assert torch.equal(same_as_loaded(folder).head, embed)


@pytest.mark.parametrize("differ", [True, False])
def test_of_a_tied_target_with_both_tensors(save: Save, differ: bool) -> None:
    folder = save(qwen3(tie_word_embeddings=True))
    embed = tensors_of(folder)[EMBED]
    found = same_as_loaded(rewrite(folder, lm_head__weight=embed + differ))
    assert (found.embed is found.head) != differ


def test_the_other_shards_need_not_be_there(save: Save) -> None:
    folder = save(qwen3(), "20KB")
    expected = FrozenTarget.load(TargetInfo.load(str(folder)), dtype=torch.float32).ends()
    kept = {place_of(folder, EMBED), place_of(folder, HEAD)}
    others = set(folder.glob("*.safetensors")) - kept
    assert len(kept) == 2
    assert others
    for number, path in enumerate(sorted(others)):
        if number % 2:
            path.unlink()
        else:
            path.write_bytes(b"no header")
    found = read(folder)
    assert torch.equal(found.embed, expected.embed)
    assert torch.equal(found.head, expected.head)


def test_the_rest_of_a_file_is_not_read(save: Save) -> None:
    """256 GiB of it, which are not even on the disk."""
    folder = save(qwen3(tie_word_embeddings=True))
    embed = tensors_of(folder)[EMBED]
    size, hole = embed.nbytes, 2**38
    header = json.dumps(
        {
            "model.layers.0.mlp.up_proj.weight": {"dtype": "F32", "shape": [hole // 4], "data_offsets": [0, hole]},
            EMBED: {"dtype": "F32", "shape": [V, H], "data_offsets": [hole, hole + size]},
            "model.norm.weight": {"dtype": "F32", "shape": [hole // 4], "data_offsets": [hole + size, 2 * hole + size]},
        }
    ).encode()
    with (folder / WHOLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(hole, 1)
        file.write(embed.numpy().tobytes())
        file.truncate(file.tell() + hole)
    found = read(folder)
    (folder / WHOLE).unlink()  # nobody should try to copy it
    assert torch.equal(found.embed, embed)
    assert found.embed.untyped_storage().nbytes() == size


def test_tensors_outlive_their_file(save: Save) -> None:
    folder = save(qwen3())
    found, copies = read(folder), read(folder)
    with (folder / WHOLE).open("r+b") as file:
        file.truncate(8)
    assert torch.equal(found.embed, copies.embed)
    assert found.embed.data_ptr() != copies.embed.data_ptr()


@pytest.mark.parametrize("make", [qwen3, neox, gemma3, gpt2])
def test_without_the_rules_of_transformers_names_are_guessed(
    save: Save, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make())
    expected = read(folder)
    monkeypatch.delattr(transformers.core_model_loading, "rename_source_key")
    found = read(folder)
    assert torch.equal(found.embed, expected.embed)
    assert torch.equal(found.head, expected.head)


def test_guesses() -> None:
    known = ("lm_head.weight", "embed_out.weight")
    assert ends_module._closest(HEAD, known, ["a.weight", "language_model.lm_head.weight"]) == "language_model.lm_head.weight"
    assert ends_module._closest(HEAD, known, ["mtp.lm_head.weight", HEAD]) == HEAD
    assert ends_module._closest(HEAD, known, ["a.weight", "x.embed_out.weight"]) == "x.embed_out.weight"
    assert ends_module._closest(HEAD, known, ["a.lm_head.weight", "b.lm_head.weight"]) is None
    assert ends_module._closest(HEAD, known, ["a.weight"]) is None


def test_missing_tensors(save: Save) -> None:
    folder = save(qwen3())
    assert f"{WHOLE} lacks tensor {HEAD!r}" in refusal(rewrite(folder, lm_head__weight=None))
    packed = rewrite(folder, lm_head__qweight=torch.ones(4, 4, dtype=torch.int32))
    assert f"{WHOLE} holds 'lm_head.qweight' in place of {HEAD!r}: quantised" in refusal(packed)
    assert f"{WHOLE} lacks tensor {EMBED!r}" in refusal(rewrite(folder, model__embed_tokens__weight=None))


def test_a_tensor_that_would_not_be_loaded_is_not_taken(save: Save) -> None:
    folder = rename(save(qwen3()), lambda name: f"mtp.{name}" if name == HEAD else name)
    assert f"{WHOLE} lacks tensor {HEAD!r}" in refusal(folder)


def test_wrong_shapes_and_quantised_tensors(save: Save) -> None:
    folder = save(qwen3())
    message = f"{WHOLE} holds {HEAD!r} of shape [500, 16]; by its config it is [512, 16]"
    assert message in refusal(rewrite(folder, lm_head__weight=torch.zeros(500, H)))
    for dtype, kind in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.uint8, "U8")):
        quantised = rewrite(folder, lm_head__weight=torch.zeros(V, H).to(dtype))
        assert f"{WHOLE} holds {HEAD!r} in {kind}: quantised" in refusal(quantised)


def test_missing_and_broken_shards(save: Save) -> None:
    folder = save(qwen3(), "20KB")
    shard = place_of(folder, HEAD)
    whole = shard.read_bytes()
    for broken in (whole[:-1], whole[:100], whole[:3], b"", b"\xff" * 64):
        shard.write_bytes(broken)
        assert f"{shard.name} could not be read" in refusal(folder)
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{shard.name} is only a pointer of Git LFS" in refusal(folder)
    save_file({"other": torch.zeros(1)}, shard)
    assert f"{shard.name} lacks tensor {HEAD!r}, which {INDEX} says it holds" in refusal(folder)
    shard.unlink()
    assert f"{shard.name}, which holds {HEAD!r}, is missing; fetch" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', "\xff", "[" * 100_000])
def test_broken_indexes(save: Save, text: str) -> None:
    folder = save(qwen3(), "20KB")
    (folder / INDEX).write_bytes(text.encode("latin-1"))
    assert f"{INDEX} is no index" in refusal(folder)


def test_models_without_safetensors(save: Save) -> None:
    folder = save(qwen3())
    (folder / WHOLE).unlink()
    assert f"has no {WHOLE} and no {INDEX}; give" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "has its weights in pytorch_model.bin only" in refusal(folder)
    assert "convert them to safetensors" in refusal(folder)


def test_unsupported_models(save: Save, embedded: FrozenTarget) -> None:
    phi = save(PhiForCausalLM(PhiConfig(**{**TEXT, "num_key_value_heads": 2})))
    assert refusal(phi).endswith("a head with a bias is not supported")
    with pytest.raises(UserError) as error:
        FrozenTarget.load(TargetInfo.load(str(phi))).ends()
    assert str(error.value) == refusal(phi)
    unknown = TargetInfo("x", Qwen3Config(**TEXT, hidden_act="unheard of"), embedded.tokenizer)
    with pytest.raises(UserError, match=r"target\.path='x': no causal language model by its config"):
        read_ends(unknown, device="cpu", dtype=torch.float32)


def test_nothing_is_written_to_the_config(save: Save) -> None:
    info = TargetInfo.load(str(save(qwen3())))
    before = info.config.to_dict(), info.config._attn_implementation
    read_ends(info, device="cpu", dtype=torch.bfloat16)
    assert (info.config.to_dict(), info.config._attn_implementation) == before


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[TargetInfo, Path]]:
    """A model under a name, in a cache as ``huggingface_hub`` keeps it, and no network."""

    def cached(folder: Path) -> tuple[TargetInfo, Path]:
        info = TargetInfo.load(str(folder))
        home = tmp_path / "hub" / "models--org--name"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(COMMIT)
        (home / "snapshots").mkdir()
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home.parent))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return TargetInfo("org/name", info.config, info.tokenizer), folder.rename(home / "snapshots" / COMMIT)

    return cached


@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["one file", "shards"])
def test_from_the_cache_of_the_hub(save: Save, on_hub: Any, shard: str) -> None:
    folder = save(qwen3(), shard)
    expected = read(folder)
    info, cache = on_hub(folder)
    found = read_ends(info, device="cpu", dtype=torch.float32)
    assert torch.equal(found.embed, expected.embed)
    assert torch.equal(found.head, expected.head)
    for path in cache.glob("*.safetensors"):
        path.unlink()
    message = r"target\.path='org/name': .*model\S*\.safetensors.* in the cache and on the hub, which may be out of reach"
    with pytest.raises(UserError, match=message):
        read_ends(info, device="cpu", dtype=torch.float32)


def test_only_the_index_and_two_shards_are_fetched(save: Save, on_hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info, cache = on_hub(save(qwen3(), "20KB"))
    shards = [place_of(cache, name).name for name in (EMBED, HEAD)]
    asked: list[tuple[str, str | None]] = []

    def fetch(name: str, file: str, *, revision: str | None) -> str:
        asked.append((file, revision))
        if not (cache / file).exists():
            raise LocalEntryNotFoundError(file)
        return str(cache / file)

    monkeypatch.setattr(ends_module, "hf_hub_download", fetch)
    read_ends(info, device="cpu", dtype=torch.float32)
    assert asked == [(WHOLE, None), (INDEX, None), *((shard, COMMIT) for shard in shards)]

    def fail(*_: Any, **__: Any) -> str:
        raise RuntimeError("no route\nto host")

    monkeypatch.setattr(ends_module, "hf_hub_download", fail)
    with pytest.raises(UserError, match=rf"target\.path='org/name': {WHOLE} could not be fetched \(no route to host\)"):
        read_ends(info, device="cpu", dtype=torch.float32)


def test_a_pickled_model_in_the_cache(save: Save, on_hub: Any) -> None:
    info, cache = on_hub(save(qwen3()))
    (cache / WHOLE).rename(cache / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has its weights in pytorch_model\.bin only"):
        read_ends(info, device="cpu", dtype=torch.float32)
