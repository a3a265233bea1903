"""Every file of conf/ composes, and every bad value is one line that names its key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import Qwen3ForCausalLM

from dflash_lit.commands import one_line
from dflash_lit.config import TrainConfig, register
from dflash_lit.decode.static_drafter import StaticDrafter
from dflash_lit.decoded import sides_of_speed
from dflash_lit.doctor.memory import PUBLISHED
from dflash_lit.drafter.model import Drafter
from dflash_lit.errors import UserError
from dflash_lit.export import load_drafter, save_drafter
from dflash_lit.job import Job
from dflash_lit.placement.known import known_config
from dflash_lit.placement.sizes import measure_sizes
from dflash_lit.plan import Plan, make_plan
from dflash_lit.target.frozen import FrozenTarget, TargetInfo
from dflash_lit.target.static_reader import StaticTarget
from tests.helpers import lively_drafter

CONF = Path(__file__).parent.parent / "conf"
register()


def configured(*overrides: str) -> TrainConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=["paths.output_dir=/nowhere", *overrides])
    cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, TrainConfig)
    return cfg


def planned(*overrides: str) -> Plan:
    return make_plan(configured("trainer.accelerator=cpu", *overrides))


def test_soft_labels_take_the_temperature_of_the_responses() -> None:
    assert planned("objective=soft").objective.temperature == 0.7
    assert planned("objective=soft", "data.temperature=0").objective.temperature == 1.0
    assert planned("objective=soft", "objective.temperature=0.5").objective.temperature == 0.5


NEEDED = {
    "target/hf": "target.path=somewhere",
    "data/file": "data.prompts=somewhere.txt",
    "data/chat": "data.path=somewhere.jsonl",
}
EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml") if "/data: file" in file.read_text())
"""Those that need prompts: for targets from a hub."""


def choices() -> list[str]:
    needed = NEEDED | {f"experiment/{name}": "data.prompts=somewhere.txt" for name in EXPERIMENTS}
    found = []
    for file in sorted(path for path in CONF.rglob("*.yaml") if path.parent != CONF):
        group, name = str(file.parent.relative_to(CONF)), file.stem
        prefix = "+" if group == "experiment" else ""
        found.append(f"{prefix}{group}={name} {needed.get(f'{group}/{name}', '')}".strip())
    return found


@pytest.mark.parametrize("choice", choices())
def test_every_file_composes(choice: str) -> None:
    configured(*choice.split())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_experiments_for_larger_targets_are_possible(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sizes of the targets; the embedded tokenizer stands for theirs. And ``dflash-lit plan`` knows them."""
    (tmp_path / "prompts.txt").write_text("x\n")
    tokenizer = TargetInfo.load("embedded").tokenizer

    def load(path: str, *, trust_remote_code: bool) -> TargetInfo:
        config = known_config(path)
        assert config is not None
        return TargetInfo(path, config, tokenizer, trust_remote_code)

    monkeypatch.setattr(TargetInfo, "load", load)
    plan = planned(f"+experiment={name}", f"data.prompts={tmp_path}/prompts.txt", "drafter.dense_limit_gib=1e9")
    text = known_config(plan.info.path)
    assert text is not None
    assert plan.drafter.hidden_size == text.hidden_size
    assert plan.drafter.num_hidden_layers == len(plan.drafter.target_layer_ids) == 5
    assert plan.drafter.initializer_range == 0.02
    if name.endswith("split"):
        cfg = configured(f"+experiment={name}", "data.prompts=x")
        assert (plan.layout.targets, plan.layout.drafters) == (5, 3)
        assert (cfg.drafter.anchors, cfg.drafter.block_size, cfg.data.row_tokens) == (1024, 32, 40_064)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-4B", 4.02),
        ("qwen3-8b", 8.19),
        ("Qwen/Qwen3-32B", 32.8),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
    ],
)
def test_known_sizes_come_to_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert measure_sizes(name, PUBLISHED).target_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_only_the_known_targets_themselves_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_config("somebody/Qwen3-8B") is None
    assert known_config("Qwen/Qwen3-0.6B") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert known_config("Qwen/Qwen3-8B") is None  # a folder of that name has a config of its own


def test_the_main_job_is_possible_and_derived_from_the_target() -> None:
    plan = planned()
    assert plan.drafter.target_layer_ids == (1, 2, 3)
    assert plan.drafter.mask_token_id == plan.info.tokenizer.mask_token_id
    assert plan.drafter.hidden_size == plan.info.text.hidden_size
    assert plan.precision == "32-true"
    assert plan.val_every == 100
    assert planned("seed=3", "trainer.max_steps=50").val_every == 10


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.max_stepz=3", "max_stepz"),
        ("nonsense=1", "nonsense"),
        ("objective=nothing", "objective/nothing"),
        ("trainer.max_steps=many", "many"),
        ("drafter.block_size=1.5", "1.5"),
        ("data.train_prompts=[1]", "train_prompts"),
    ],
)
def test_unknown_keys_and_wrong_types_do_not_compose(override: str, says: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)) as caught:
        configured(override)
    line = one_line(caught.value)
    assert says in line
    assert "\n" not in line


@pytest.mark.parametrize(("override", "key"), [("target=hf", "target.path"), ("data=file", "data.prompts")])
def test_what_a_choice_needs_has_to_be_given(override: str, key: str) -> None:
    with pytest.raises(OmegaConfBaseException, match=key):
        configured(override)


def test_the_readmes_command_for_an_own_model_is_possible(tmp_path: Path) -> None:
    """Checked with the sizes of Qwen3-8B, for which neither weights nor a hub are needed."""
    import json
    import re
    import shutil

    from dflash_lit.target import embedded

    command = re.search(r"python3? train\.py (target=hf .*)", (CONF.parent / "README.md").read_text())
    assert command is not None
    source = Path(next(iter(embedded.__path__)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    more = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "layer_types": None,
    }
    (tmp_path / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **sizes, **more}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    overrides = (
        command.group(1).replace("Qwen/Qwen3-8B", str(tmp_path)).replace("=prompts.jsonl", f"={tmp_path}/prompts.jsonl").split()
    )
    with pytest.raises(UserError, match="dense attention"):  # the command is for a GPU; on a CPU it says what is too large
        planned(*overrides)
    plan = planned(*overrides, "drafter.dense_limit_gib=1e4")
    assert plan.drafter.target_layer_ids == (1, 9, 17, 25, 33)
    assert plan.drafter.num_hidden_layers == 5
    assert plan.drafter.initializer_range == 0.02


def test_rope_parameters_can_be_given() -> None:
    plan = planned("+drafter.rope_parameters={rope_type: linear, factor: 2.0, rope_theta: 5000.0}")
    assert plan.drafter.rope_parameters["factor"] == 2.0


def test_a_warm_start_may_add_a_path_head_and_nothing_else(embedded: FrozenTarget, tmp_path: Path) -> None:
    folders = {}
    for width in (0, 16):
        made = lively_drafter(planned(f"drafter.path_width={width}").drafter, seed=width)
        folders[width] = save_drafter(made, tmp_path / str(width))
    for ours, theirs in ((16, 0), (16, 16), (0, 0)):
        cfg = configured(
            f"drafter.path_width={ours}", f"drafter.init_from={folders[theirs]}", f"paths.output_dir={tmp_path}/run"
        )
        module = Job(cfg, make_plan(cfg)).module(embedded)
        there = load_drafter(folders[theirs]).state_dict()
        state = module.drafter.state_dict()
        assert all(torch.equal(state[name], value) for name, value in there.items())
        assert ("path_head.out_proj.weight" in state) == (ours > 0)
        if ours and not theirs:
            assert (state["path_head.out_proj.weight"] == 0).all()  # decodes as before
    with pytest.raises(UserError, match=r"init_from: that drafter has intermediate_size=\d+, this run 96; set them equal"):
        planned("drafter.intermediate_size=96", f"drafter.init_from={folders[0]}")
    with pytest.raises(UserError, match=r"^drafter\.init_from: .*config\.json: cannot be read"):
        planned(f"drafter.init_from={tmp_path}")
    for ours, theirs in ((0, 16), (8, 16)):
        with pytest.raises(UserError, match=rf"init_from: that drafter has path_width={theirs}, this run {ours}"):
            planned(f"drafter.path_width={ours}", f"drafter.init_from={folders[theirs]}")


@pytest.mark.parametrize(
    ("place", "kind", "says"),
    [
        ("checkpoints", "file", "is no folder"),
        ("csv", "link", "is no folder"),
        ("checkpoints/last.ckpt", "folder", "is a folder"),
        ("checkpoints/step=2.ckpt", "folder", "is a folder"),
        ("csv", "file", "is no folder"),
        ("csv/metrics.csv", "folder", "is a folder"),
        ("report.html", "folder", "is a folder"),
        ("summary.json", "folder", "is a folder"),
        ("drafter", "file", "is a file"),
        ("drafter/notes.txt", "file", "holds 'notes.txt'"),
    ],
)
def test_what_is_in_the_way_of_a_runs_files_is_refused_at_its_start(tmp_path: Path, place: str, kind: str, says: str) -> None:
    cfg = configured("trainer.accelerator=cpu", "logger=csv", f"paths.output_dir={tmp_path}")
    Job(cfg, make_plan(cfg)).instances()
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "nothing")
    else:
        path.write_text("mine")
    named = path.parent if place == "drafter/notes.txt" else path
    with pytest.raises(UserError, match=f"^{re.escape(str(named))}: {says}"):
        Job(cfg, make_plan(cfg)).instances()


def test_a_monitor_that_would_not_be_logged_is_refused(tmp_path: Path) -> None:
    """The monitor of the best checkpoint may be the decoded length of draft trees, at a budget that is decoded."""

    def made(*overrides: str) -> list[Any]:
        cfg = configured("trainer.accelerator=cpu", "logger={}", f"paths.output_dir={tmp_path}", *overrides)
        return Job(cfg, make_plan(cfg)).instances()[0]

    assert len(made("callbacks.checkpoint.monitor=val/tau@64")) == len(made())
    made("callbacks.checkpoint.monitor=val/tau@16", "callbacks.acceptance.budgets=[16,64]")
    for budgets in ("0", "[16]"):
        with pytest.raises(UserError, match=r"monitor=val/tau@64 of SafeCheckpoint.*callbacks\.acceptance\.budgets"):
            made("callbacks.checkpoint.monitor=val/tau@64", f"callbacks.acceptance.budgets={budgets}")
    made("callbacks.checkpoint.monitor=val/tree_eal@16", "evaluation.tree_budgets=[16]")
    with pytest.raises(
        UserError, match=r"monitor=val/tree_eal@64 of SafeCheckpoint.*only val/tree_eal@16; .*evaluation\.tree_budgets"
    ):
        made("callbacks.checkpoint.monitor=val/tree_eal@64", "evaluation.tree_budgets=[16]")
    with pytest.raises(UserError, match=r"callbacks\.acceptance: budgets=\[-1\]"):
        made("callbacks.acceptance.budgets=-1")


@pytest.mark.parametrize("compiles", ["true", "null"])
def test_what_the_report_decodes_with(embedded: FrozenTarget, tmp_path: Path, compiles: str) -> None:
    """On a CPU, target and drafter as they are unless told otherwise."""
    cfg = configured("trainer.accelerator=cpu", f"paths.output_dir={tmp_path}", f"evaluation.compile={compiles}")
    plan = make_plan(cfg)
    drafter = Drafter(plan.drafter)
    sides = sides_of_speed(cfg, plan, embedded, drafter, [[5, 6, 7]])
    if compiles == "null":
        assert sides == (embedded, drafter)
    else:
        assert isinstance(sides[0], StaticTarget)
        assert isinstance(sides[1], StaticDrafter)
        assert sides[0].room >= 3 + plan.max_new_tokens + 2 * plan.drafter.block_size


def test_a_target_that_cannot_be_decoded_with_compiled_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3ForCausalLM, "_can_compile_fullgraph", False)
    cfg = configured("trainer.accelerator=cpu", f"paths.output_dir={tmp_path}", "evaluation.compile=true")
    with pytest.raises(UserError, match=r"evaluation\.compile=true: the layers of embedded cannot be compiled.*leave it null"):
        Job(cfg, make_plan(cfg)).target()


IMPOSSIBLE: list[tuple[str, str]] = [
    ("drafter.block_size=1", r"drafter\.block_size=1"),
    ("drafter.layers=0", r"drafter\.layers=0"),
    ("drafter.sliding_window=99999999999999999999", r"drafter\.sliding_window=9+: lies beyond 64 bits"),
    ("optimizer.betas=${trainer}", r"optimizer\.betas: is a whole section of the config; give a list"),
    ("evaluation.temperatures=${seed}", r"evaluation\.temperatures: is 0; give a list"),
    ("drafter.rope_parameters=${optimizer}", r"drafter\.rope_parameters: is a whole section of the config; give a dict"),
    ("drafter.features=4294967296", r"drafter\.features=4294967296: a target of 6 layers offers at most 3"),
    ("drafter.initializer_range=1e30", r"drafter\.initializer_range=1e\+30: must be at most 1"),
    ("evaluation.budgets=[16,99999999999999999999]", r"evaluation\.budgets=9+: lies beyond 64 bits"),
    ("drafter.anchors=0", r"drafter\.anchors=0"),
    ("drafter.features=4", r"drafter\.features=4: .* at most 3"),
    ("drafter.target_layer_ids=[5]", r"layer 5 is out of range"),
    ("drafter.mask_token_id=0", r"mask_token_id=0 is the target's eos"),
    ("drafter.mask_token_id=1", r"mask_token_id=1 is the target's pad"),
    ("drafter.mask_token_id=99999", r"mask_token_id=99999 is outside"),
    ("drafter.head_dim=0", r"drafter\.head_dim=0"),
    ("drafter.initializer_range=0", r"drafter\.initializer_range=0"),
    ("drafter.path_width=-1", r"drafter\.path_width=-1"),
    ("drafter.path_candidates=0", r"drafter\.path_candidates=0"),
    ("drafter.init_from=/no/such", r"drafter\.init_from='/no/such'"),
    ("drafter.dense_limit_gib=0.001", r"drafter\.dense_limit_gib=0\.001"),
    ("objective.weights=magic", r"objective\.weights='magic'"),
    ("objective.gamma=0", r"objective\.gamma=0"),
    ("objective.alpha=2", r"objective\.alpha=2"),
    ("objective.chunk_slots=0", r"objective\.chunk_slots=0"),
    ("optimizer.kind=sgd", r"optimizer\.kind='sgd'"),
    ("optimizer.lr=0", r"optimizer\.lr=0"),
    ("optimizer.lr=inf", r"optimizer\.lr=inf"),
    ("optimizer.weight_decay=-1", r"optimizer\.weight_decay=-1"),
    ("trainer.gradient_clip_val=-1", r"trainer\.gradient_clip_val=-1"),
    ("trainer.limit_val_batches=0", r"trainer\.limit_val_batches=0"),
    ("seed=-1", r"seed=-1"),
    ("evaluation.temperatures=[nan]", r"evaluation\.temperatures"),
    ("ckpt_path=README.md", r"README\.md: is not a checkpoint"),
    ("optimizer.warmup=1", r"optimizer\.warmup=1"),
    ("optimizer.betas=[0.9]", r"optimizer\.betas"),
    ("data.row_tokens=500", r"data\.row_tokens=500"),
    ("data.rows_per_batch=0", r"data\.rows_per_batch=0"),
    ("data.response_tokens=1", r"data\.response_tokens=1"),
    ("data.response_tokens=4000", r"positions for 2048"),
    ("data.temperature=-1", r"data\.temperature=-1"),
    ("objective.labels=both", r"objective\.labels='both'"),
    ("objective.temperature=0", r"objective\.temperature=0"),
    ("objective.capacity=0", r"objective\.capacity=0"),
    ("objective.capacity=0.5", r"objective\.capacity=0\.5: only the kernels of a GPU"),
    ("data.prompts=/no/such.jsonl", r"data\.prompts='/no/such\.jsonl'"),
    ("data.kind=poems", r"data\.kind='poems'"),
    ("data=chat", r"data\.path: data=chat needs"),
    ("data=chat data.path=/no/such.jsonl data.row_tokens=256 data.response_tokens=200", r"data\.path='/no/such\.jsonl'"),
    ("data=chat data.path=x.jsonl data.response_tokens=200", r"data\.row_tokens=3072: the target has positions for 2048"),
    ("data.kind=chat data.path=x.jsonl data.thinking=perhaps", r"data\.thinking='perhaps'"),
    ("data.kind=chat data.path=x.jsonl data.thinking_argument=a-b", r"data\.thinking_argument='a-b'"),
    ("data.kind=chat data.path=x.jsonl +data.columns.talk=x", r"data\.columns: there is no column 'talk'"),
    ("data.kind=chat data.path=x.jsonl data.skip_limit=-1", r"data\.skip_limit=-1"),
    ("data.kind=chat data.path=x.jsonl data.long=cut", r"data\.long='cut'"),
    ("data.kind=chat data.path=x.jsonl data.workers=0", r"data\.workers=0"),
    ("data.held_out_share=1", r"data\.held_out_share=1"),
    ("target.path=/no/such/model", r"target\.path='/no/such/model'"),
    ("target.dtype=int3", r"target\.dtype='int3'"),
    ("trainer.max_steps=0", r"trainer\.max_steps=0"),
    ("trainer.accelerator=tpu", r"trainer\.accelerator='tpu'"),
    ("placement.targets=2", "only|placement=split"),
    ("placement.kind=elsewhere", "colocated or split"),
    ("placement.kind=split", r"placement\.targets=0"),
    ("placement.drafters=0", r"placement\.drafters=0"),
    ("placement.hosts=0", r"placement\.hosts=0"),
    ("placement.prefetch=-1", r"placement\.prefetch=-1"),
    ("placement.timeout_s=0", r"placement\.timeout_s=0"),
    ("placement.tolerate=1", r"placement\.tolerate=1"),
    ("trainer.precision=16-mixed", r"trainer\.precision='16-mixed'"),
    ("evaluation.tree_budgets=[0]", r"evaluation\.tree_budgets"),
    ("evaluation.budgets=[0]", r"evaluation\.budgets=\[0\]"),
    ("evaluation.budgets=[16,16]", r"evaluation\.budgets=\[16, 16\]: give different budgets"),
    ("evaluation.temperatures=[-1]", r"evaluation\.temperatures"),
    ("ckpt_path=/no/such.ckpt", r"ckpt_path='/no/such\.ckpt'"),
]


@pytest.mark.parametrize(("override", "says"), IMPOSSIBLE, ids=[o for o, _ in IMPOSSIBLE])
def test_impossible_combinations_name_their_key(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        planned(*override.split())
    assert "\n" not in str(caught.value)


def test_mask_token_without_a_reserved_one(tmp_path: Path) -> None:
    """A tokenizer without mask token: the first id that it never makes; none left is an error."""
    import json
    import shutil

    from dflash_lit.target import embedded

    source = Path(next(iter(embedded.__path__)))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)

    def edit(name: str, **changes: Any) -> None:
        path = tmp_path / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("mask_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"drafter\.mask_token_id: the tokenizer has no mask token"):
        planned(f"target.path={tmp_path}")
    edit("config.json", vocab_size=640)
    assert planned(f"target.path={tmp_path}").drafter.mask_token_id == 512


def test_the_experiment_for_trees_trains_soft_labels_and_keeps_the_best_tree() -> None:
    cfg = configured("+experiment=ddtree")
    objective = make_plan(cfg).objective
    assert (objective.labels, objective.weights, objective.temperature) == ("soft", "dpace", cfg.data.temperature)
    assert make_plan(cfg).drafter.path_width == 256
    assert cfg.callbacks["checkpoint"]["monitor"] == "auto"
    assert 64 in cfg.evaluation.tree_budgets
    assert configured("+experiment=ddtree", "objective.weights=tree_survival").objective.weights == "tree_survival"


def test_a_wrong_floor_is_one_line() -> None:
    with pytest.raises(UserError, match=r"objective\.floor=0: "):
        planned("objective=tree_survival", "objective.floor=0")


def test_noise_cannot_be_negative() -> None:
    with pytest.raises(UserError, match=r"drafter\.feature_noise=-1: "):
        planned("drafter.feature_noise=-1")


def test_with_a_window_all_layers_slide_but_the_last() -> None:
    plan = planned("drafter.sliding_window=64", "drafter.layers=3")
    assert plan.drafter.layer_types == ("sliding_attention", "sliding_attention", "full_attention")
    assert planned("drafter.sliding_window=64", "drafter.layer_types=[full_attention,sliding_attention]").drafter.slides
    assert not planned().drafter.slides
    with pytest.raises(UserError, match=r"drafter\.sliding_window=4: .*at least a block"):
        planned("drafter.sliding_window=4")
