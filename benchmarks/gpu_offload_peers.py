"""What diffusers and accelerate take for the same, and the cost of a whole run in which models take turns."""

from __future__ import annotations

import time
from typing import Any

import gpu_models
import torch
from gpu_bench import GIB, Bench, gib, is_same, resident_set_bytes

from samovar.offload import OffloadConfig, apply_offload


@torch.no_grad()
def peers(bench: Bench, name: str, model: torch.nn.Module, *, swap: bool) -> dict[str, Any]:
    """diffusers' group offload, one block at a time with a stream, and the plain `.to()` of a whole-model swap."""
    from diffusers import FirstBlockCacheConfig, apply_first_block_cache
    from diffusers.hooks import apply_group_offloading

    found: dict[str, Any] = {}
    bench.clear()
    if swap:
        found["accelerate_in_s"] = round(bench.seconds(lambda: model.to(bench.device)), 2)
        found["accelerate_out_s"] = round(bench.seconds(lambda: model.to("cpu")), 2)
        bench.clear()
    inputs = gpu_models.inputs(name, bench.device, bench.dtype, tiny=bench.tiny)

    def forward() -> Any:
        return model(**inputs)[0]

    grouped = {"onload_device": bench.device, "offload_type": "block_level", "num_blocks_per_group": 1}
    streams = {"use_stream": True, "non_blocking": True, "record_stream": True} if bench.is_cuda else {}
    start = time.perf_counter()
    apply_group_offloading(model, offload_device=torch.device("cpu"), **grouped, **streams)
    found["group_setup_s"] = round(time.perf_counter() - start, 2)
    found["group_host_gib"] = gib(resident_set_bytes())
    ms, peak = bench.pass_ms(forward)
    found |= {"group_ms": round(ms, 2), "group_peak_gib": peak}
    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=1e9))
    with model.cache_context("cond"):
        for _ in range(3):
            forward()
        times = [bench.seconds(forward) * 1e3 for _ in range(5)]
    return found | {"group_skip_ms": round(sorted(times)[2], 2)}


# ------------------------------------------------------------------------------------------------ a pipeline


class EncodeAndDenoise:
    """A pipeline reduced to what takes time: an encoder called for two prompts, and a denoiser for two branches."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ()

    def __init__(self, encoder: torch.nn.Module, transformer: torch.nn.Module, inputs: dict[str, Any]) -> None:
        self.text_encoder, self.transformer, self.inputs = encoder, transformer, inputs

    @torch.no_grad()
    def __call__(self, steps: int) -> torch.Tensor:
        device = self.inputs["hidden_states"].device
        length = self.inputs["encoder_hidden_states"].shape[1]
        branches = []
        for seed in (0, 1):
            tokens = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(seed)).to(device)
            branches.append(self.text_encoder(tokens)[0])
        latents = self.inputs["hidden_states"]
        for _ in range(steps):
            one, other = (
                self.transformer(**{**self.inputs, "hidden_states": latents, "encoder_hidden_states": text})[0]
                for text in branches
            )
            latents = latents - 0.01 * (other + 2.0 * (one - other))
        return latents


def build_pipeline(bench: Bench) -> EncodeAndDenoise:
    """An encoder of about 7 GiB and a denoiser of about 8, as in OmniGen2, with random weights."""
    from diffusers import FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    width = 64 if bench.tiny else 4096
    shape = {"d_ff": 128, "num_layers": 3} if bench.tiny else {"d_ff": 10240, "num_layers": 18, "num_heads": 64}
    config = T5Config(d_model=width, feed_forward_proj="gated-gelu", **shape)
    few = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": width,
           "pooled_projection_dim": 32} if bench.tiny else {"num_layers": 8, "num_single_layers": 11}  # fmt: skip
    with torch.device("meta"):
        encoder = T5EncoderModel(config)
        transformer = FluxTransformer2DModel(guidance_embeds=True, **few)
    gpu_models._rebuild_tables(transformer)
    noise = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(bench.dtype)
    modules = []
    for module in (encoder, transformer):
        module = module.to(bench.dtype).to_empty(device="cpu").eval().requires_grad_(False)
        for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
            gpu_models.use_huge_pages(tensor)
            flat = tensor.view(-1)
            for start in range(0, flat.numel(), len(noise)):
                flat[start : start + len(noise)].copy_(noise[: flat.numel() - start])
        modules.append(module)
    inputs = gpu_models.inputs("flux", bench.device, bench.dtype, tiny=bench.tiny)
    return EncodeAndDenoise(modules[0], modules[1], inputs)


@torch.no_grad()
def pipeline(bench: Bench, steps: int = 28) -> dict[str, Any]:
    """Model-level offload of a whole run."""
    steps = 2 if bench.tiny else steps
    pipe = build_pipeline(bench)
    whole = apply_offload(pipe, OffloadConfig("auto", gpu_memory=1024 * GIB, device=bench.device))
    sizes = {part.name: gib(part.num_bytes) for part in whole.plan.components}
    found: dict[str, Any] = {"weights_gib": sizes, "steps": steps}
    expected = pipe(steps)
    found["resident"] = timed_run(bench, pipe, steps)
    whole.detach()
    bench.clear()
    taking_turns = apply_offload(pipe, OffloadConfig("model", device=bench.device))
    found["setup_s"] = round(taking_turns.stats().setup_s, 2)
    same = is_same(pipe(steps), expected)
    found["model"] = timed_run(bench, pipe, steps) | {"same_bits": same}
    found["model"]["planned_weights_gib"] = gib(taking_turns.plan.peak_bytes)
    with taking_turns.measure():
        pipe(2)
    found["activations_gib"] = {name: gib(need) for name, need in taking_turns.history.needs.items()}
    taking_turns.detach()
    found["slower"] = round(found["model"]["s"] / found["resident"]["s"] - 1, 4)
    return found


def timed_run(bench: Bench, pipe: EncodeAndDenoise, steps: int) -> dict[str, Any]:
    bench.reset_peak()
    times = [bench.seconds(lambda: pipe(steps)) for _ in range(2)]
    return {"s": round(min(times), 3), "peak_gib": gib(bench.peak())}
