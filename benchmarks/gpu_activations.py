"""The memory that `plan` counts beside the weights, compared with what a forward takes on a GPU.

    python benchmarks/gpu_activations.py --json benchmarks/results/gpu_activations.json
    python benchmarks/gpu_activations.py --only flux vae      # some of them
    python benchmarks/gpu_activations.py --count              # only what is counted; needs no GPU

Models are of full size with uninitialised weights. A forward with the arguments that the count was made with runs once
to warm up and once to measure the peak of torch's allocator, less the weights and the arguments. Beside it is what is
estimated for a class that nobody calls.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samovar.arch.skeleton import Part
from samovar.core import nested
from samovar.trace.activations import estimate
from samovar.trace.dry_run import RequestSize
from samovar.trace.meta_mode import MetaCopier, MetaMode

MIB = 2**20
_SD35 = {
    "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
    "qk_norm": "rms_norm", "sample_size": 128,
}  # fmt: skip
_FLUX_VAE = {
    "block_out_channels": [128, 256, 512, 512], "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": 16,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip


def latents(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def flux(side: int) -> dict[str, Any]:
    tokens = (side // 16) ** 2
    return {"hidden_states": latents(1, tokens, 64), "encoder_hidden_states": latents(1, 512, 4096),
            "pooled_projections": latents(1, 768), "timestep": torch.ones(1), "guidance": torch.ones(1),
            "img_ids": torch.zeros(tokens, 3), "txt_ids": torch.zeros(512, 3)}  # fmt: skip


def wan(height: int, width: int) -> dict[str, Any]:
    return {"hidden_states": latents(1, 16, 21, height // 8, width // 8), "timestep": torch.full((1,), 500),
            "encoder_hidden_states": latents(1, 512, 4096)}  # fmt: skip


_QWEN = {"hidden_states": latents(1, 4096, 64), "encoder_hidden_states": latents(1, 512, 3584),
         "encoder_hidden_states_mask": torch.ones(1, 512, dtype=torch.bool), "timestep": torch.ones(1),
         "img_shapes": [[(1, 64, 64)]]}  # fmt: skip
_SD35_CALL = {"hidden_states": latents(2, 16, 128, 128), "encoder_hidden_states": latents(2, 333, 4096),
              "pooled_projections": latents(2, 2048), "timestep": torch.full((2,), 500.0)}  # fmt: skip
_HUNYUAN = {"hidden_states": latents(1, 16, 16, 90, 160), "encoder_hidden_states": latents(1, 256, 4096),
            "encoder_attention_mask": torch.ones(1, 256, dtype=torch.bool), "pooled_projections": latents(1, 768),
            "timestep": torch.full((1,), 500), "guidance": torch.full((1,), 6000.0)}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], RequestSize, dict[str, Any]]] = {
    "flux": ("FluxTransformer2DModel", {"guidance_embeds": True}, RequestSize(1024, 1024), flux(1024)),
    "flux-2048": ("FluxTransformer2DModel", {"guidance_embeds": True}, RequestSize(2048, 2048), flux(2048)),
    "qwen": ("QwenImageTransformer2DModel", {}, RequestSize(1024, 1024), _QWEN),
    "sd3.5-large": ("SD3Transformer2DModel", _SD35, RequestSize(1024, 1024, batch=2), _SD35_CALL),
    "wan-480p": ("WanTransformer3DModel", {}, RequestSize(480, 832, 81), wan(480, 832)),
    "wan-720p": ("WanTransformer3DModel", {}, RequestSize(720, 1280, 81), wan(720, 1280)),
    "hunyuan-video": ("HunyuanVideoTransformer3DModel", {}, RequestSize(720, 1280, 61), _HUNYUAN),
}


def build(cls: str, config: dict[str, Any], device: str) -> Any:
    import diffusers

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = getattr(diffusers, cls)(**config).eval()
    torch.set_default_dtype(torch.float32)
    return model if device == "meta" else model.to_empty(device=device)


def real(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cuda")
    return tensor.to("cuda")


def measured(run: Callable[[], Any]) -> int:
    """Bytes that a call takes at most; the call before it is a warm-up."""
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            run()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def counted(model: Any, call: Callable[[Any], Any]) -> int:
    """Bytes that a call takes at most, as a forward without weights shows."""
    twin = MetaCopier().copy(model)
    with torch.no_grad(), MetaMode() as mode:
        call(twin)
    return mode.peak_bytes


def transformer(name: str, count_only: bool) -> dict[str, Any]:
    cls, config, size, kwargs = MODELS[name]
    model = build(cls, config, "meta")
    found = estimate(Part("denoiser", type(model), model), size)
    row: dict[str, Any] = {"class": cls, "size": str(size), "estimated_mib": found and round(found[0] / MIB)}
    row["counted_mib"] = round(counted(model, lambda twin: twin(**kwargs, return_dict=False)) / MIB)
    if not count_only:
        model, given = build(cls, config, "cuda"), nested.map_tensors(real, kwargs)
        row["measured_mib"] = round(measured(lambda: model(**given, return_dict=False)) / MIB)
    return row


def vae(count_only: bool) -> dict[str, Any]:
    model, sample = build("AutoencoderKL", _FLUX_VAE, "meta"), latents(1, 16, 128, 128)
    row: dict[str, Any] = {"class": "AutoencoderKL", "size": "1024 x 1024 pixels"}
    row["counted_mib"] = round(counted(model, lambda twin: twin.decode(sample)) / MIB)
    if not count_only:
        model, given = build("AutoencoderKL", _FLUX_VAE, "cuda"), real(sample)
        row["measured_mib"] = round(measured(lambda: model.decode(given)) / MIB)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=(*MODELS, "vae"), default=(*MODELS, "vae"))
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    for name in options.only:
        rows[name] = vae(options.count) if name == "vae" else transformer(name, options.count)
        print(name, rows[name], flush=True)
        if not options.count:
            torch.cuda.empty_cache()
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
