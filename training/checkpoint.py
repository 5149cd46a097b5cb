"""What is kept between two calls: full state to go on from exactly, and small files to ship.

A checkpoint is one safetensors file with every buffer, and with the step, the seconds spent and
the settings in its header. It is replaced in one move, so that a killed run leaves the last whole
one. Weights for export are the averaged ones in 16 bit, in files small enough to carry.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

MODEL = "model.json"
LARGEST = 15_000_000  # bytes in one weight file


class Described(Protocol):
    """Settings that can be written into a checkpoint and compared with those of another."""

    def to_json(self) -> str: ...

    @staticmethod
    def from_json(text: str) -> Any: ...


@dataclass
class Progress:
    """How far a stage has come."""

    step: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    done: bool = False


def save(path: Path, state: dict[str, Tensor], progress: Progress, settings: Described) -> None:
    """Write a checkpoint whole or not at all."""
    header = {"progress": json.dumps(vars(progress)), "settings": settings.to_json()}
    scratch = path.with_suffix(".part")
    save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, scratch, header)
    os.replace(scratch, path)


def load(path: Path, settings: Described) -> tuple[dict[str, Tensor], Progress] | None:
    """The checkpoint at `path`, or None when there is none; other settings are refused."""
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        header = file.metadata()
    if type(settings).from_json(header["settings"]) != settings:
        raise ValueError(
            f"{path} was made with {header['settings']}, this run has {settings.to_json()}: "
            "give the same settings, or another --out"
        )
    return load_file(path), Progress(**json.loads(header["progress"]))


def rounding(weights: dict[str, Tensor], dtype: torch.dtype) -> float:
    """Relative error of storing the weights in `dtype`; infinite where it overflows."""
    lost = sum((w - w.to(dtype).float()).square().sum().item() for w in weights.values())
    total = sum(w.square().sum().item() for w in weights.values())
    error = (lost / max(total, 1e-30)) ** 0.5
    return error if error == error else float("inf")


def write_weights(
    folder: Path, flow: dict[str, Tensor] | None, vae: dict[str, Tensor], model: dict[str, object]
) -> None:
    """The averaged weights in the 16-bit type that loses less, and what they are, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    every = {**{f"vae.{k}": v for k, v in vae.items()}, **(flow or {})}
    every = {k: v.detach().float().cpu() for k, v in every.items()}
    errors = {name: rounding(every, getattr(torch, name)) for name in ("float16", "bfloat16")}
    best = min(errors, key=lambda name: errors[name])
    part: dict[str, Tensor] = {}
    size = number = 0
    for name, weight in every.items():
        stored = weight.to(getattr(torch, best)).contiguous()
        if part and size + stored.nbytes > LARGEST:
            number, size = number + 1, 0
            save_file(part, folder / f"weights-{number}.safetensors")
            part = {}
        part[name], size = stored, size + stored.nbytes
    save_file(part, folder / f"weights-{number + 1}.safetensors")
    about = {**model, "dtype": best, "rounding": errors}
    (folder / MODEL).write_text(json.dumps(about, indent=1) + "\n")


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """All weights of such a folder by name, in float32, and the description beside them."""
    files = sorted(folder.glob("weights-*.safetensors"))
    if not files or not (folder / MODEL).is_file():
        raise FileNotFoundError(
            f"{folder} holds no weights-*.safetensors and {MODEL}: `python -m training.train` "
            "writes them to RUN/weights at the end of each call"
        )
    weights = {k: v.float() for file in files for k, v in load_file(file).items()}
    return weights, json.loads((folder / MODEL).read_text())
