"""Which models do the GPU benchmarks run, with what input, and how are time and memory taken?

The transformers are of full size with random weights: what they draw means nothing, what they cost is what the
published ones cost. Weights, latents and text come from seeded streams on the host, so that a model has the same bits
on every device, and an offloaded one can be compared with a resident one.
"""

from __future__ import annotations

import copy
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]

FILES = ("--json", "--profile")
"""Options that say where a result is written, which is no part of how it was made."""

PERIOD = 16_777_259
"""Random numbers drawn for a model, a prime, so that no two rows or layers take the same ones in the same order."""


@dataclass(frozen=True)
class Spec:
    """One model: its class in diffusers, its configuration, and the size of its input."""

    title: str
    model: str
    config: Mapping[str, Any]
    side: int
    """Image tokens are side x side: 64 for a picture of 1024 x 1024."""
    text_tokens: int
    text_width: int
    pooled_width: int = 0


_TINY_FLUX = {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "joint_attention_dim": 64,
              "pooled_projection_dim": 32, "guidance_embeds": True}  # fmt: skip
_TINY_QWEN = {"num_layers": 4, "num_attention_heads": 2, "joint_attention_dim": 64}
_FULL = {
    "flux": Spec("FLUX.1 12B", "FluxTransformer2DModel", {"guidance_embeds": True}, 64, 512, 4096, 768),
    "qwen": Spec("Qwen-Image 20B", "QwenImageTransformer2DModel", {}, 64, 128, 3584),
}
_TINY = {
    "flux": Spec("FLUX.1 tiny", "FluxTransformer2DModel", _TINY_FLUX, 8, 16, 64, 32),
    "qwen": Spec("Qwen-Image tiny", "QwenImageTransformer2DModel", _TINY_QWEN, 8, 16, 64),
}
NAMES = tuple(_FULL)


def spec(name: str, *, tiny: bool = False) -> Spec:
    """The model of that name, at full size or small enough for a CPU."""
    return (_TINY if tiny else _FULL)[name]


# ------------------------------------------------------------------------------------------------ models and inputs


@torch.no_grad()
def build(
    name: str, device: str | torch.device = "cuda", dtype: torch.dtype = torch.bfloat16, *, tiny: bool = False
) -> torch.nn.Module:
    """The model in eval mode on a device, which may be the host; seconds at full size, the same bits everywhere."""
    import diffusers

    which = spec(name, tiny=tiny)
    with torch.device("meta"):
        model: torch.nn.Module = getattr(diffusers, which.model)(**which.config)
    _rebuild_rope(model)
    model = model.to(dtype).to_empty(device=device)
    stream = (torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype).to(device)
    position = 0
    for path, parameter in model.named_parameters():
        if parameter.ndim == 1:  # Scales of norms, and biases.
            parameter.fill_(1.0 if path.endswith("weight") else 0.0)
        else:
            position = _fill(parameter.view(-1), stream, position)
    left = [path for path, module in model.named_modules() if any(_is_meta(value) for value in vars(module).values())]
    left += [path for path, _ in model.named_buffers()]
    if left:
        raise RuntimeError(f"{which.model} keeps tensors in {left} that build() does not know how to make.")
    return model.eval().requires_grad_(False)


def _rebuild_rope(model: torch.nn.Module) -> None:
    """Tables that are plain tensors, not buffers, are not made by `to_empty`: make that module again on the host."""
    for path, module in list(model.named_children()):
        if any(_is_meta(value) for value in vars(module).values()):
            made_of = {key: value for key, value in vars(module).items() if key in ("theta", "axes_dim", "scale_rope")}
            setattr(model, path, type(module)(**made_of))


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _fill(flat: torch.Tensor, stream: torch.Tensor, position: int) -> int:
    """Fill a tensor from the endless repetition of the stream, from a position on; returns the next position."""
    done = 0
    while done < flat.numel():
        count = min(flat.numel() - done, PERIOD - position)
        flat[done : done + count].copy_(stream[position : position + count])
        done, position = done + count, (position + count) % PERIOD
    return position


def twin(model: torch.nn.Module) -> torch.nn.Module:
    """A second model over the same parameters, so that one may be hooked while the other stays bare."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def inputs(
    name: str,
    device: str | torch.device = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    *,
    tiny: bool = False,
    timestep: float = 0.7,
) -> dict[str, Any]:
    """The arguments of one forward, as the model's pipeline gives them for one picture and one guidance branch."""
    which = spec(name, tiny=tiny)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    found = {
        "hidden_states": random(1, which.side**2, 64),
        "encoder_hidden_states": random(1, which.text_tokens, which.text_width),
        "timestep": torch.tensor([timestep], device=device, dtype=dtype),
        "return_dict": False,
    }
    if which.model == "QwenImageTransformer2DModel":  # Its pipeline gives no mask where no token is padding.
        return found | {"encoder_hidden_states_mask": None, "img_shapes": [[(1, which.side, which.side)]]}
    places = torch.zeros(which.side, which.side, 3)
    places[..., 1] = torch.arange(which.side)[:, None]
    places[..., 2] = torch.arange(which.side)[None, :]
    return found | {
        "pooled_projections": random(1, which.pooled_width),
        "guidance": torch.tensor([3.5], device=device),
        "img_ids": places.view(-1, 3).to(device, dtype),
        "txt_ids": torch.zeros(which.text_tokens, 3, device=device, dtype=dtype),
    }


# ------------------------------------------------------------------------------------------------ time


def synchronise(device: str | torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def once_ms(call: Call, device: str | torch.device) -> float:
    """Milliseconds of one call, from an idle device to an idle device."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return (time.perf_counter() - start) * 1e3


@torch.no_grad()
def times_ms(call: Call, device: str | torch.device, repeats: int, warm: int = 2) -> list[float]:
    """Milliseconds of each of many calls, after some that do not count."""
    for _ in range(warm):
        call()
    return [once_ms(call, device) for _ in range(repeats)]


@torch.no_grad()
def paired_ms(
    base: Call, others: Mapping[str, Call], device: str | torch.device, repeats: int, warm: int = 2
) -> dict[str, list[tuple[float, float]]]:
    """Each call beside the base call, now before and now after it, so that a drift moves both: (base, other) in ms."""
    for call in (base, *others.values()):
        for _ in range(warm):
            call()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in others}
    for repeat in range(repeats):
        for name, call in others.items():
            if repeat % 2:
                second = once_ms(call, device)
                pairs[name].append((once_ms(base, device), second))
            else:
                pairs[name].append((once_ms(base, device), once_ms(call, device)))
    return pairs


def summary(values: list[float], digits: int = 3) -> dict[str, float]:
    """The median, the quartiles and the extremes."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    named = {"median": middle, "quarter": low, "three_quarters": high, "least": min(values), "most": max(values)}
    return {key: round(value, digits) for key, value in named.items()} | {"repeats": len(values)}


def overhead_percent(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """What the second of each pair takes more than the first, in percent of it."""
    return summary([(other / base - 1) * 100 for base, other in pairs])


# ------------------------------------------------------------------------------------------------ memory


def allocated_bytes(device: str | torch.device) -> int:
    """What tensors hold on the device now, without what nothing refers to; 0 where torch does not count it."""
    if torch.device(device).type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@torch.no_grad()
def peak_bytes(call: Call, device: str | torch.device) -> int:
    """The most that tensors held on the device during a call, the model included; 0 where torch does not count it."""
    if torch.device(device).type != "cuda":
        call()
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def mib(count: int) -> float:
    return round(count / 2**20, 2)


# ------------------------------------------------------------------------------------------------ results


def header(device: str | torch.device, *packages: str) -> dict[str, Any]:
    """What a result begins with: the command, the day, the device and the versions."""
    is_cuda = torch.device(device).type == "cuda"
    files = {index for index, word in enumerate(sys.argv) if word in FILES or sys.argv[index - 1] in FILES}
    options = [word for index, word in enumerate(sys.argv) if index and index not in files]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *options])
    about: dict[str, Any] = {"command": command, "date": date.today().isoformat()}
    about["device"] = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
    about |= {"python": platform.python_version(), "torch": torch.__version__}
    return about | {name: version(name) for name in ("diffusers", "transformers", *packages)}


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
