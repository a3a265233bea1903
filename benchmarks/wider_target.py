"""A copy of a small target that says the same and costs as much as a large one: to time drafts with real lengths of acceptance.

    python benchmarks/wider_target.py TARGET OUT --gib 8
    dflash-lit evaluate DRAFTER --target OUT

The layers' MLPs get zeros as further neurons: silu(0) * 0 times 0 adds nothing to what the target says, but reading those weights
takes as long as reading any others. A drafter trained for the small target then meets rounds that cost what a large target's cost,
with the lengths that it reaches in truth. What a drafter of the usual size for so large a target would cost is not in it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def widen(model: nn.Module, intermediate: int) -> None:
    """Zeros behind the neurons of every ``mlp``, in place.

    Raises:
        ValueError: if the MLPs are no gated ones without biases, or wider already.
    """
    for layer in model.get_decoder().layers:  # type: ignore[operator]
        mlp = layer.mlp
        parts = {name: getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")}
        if not all(isinstance(part, nn.Linear) and part.bias is None for part in parts.values()):
            raise ValueError(
                f"{type(mlp).__name__}: only MLPs of gate_proj, up_proj and down_proj without biases can be widened"
            )
        for name, part in parts.items():
            old = part.weight.data
            shape = (old.shape[0], intermediate) if name == "down_proj" else (intermediate, old.shape[1])
            if old.shape[0] > shape[0] or old.shape[1] > shape[1]:
                raise ValueError(f"{intermediate} neurons are fewer than there are")
            new = torch.zeros(shape, dtype=old.dtype)
            new[: old.shape[0], : old.shape[1]] = old
            part.weight = nn.Parameter(new, requires_grad=False)
            part.out_features, part.in_features = shape


def neurons_for(config: object, gib: float, bytes_each: int) -> int:
    """Neurons a layer, a multiple of 128, at which all MLPs have ``gib`` GiB of weights."""
    per_neuron = 3 * config.hidden_size * config.num_hidden_layers * bytes_each  # type: ignore[attr-defined]
    return max(round(gib * 2**30 / per_neuron / 128) * 128, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="Hugging Face folder")
    parser.add_argument("out", type=Path, help="folder of the copy")
    parser.add_argument("--gib", type=float, default=8.0, help="weights of all MLPs in bf16 (default: %(default)s)")
    args = parser.parse_args()

    config = AutoConfig.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16)
    intermediate = neurons_for(config, args.gib, 2)
    widen(model, intermediate)
    model.config.intermediate_size = intermediate
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.target).save_pretrained(args.out)
    print(f"{args.out}: {intermediate} neurons a layer, {sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion weights")


if __name__ == "__main__":
    main()
