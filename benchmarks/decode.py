"""What the rounds of plain, chain and tree decoding cost on one GPU: a line of JSON.

    python benchmarks/decode.py --shape 8b

A target of Qwen3-8B's shape in bf16 and a drafter of the published one's, both with random weights: what a round costs does not
depend on them, and how long its drafts are accepted says nothing here. So no lengths are given, but what they would have to be:
a tree is faster than the chain if tau_tree / tau_chain is above ``break_even_chain``, and than plain decoding if tau_tree is above
``break_even_plain``. Times are medians, at batch 1 behind a context of fixed length. ``round_ms`` ends with what the host has to
know before it goes on; ``stage_ms`` are of rounds with a wait at the border of each stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import qwen3_8b
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_lit.compilation.cache import use_cache
from dflash_lit.decode.acceptance import MeasuredTarget
from dflash_lit.decode.chain import ChainDraft, choose, settle_chain
from dflash_lit.decode.proposer import Draft, ProposingDrafter, Settle, proposer_of
from dflash_lit.decode.stages import STAGES, Stages, Timing, untimed
from dflash_lit.decode.static_drafter import static_pair
from dflash_lit.decode.tree import TreeDraft, settle_tree
from dflash_lit.drafter.config import DrafterConfig
from dflash_lit.drafter.model import Drafter
from dflash_lit.options import natural, naturals
from dflash_lit.target.frozen import EMBEDDED, FrozenTarget, TargetInfo


def random_target(config: DrafterConfig, layers: int, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
    """A Qwen3 of the sizes of ``config``."""
    described = Qwen3Config(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with device:
        model = AutoModelForCausalLM.from_config(described, dtype=dtype, attn_implementation="sdpa")
    return FrozenTarget(TargetInfo("random", described, TargetInfo.load(EMBEDDED).tokenizer), model.to(device), compile=False)


class Bench:
    """Rounds behind a text that stays as it is: nothing is ever accepted, and all is computed as if it were.

    Args:
        target, drafter: both sides.
        context: tokens of the text.
        steps: timed rounds.
    """

    def __init__(self, target: MeasuredTarget, drafter: Drafter | ProposingDrafter, context: int, steps: int) -> None:
        self.target, self.drafter, self.context, self.steps = target, drafter, context, steps
        generator = torch.Generator().manual_seed(0)
        self.text = torch.randint(0, 500, (1, context), generator=generator).to(target.device)

    def plain(self) -> dict[str, Any]:
        reader = self.target.reader(())
        reader.read_prompts(self.text, [self.context])
        ids = self.text[:, :1]

        def step(stages: Timing) -> None:
            logits, _ = reader.read(ids, last_only=True)
            int(choose(logits, 0.0, None))
            reader.forget(1)

        return {"round_ms": self._median(step)}

    def drafted(self, draft: Draft, settle: Settle) -> dict[str, Any]:
        reader = self.target.reader(self.drafter.config.target_layer_ids)
        _, features = reader.read_prompts(self.text, [self.context])
        assert features is not None
        proposer = proposer_of(self.drafter, self.target.ends(), 1)
        proposer.remember(features, [self.context])
        anchors = self.text[:, -1].clone()

        def step(stages: Timing) -> None:
            drafts = proposer.propose(draft, anchors, stages)
            with stages("verify"):
                if drafts.tree is None:
                    logits, features = reader.read(drafts.tokens)
                else:
                    logits, features = reader.read_tree(drafts.tokens, drafts.depths, drafts.sees)
                chosen = choose(logits, 0.0, None)
            with stages("commit"):
                settled = proposer.settle(settle, drafts, chosen)
                settled.packed.tolist()
                assert features is not None
                kept: Tensor = features
                if drafts.tree is None:
                    reader.forget(drafts.tokens.shape[1])
                else:
                    reader.keep(settled.rows, [0])
                    kept = features.gather(1, settled.rows[..., None].expand(-1, -1, features.shape[2]))
                proposer.remember(kept, [0])

        return {"round_ms": self._median(step), "stage_ms": self._stages(step)}

    def _median(self, step: Callable[[Timing], None]) -> float:
        for _ in range(5):
            step(untimed)
        times = []
        for _ in range(self.steps):
            self._wait()
            began = time.perf_counter()
            step(untimed)
            self._wait()
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times)

    def _stages(self, step: Callable[[Timing], None]) -> dict[str, float]:
        found = []
        for number in range(self.steps + 5):
            stages = Stages(self.target.device)
            step(stages)
            if number >= 5:
                found.append(stages.milliseconds())
        return {name: statistics.median(times[name] for times in found) for name in STAGES}

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--layers", type=natural, help="of the target (default: 36, tiny: 6)")
    parser.add_argument("--budgets", type=naturals, default=[16, 64, 128, 256, 512], help="(default: 16,64,128,256,512)")
    parser.add_argument("--block-size", type=natural, default=16)
    parser.add_argument("--context", type=natural, default=1024, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--steps", type=natural, default=50, help="timed rounds of each kind (default: %(default)s)")
    parser.add_argument("--backend", choices=("inductor", "none"), help="of the layers (default: inductor on a GPU, else none)")
    parser.add_argument("--eager", action="store_true", help="growing caches, nothing compiled or captured: to compare with")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.shape == "8b" and device.type != "cuda":
        parser.error("--shape 8b needs a CUDA device; try --shape tiny")
    torch.manual_seed(0)
    config = qwen3_8b(args.block_size, tiny=args.shape == "tiny")
    whole = random_target(config, args.layers or config.num_target_layers, device, dtype)
    with device:
        drafter = Drafter(config).to(device, dtype).eval()
    target: MeasuredTarget = whole
    sides: Drafter | ProposingDrafter = drafter
    backend = {"inductor": "inductor", "none": None, None: "inductor" if device.type == "cuda" else None}[args.backend]
    if not args.eager:
        if device.type == "cuda":
            use_cache()
        target, sides = static_pair(
            whole, drafter, longest_prompt=args.context, max_new_tokens=0, budgets=args.budgets, backend=backend
        )
    bench = Bench(target, sides, args.context, args.steps)

    began = time.perf_counter()
    plain = bench.plain()
    chain = bench.drafted(ChainDraft(), settle_chain)
    trees = {budget: bench.drafted(TreeDraft(budget), settle_tree) for budget in args.budgets}
    chain["break_even_plain"] = chain["round_ms"] / plain["round_ms"]
    for tree in trees.values():
        tree["break_even_chain"] = tree["round_ms"] / chain["round_ms"]
        tree["break_even_plain"] = tree["round_ms"] / plain["round_ms"]
    # Of a pass: the weights of all layers and of the head; not the embedding, of which one row a token is read.
    read = sum(p.numel() * p.element_size() for p in whole.model.parameters()) - whole.ends().embed.numel() * dtype.itemsize
    line = {
        "shape": args.shape,
        "decoding": "eager"
        if args.eager
        else f"static, backend {backend}, {'CUDA graphs' if device.type == 'cuda' else 'no graphs'}",
        "context": args.context,
        "block_size": args.block_size,
        "plain": plain,
        "chain": chain,
        "trees": trees,
        "weights_gib": read / 2**30,
        "plain_tb_s": read / plain["round_ms"] / 1e9,
        "steps": args.steps,
        "seconds": time.perf_counter() - began,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    print(json.dumps(rounded(line)))


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    return {name: rounded(part) for name, part in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
