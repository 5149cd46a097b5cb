"""The models of the GPU benchmarks, their inputs, and how time and memory are taken.

The transformers are of full size with random weights: what they draw means nothing, what they cost is what the
published ones cost. Weights, latents and text come from seeded streams on the host, so that a model has the same bits
on every device, and an offloaded one can be compared with a resident one.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
import json
import mmap
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from samovar.core.tensor_parts import plainly, take_apart
from samovar.offload.layout import held_by

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # For what stands for a graph on a CPU.

Call = Callable[[], object]

FILES = ("--json", "--profile", "--state")
"""Options that say where a result is written, which is no part of how it was made."""

PERIOD = 16_777_259
"""Random numbers drawn for a model, a prime, so that no two rows or layers take the same ones in the same order."""
_HUGE = 2**21
"""Bytes of a huge page."""


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
    latents: tuple[int, ...] = ()
    """Channels, frames, height and width of the sample, if it is no row of tokens."""


_TINY_FLUX = {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "joint_attention_dim": 64,
              "pooled_projection_dim": 32, "guidance_embeds": True}  # fmt: skip
_TINY_QWEN = {"num_layers": 4, "num_attention_heads": 2, "joint_attention_dim": 64}
# Where a configuration is empty below, the defaults of the class are those of the published model: Qwen/Qwen-Image,
# black-forest-labs/FLUX.2-dev, Wan-AI/Wan2.1-T2V-14B (and each half of Wan2.2-T2V-A14B) and
# hunyuanvideo-community/HunyuanVideo. FLUX.1-dev differs by guidance_embeds; for SD3.5 see transformer/config.json of
# stabilityai/stable-diffusion-3.5-large.
_SD35_LARGE = {"sample_size": 128, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
               "pos_embed_max_size": 192, "qk_norm": "rms_norm"}  # fmt: skip
_TINY_SD3 = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 3, "num_attention_heads": 4,
             "joint_attention_dim": 64, "caption_projection_dim": 256, "pooled_projection_dim": 32,
             "pos_embed_max_size": 16, "qk_norm": "rms_norm"}  # fmt: skip
_TINY_HUNYUAN = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "num_layers": 2, "num_single_layers": 2,
                 "num_refiner_layers": 1, "text_embed_dim": 64, "pooled_projection_dim": 32}  # fmt: skip
_TINY_WAN = {"num_attention_heads": 2, "in_channels": 4, "out_channels": 4, "text_dim": 64, "ffn_dim": 256,
             "num_layers": 3}  # fmt: skip
_TINY_FLUX2 = {"in_channels": 64, "num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2,
               "joint_attention_dim": 64}  # fmt: skip
_VIDEO, _TINY_VIDEO = (16, 9, 60, 104), (4, 3, 8, 8)
"""33 frames of 832 x 480."""
_FULL = {
    "flux": Spec("FLUX.1 12B", "FluxTransformer2DModel", {"guidance_embeds": True}, 64, 512, 4096, 768),
    "qwen": Spec("Qwen-Image 20B", "QwenImageTransformer2DModel", {}, 64, 128, 3584),
    "sd35": Spec("SD3.5-large 8B", "SD3Transformer2DModel", _SD35_LARGE, 64, 333, 4096, 2048, (16, 128, 128)),
    "hunyuan": Spec("HunyuanVideo 13B", "HunyuanVideoTransformer3DModel", {}, 0, 256, 4096, 768, _VIDEO),
    "wan": Spec("Wan 14B", "WanTransformer3DModel", {}, 0, 512, 4096, 0, _VIDEO),
    "flux2": Spec("FLUX.2 32B", "Flux2Transformer2DModel", {}, 64, 512, 15360),
}
_TINY = {
    "flux": Spec("FLUX.1 tiny", "FluxTransformer2DModel", _TINY_FLUX, 8, 16, 64, 32),
    "qwen": Spec("Qwen-Image tiny", "QwenImageTransformer2DModel", _TINY_QWEN, 8, 16, 64),
    "sd35": Spec("SD3.5 tiny", "SD3Transformer2DModel", _TINY_SD3, 8, 16, 64, 32, (4, 16, 16)),
    "hunyuan": Spec("HunyuanVideo tiny", "HunyuanVideoTransformer3DModel", _TINY_HUNYUAN, 0, 16, 64, 32, _TINY_VIDEO),
    "wan": Spec("Wan tiny", "WanTransformer3DModel", _TINY_WAN, 0, 16, 64, 0, _TINY_VIDEO),
    "flux2": Spec("FLUX.2 tiny", "Flux2Transformer2DModel", _TINY_FLUX2, 8, 16, 64),
}
NAMES = ("flux", "qwen")


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
    _rebuild_tables(model)
    persistent = model.state_dict().keys()
    tables = {path: buffer.to(device, dtype if path in persistent else None) for path, buffer in model.named_buffers()}
    model = model.to(dtype)
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for path, parameter in model.named_parameters():
        if kept.intersection(path.split(".")):
            parameter.data = parameter.data.float()
    model = model.to_empty(device=device)
    for path, table in tables.items():
        owner, _, name = path.rpartition(".")
        model.get_submodule(owner)._buffers[name] = table
    stream = (torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype).to(device)
    position = 0
    for path, parameter in model.named_parameters():
        use_huge_pages(parameter)
        if parameter.ndim == 1:  # Scales of norms, and biases.
            parameter.fill_(1.0 if path.endswith("weight") else 0.0)
        else:
            position = fill(parameter.view(-1), stream, position)
    left = [path for path, module in model.named_modules() if any(map(_is_meta, _held(module)))]
    if left:
        raise RuntimeError(f"{which.model} keeps tensors in {left} that build() does not know how to make.")
    return model.eval().requires_grad_(False)


def _held(module: torch.nn.Module) -> list[object]:
    return [*vars(module).values(), *module._buffers.values()]


def _rebuild_tables(model: torch.nn.Module) -> None:
    """Tables of positions are computed, not loaded: make the modules that hold them again on the host."""
    for path, module in list(model.named_children()):
        if any(map(_is_meta, _held(module))):
            known = dict(getattr(model, "config", {})) | vars(module)
            if isinstance(getattr(module, "proj", None), torch.nn.Conv2d):  # diffusers' PatchEmbed
                side = known["sample_size"]
                known |= {"height": side, "width": side, "embed_dim": module.proj.out_channels}
            setattr(model, path, type(module)(**{k: known[k] for k in parameters_of(type(module)) if k in known}))


def parameters_of(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


def to_host(model: torch.nn.Module) -> None:
    """Move a model from the device. Memory of the usual small pages would take five times as long."""
    plain, wrappers, _ = take_apart(held_by(model))

    @plainly
    @torch.no_grad()
    def move(tensor: torch.Tensor) -> None:
        target = torch.empty_like(tensor, device="cpu")
        use_huge_pages(target)
        tensor.data = target.copy_(tensor.detach())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(move, plain))
    for wrapper in wrappers:
        plainly(wrapper.follow)()


def use_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages for memory that nobody has touched yet; nothing depends on whether there are any."""
    start, end = -(-tensor.data_ptr() // _HUGE) * _HUGE, tensor.data_ptr() + tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" and end > start and hasattr(mmap, "MADV_HUGEPAGE"):
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t((end - start) // _HUGE * _HUGE), mmap.MADV_HUGEPAGE)


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def fill(flat: torch.Tensor, stream: torch.Tensor, position: int) -> int:
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
    batch: int = 1,
) -> dict[str, Any]:
    """The arguments of one forward, as the model's pipeline gives them for one guidance branch."""
    which = spec(name, tiny=tiny)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).expand(batch, *shape[1:]).contiguous()

    def each(value: float, kind: torch.dtype | None = None) -> torch.Tensor:
        return torch.full((batch,), value, device=device, dtype=kind)

    channels = which.config.get("in_channels", {"flux2": 128}.get(name, 64))
    found = {
        "hidden_states": random(1, *(which.latents or (which.side**2, channels))),
        "encoder_hidden_states": random(1, which.text_tokens, which.text_width),
        "timestep": each(timestep, dtype),
        "return_dict": False,
    }
    if which.pooled_width:
        found["pooled_projections"] = random(1, which.pooled_width)
    if name == "qwen":  # Its pipeline gives no mask where no token is padding.
        return found | {"encoder_hidden_states_mask": None, "img_shapes": [[(1, which.side, which.side)]] * batch}
    if name in ("sd35", "wan"):
        return found | {"timestep": each(timestep * 1000, torch.float32 if name == "sd35" else torch.int64)}
    if name == "hunyuan":
        mask = torch.ones(batch, which.text_tokens, device=device, dtype=torch.int64)
        times = {"timestep": each(timestep * 1000, dtype), "guidance": each(6000.0, dtype)}
        return found | times | {"encoder_attention_mask": mask}
    places = torch.zeros(which.side, which.side, 4 if name == "flux2" else 3)
    places[..., 1] = torch.arange(which.side)[:, None]
    places[..., 2] = torch.arange(which.side)[None, :]
    return found | {
        "guidance": each(3.5),
        "img_ids": places.view(-1, places.shape[-1]).to(device, dtype),
        "txt_ids": torch.zeros(which.text_tokens, places.shape[-1], device=device, dtype=dtype),
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
    new = path.with_name(f"{path.name}.new")  # A run that is ended half-way leaves what was there.
    new.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
