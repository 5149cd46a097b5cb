"""Tiny LoRA adapters, made as their users make them: by diffusers for a pipeline, by peft for a transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TARGETS = {"pixel": ["to_q", "to_v"], "ink": ["to_k", "proj_mlp", "norm1.linear"]}
"""The layers that each adapter is for: other ones, so that nothing of one can pass for the other's."""


def save_adapter(pipe: Any, folder: Path, targets: list[str], seed: int = 1, rank: int = 2) -> Path:
    """An adapter for a pipeline, which is left as it was."""
    from peft import LoraConfig, get_peft_model_state_dict

    config = LoraConfig(r=rank, lora_alpha=rank + 1, target_modules=targets, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipe.transformer.add_adapter(config)
    weights = get_peft_model_state_dict(pipe.transformer)
    pipe.save_lora_weights(folder, weights, transformer_lora_adapter_metadata=config.to_dict())
    pipe.unload_lora_weights()
    return folder


def save_adapters(pipe: Any, folder: Path) -> dict[str, str]:
    """Those of `TARGETS`, by name."""
    return {
        name: str(save_adapter(pipe, folder / name, targets, seed, rank=seed + 1))
        for seed, (name, targets) in enumerate(TARGETS.items(), 1)
    }
