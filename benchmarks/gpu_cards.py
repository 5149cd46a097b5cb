"""Whole pipelines on cards of several sizes: prompt to image, within a budget that is also the allocator's limit.

The pipelines are of full size with random weights. The limit is `torch.cuda.set_per_process_memory_fraction`, which is
what a smaller card is to the allocator. A pipeline is built once, on the host; each case is a process of its own that
is forked from there, sets the pipeline up as a person would, and draws the same images as the whole model on the GPU
does, so that bits can be compared. diffusers' own offloading runs beside, under the same limits.

    python benchmarks/gpu_cards.py --json FILE [--seconds S] [--only flux/resident,flux/11GiB] ...
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA must not be begun before the fork.

import gpu_models
import gpu_parts
import torch

WORDS = ("a samovar on a wooden table", "a red kite over a grey sea", "three lemons in a blue bowl")
"""The first one warms up: what is computed for a prompt may be kept, and timed runs have new ones."""
TOKENIZERS = Path(__file__).resolve().parent.parent / "src/samovar/builtin/emoji"
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
Make = Callable[[], torch.nn.Module]


# ------------------------------------------------------------------------------------------------ pipelines


def fill(make: Make, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A module with random weights on the host, without the minutes that its own initialisation would take."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        module = make()
    # What `from_pretrained` keeps in float32 of a model in bfloat16: transformers has another list for that.
    strict = "" if hasattr(module, "register_to_config") else "_strict"
    kept = set(getattr(module, f"_keep_in_fp32_modules{strict}", None) or ())
    stream = torch.randn(gpu_models.PERIOD, generator=torch.Generator().manual_seed(0)) * 0.02
    places: dict[int, tuple[str, torch.nn.Parameter, int]] = {}
    position = 0
    for path, parameter in module.named_parameters():  # Tied weights once.
        places[id(parameter)] = (path, parameter, position)
        position = (position + parameter.numel()) % gpu_models.PERIOD
    made: dict[int, torch.nn.Parameter] = {}

    def draw(place: tuple[str, torch.nn.Parameter, int]) -> None:
        path, old, start = place
        weight = torch.empty(old.shape, dtype=torch.float32 if kept.intersection(path.split(".")) else dtype)
        gpu_models.use_huge_pages(weight)
        if old.numel() > max(old.shape, default=1):
            gpu_models.fill(weight.view(-1), stream.to(weight.dtype), start)
        else:
            weight.fill_(0.0 if path.endswith("bias") else 1.0)
        made[id(old)] = torch.nn.Parameter(weight, requires_grad=False)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(draw, places.values()))
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = made[id(parameter)]
    return module.eval()


def tokenizer(which: str = "tokenizer_2") -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(TOKENIZERS / which)
    found.chat_template = TEMPLATE
    return found


def flow(**options: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**options)


def clip(is_tiny: bool, size: str = "L", *, projected: bool = False) -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    width, layers, heads = (32, 2, 2) if is_tiny else {"L": (768, 12, 12), "G": (1280, 32, 20)}[size]
    config = CLIPTextConfig(hidden_size=width, intermediate_size=width * 4, num_hidden_layers=layers,
                            num_attention_heads=heads, projection_dim=width,
                            hidden_act="gelu" if size == "G" else "quick_gelu")  # fmt: skip
    return fill(lambda: (CLIPTextModelWithProjection if projected else CLIPTextModel)(config))


def t5(is_tiny: bool) -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    size = (64, 16, 4, 2, 128) if is_tiny else (4096, 64, 64, 24, 10240)
    config = T5Config(**_t5(size), feed_forward_proj="gated-gelu", vocab_size=32128, is_encoder_decoder=False,
                      tie_word_embeddings=False)  # fmt: skip
    return fill(lambda: T5EncoderModel(config))


def umt5(is_tiny: bool) -> torch.nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    size = (64, 16, 4, 2, 128) if is_tiny else (4096, 64, 64, 24, 10240)
    config = UMT5Config(**_t5(size), feed_forward_proj="gated-gelu", vocab_size=2048 if is_tiny else 256384,
                        is_encoder_decoder=False, tie_word_embeddings=False)  # fmt: skip
    return fill(lambda: UMT5EncoderModel(config))


def _t5(size: tuple[int, int, int, int, int]) -> dict[str, int]:
    return dict(zip(("d_model", "d_kv", "num_heads", "num_layers", "d_ff"), size, strict=True))


def qwen3(is_tiny: bool) -> torch.nn.Module:
    """Qwen3-4B, the text encoder of FLUX.2 klein 4B and of Z-Image."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width, layers, heads = (64, 30, 2) if is_tiny else (2560, 36, 32)
    config = Qwen3Config(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=max(1, heads // 4), head_dim=32 if is_tiny else 128,
                         intermediate_size=128 if is_tiny else 9728, vocab_size=2048 if is_tiny else 151936,
                         tie_word_embeddings=True)  # fmt: skip
    return fill(lambda: Qwen3ForCausalLM(config))


def qwen_vl(is_tiny: bool) -> torch.nn.Module:
    """Qwen2.5-VL-7B, the text encoder of Qwen-Image."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "intermediate_size": 18944, "vocab_size": 152064}  # fmt: skip
    vision = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    if is_tiny:
        text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                "intermediate_size": 128, "vocab_size": 2048}  # fmt: skip
        vision = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "depth": 2, "num_heads": 2}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [4, 6, 6] if is_tiny else [16, 24, 24],
    }  # type: ignore[assignment]
    return fill(lambda: Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)))


def llama(is_tiny: bool) -> torch.nn.Module:
    """Llama 3 8B, the text encoder of HunyuanVideo."""
    from transformers import LlamaConfig, LlamaModel

    width, layers, heads = (64, 4, 2) if is_tiny else (4096, 32, 32)
    config = LlamaConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=max(1, heads // 4), intermediate_size=128 if is_tiny else 14336,
                         vocab_size=128320)  # fmt: skip
    return fill(lambda: LlamaModel(config))


def image_vae(is_tiny: bool, scaling: float = 0.3611, shift: float = 0.1159) -> torch.nn.Module:
    """The VAE of FLUX.1 (of Z-Image too), and with other numbers that of SD3."""
    from diffusers import AutoencoderKL

    widths = (16, 16, 32, 32) if is_tiny else (128, 256, 512, 512)
    return fill(
        lambda: AutoencoderKL(
            in_channels=3, out_channels=3, latent_channels=16, block_out_channels=widths, layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=16 if is_tiny else 32, sample_size=1024, scaling_factor=scaling, shift_factor=shift,
            use_quant_conv=False, use_post_quant_conv=False, force_upcast=True,
        )
    )  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> torch.nn.Module:
    """A model of diffusers with the defaults of its class, which are those of what was published."""
    import diffusers

    return fill(lambda: getattr(diffusers, name)(**config), dtype)


_TINY_FLUX = {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "joint_attention_dim": 64,
              "pooled_projection_dim": 32}  # fmt: skip


def flux(is_tiny: bool) -> Any:
    from diffusers import FluxPipeline

    config = _TINY_FLUX if is_tiny else {}
    return FluxPipeline(
        flow(shift=3.0, use_dynamic_shifting=True), image_vae(is_tiny), clip(is_tiny), tokenizer("tokenizer"),
        t5(is_tiny), tokenizer(), make("FluxTransformer2DModel", guidance_embeds=True, **config),
    )  # fmt: skip


def qwen(is_tiny: bool) -> Any:
    from diffusers import QwenImagePipeline

    config = {"num_layers": 3, "num_attention_heads": 2, "joint_attention_dim": 64} if is_tiny else {}
    vae = {"base_dim": 16} if is_tiny else {}
    return QwenImagePipeline(
        flow(shift=1.0, use_dynamic_shifting=True), make("AutoencoderKLQwenImage", **vae), qwen_vl(is_tiny),
        tokenizer(), make("QwenImageTransformer2DModel", **config),
    )  # fmt: skip


def sd35(is_tiny: bool) -> Any:
    from diffusers import StableDiffusion3Pipeline

    config = {"sample_size": 128, "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
              "pos_embed_max_size": 192, "qk_norm": "rms_norm"}  # fmt: skip
    if is_tiny:
        config |= {"num_layers": 3, "num_attention_heads": 4, "joint_attention_dim": 64, "caption_projection_dim": 256,
                   "pooled_projection_dim": 64}  # fmt: skip
    return StableDiffusion3Pipeline(
        make("SD3Transformer2DModel", **{"in_channels": 16, "out_channels": 16, "joint_attention_dim": 4096,
                                         "pooled_projection_dim": 2048, **config}),
        flow(shift=3.0), image_vae(is_tiny, 1.5305, 0.0609), clip(is_tiny, projected=True), tokenizer("tokenizer"),
        clip(is_tiny, "G", projected=True), tokenizer("tokenizer"), t5(is_tiny), tokenizer(),
    )  # fmt: skip


def klein(is_tiny: bool) -> Any:
    from diffusers import Flux2KleinPipeline

    config = {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680}
    if is_tiny:
        config = {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "joint_attention_dim": 192}
    vae = {"block_out_channels": (16, 16, 32, 32), "norm_num_groups": 16} if is_tiny else {}
    return Flux2KleinPipeline(
        flow(shift=3.0, use_dynamic_shifting=True), make("AutoencoderKLFlux2", **vae), qwen3(is_tiny), tokenizer(),
        make("Flux2Transformer2DModel", guidance_embeds=False, **config), is_distilled=True,
    )  # fmt: skip


def z_image(is_tiny: bool) -> Any:
    from diffusers import ZImagePipeline

    config: dict[str, Any] = {}
    if is_tiny:
        config = {"dim": 64, "n_layers": 3, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64, "axes_dims": [8, 12, 12]}
    return ZImagePipeline(flow(shift=3.0), image_vae(is_tiny), qwen3(is_tiny), tokenizer(),
                          make("ZImageTransformer2DModel", **config))  # fmt: skip


def wan(is_tiny: bool, *, experts: bool = False) -> Any:
    from diffusers import UniPCMultistepScheduler, WanPipeline

    config = {"num_attention_heads": 2, "text_dim": 64, "ffn_dim": 256, "num_layers": 3} if is_tiny else {}
    vae = {"base_dim": 16} if is_tiny else {}
    return WanPipeline(
        tokenizer(), umt5(is_tiny), make("AutoencoderKLWan", torch.float32, **vae),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        make("WanTransformer3DModel", **config), make("WanTransformer3DModel", **config) if experts else None,
        boundary_ratio=0.875 if experts else None,
    )  # fmt: skip


def hunyuan(is_tiny: bool) -> Any:
    from diffusers import HunyuanVideoPipeline

    config = {"num_attention_heads": 2, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1,
              "text_embed_dim": 64, "pooled_projection_dim": 32} if is_tiny else {}  # fmt: skip
    vae = {"block_out_channels": (16, 16, 32, 32), "norm_num_groups": 16} if is_tiny else {}
    return HunyuanVideoPipeline(
        llama(is_tiny), tokenizer(), make("HunyuanVideoTransformer3DModel", **config),
        make("AutoencoderKLHunyuanVideo", **vae), flow(shift=7.0), clip(is_tiny), tokenizer("tokenizer"),
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One pipeline and what is drawn with it."""

    title: str
    make: Callable[[bool], Any]
    call: Mapping[str, Any]
    steps: tuple[int, ...]
    """Runs of so many steps are timed."""
    budgets: tuple[str, ...]
    peers: tuple[str, ...] = ()
    longer: tuple[str, ...] = ()
    """Budgets within which runs of more steps are timed too, each number in a process of its own, as plans differ."""
    build_s: float = 60
    run_s: float = 40
    """About what the host takes to build it, and a case beside that."""


_SQUARE = {"height": 1024, "width": 1024}
_CLIP = {"height": 480, "width": 832, "num_frames": 81, "guidance_scale": 1.0}
KINDS = {
    "flux": Kind("FLUX.1-dev, 1024 x 1024", flux, {**_SQUARE, "guidance_scale": 3.5}, (4, 8, 20),
                 ("4GiB", "6GiB", "8GiB", "11GiB", "15GiB", "22GiB"), ("diffusers-group:11GiB", "diffusers-model:24GiB",
                 "diffusers-sequential:11GiB"), ("11GiB", "22GiB"), 25, 40),
    "klein": Kind("FLUX.2 klein 4B, 1024 x 1024", klein, _SQUARE, (4,), ("8GiB", "11GiB", "22GiB"), build_s=20,
                  run_s=20),
    "z_image": Kind("Z-Image, 1024 x 1024", z_image, {**_SQUARE, "guidance_scale": 0.0}, (8,), ("8GiB", "11GiB"),
                    build_s=20, run_s=25),
    "qwen": Kind("Qwen-Image, 1024 x 1024", qwen, {**_SQUARE, "true_cfg_scale": 1.0}, (4, 8),
                 ("8GiB", "11GiB", "22GiB"), build_s=40, run_s=50),
    "sd35": Kind("SD3.5-large, 1024 x 1024", sd35, {**_SQUARE, "guidance_scale": 1.0}, (4, 8),
                 ("8GiB", "11GiB", "22GiB"), build_s=25, run_s=30),
    "wan": Kind("Wan 2.1 14B, 81 frames of 832 x 480", wan, _CLIP, (4,), ("8GiB", "11GiB", "22GiB"),
                ("diffusers-group:22GiB", "diffusers-model:36GiB"), build_s=45, run_s=90),
    "wan22": Kind("Wan 2.2 A14B, 81 frames of 832 x 480", lambda is_tiny: wan(is_tiny, experts=True), _CLIP, (4,),
                  ("8GiB", "11GiB", "22GiB"), build_s=90, run_s=100),
    "hunyuan": Kind("HunyuanVideo, 33 frames of 832 x 480", hunyuan,
                    {"height": 480, "width": 832, "num_frames": 33}, (4,), ("11GiB", "22GiB"), build_s=45, run_s=45),
}  # fmt: skip
_TINY_CALL = {"height": 64, "width": 64}


# ------------------------------------------------------------------------------------------------ one case


def draw(pipe: Any, kind: Kind, steps: int, words: str, *, is_tiny: bool, **more: Any) -> torch.Tensor:
    call = dict(kind.call) | (_TINY_CALL if is_tiny else {}) | more
    if is_tiny and "num_frames" in call:
        call["num_frames"] = 5
    generator = torch.Generator().manual_seed(5)
    found = pipe(prompt=words, num_inference_steps=steps, generator=generator, output_type="pt", **call)[0]
    tensor: torch.Tensor = found if isinstance(found, torch.Tensor) else torch.stack(list(found))
    return tensor.float().cpu()


def phases(pipe: Any, kind: Kind, is_tiny: bool) -> list[float]:
    """Seconds until the end of the first step, of each step behind it, and from there to the image on the host."""
    ends = [time.perf_counter()]

    def step(pipe: Any, index: int, time_: Any, values: dict[str, Any]) -> dict[str, Any]:
        if not is_tiny:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        return {}

    draw(pipe, kind, kind.steps[0], WORDS[1], is_tiny=is_tiny, callback_on_step_end=step)
    ends.append(time.perf_counter())
    return [round(later - earlier, 3) for earlier, later in itertools.pairwise(ends)]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def set_up(pipe: Any, way: str, budget: str | None, kind: Kind, is_tiny: bool) -> Any:
    """What a person would write to use the pipeline so."""
    if way == "samovar":
        import samovar

        size = {name: kind.call[name] for name in ("height", "width", "num_frames") if name in kind.call}
        return samovar.attach(pipe, gpu_memory=budget, **({} if is_tiny else size))
    if way == "diffusers-model":
        pipe.enable_model_cpu_offload()
    elif way == "diffusers-sequential":
        pipe.enable_sequential_cpu_offload()
    elif way == "diffusers-group":
        pipe.enable_group_offload(torch.device("cuda"), torch.device("cpu"), offload_type="leaf_level", use_stream=True,
                                  low_cpu_mem_usage=True)  # fmt: skip
    elif not is_tiny:
        pipe.to("cuda")
    return None


def gib(count: float) -> float:
    return round(count / 2**30, 2)


def about(is_tiny: bool) -> dict[str, Any]:
    return gpu_models.header("cpu" if is_tiny else "cuda", "accelerate")


def in_child(context: Any, work: Callable[..., dict[str, Any]], *given: Any, limit_s: float = 60) -> dict[str, Any]:
    """What a process forked from here answers, or how it ended."""

    def answer(pipe: Any) -> None:
        pipe.send(work(*given))
        os._exit(0)  # Nothing of the parent's is to be torn down here.

    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(theirs,))
    process.start()
    theirs.close()
    try:
        row: dict[str, Any] = mine.recv() if mine.poll(limit_s) else {"error": f"no result after {limit_s:.0f} s"}
    except EOFError:
        process.join()
        row = {"error": f"the process ended with code {process.exitcode}"}
    process.kill()
    process.join()
    return row


def run_case(
    pipe: Any, kind: Kind, way: str, budget: str | None, is_tiny: bool, lengths: tuple[int, ...]
) -> dict[str, Any]:
    """The row of one case, whatever happens in it."""
    torch.set_num_threads(os.cpu_count() or 1)
    row: dict[str, Any] = {"way": way, "limit": budget}
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # No figures of earlier cases.
    on_gpu = not is_tiny
    try:
        if on_gpu:
            torch.cuda.init()
            total = torch.cuda.get_device_properties(0).total_memory
            if budget is not None:
                torch.cuda.set_per_process_memory_fraction(float(budget.removesuffix("GiB")) * 2**30 / total)
        pipe.set_progress_bar_config(disable=True)
        begin = time.perf_counter()
        attached = set_up(pipe, way, None if is_tiny else budget, kind, is_tiny)
        row["set_up_s"] = round(time.perf_counter() - begin, 2)
        if attached is not None:
            row["plan"] = str(attached.explain())[:3000]
        begin = time.perf_counter()
        few = lengths[0]
        last: dict[str, torch.Tensor] = {}

        def step(pipe: Any, index: int, time_: Any, values: dict[str, Any]) -> dict[str, Any]:
            last.update(values)
            return {}

        first = draw(pipe, kind, few, WORDS[0], is_tiny=is_tiny, callback_on_step_end=step)
        row |= {"first_s": round(time.perf_counter() - begin, 2), "seconds": {}, "reserved": {}}
        row["images"] = {f"{few}/0": digest(first)}
        row["finite"] = bool(first.isfinite().all())
        row["latents"] = {str(few): digest(last["latents"].float().cpu())}
        if on_gpu:
            row["reserved"]["first"] = gib(torch.cuda.max_memory_reserved())
        is_slow = kind.run_s > 60 or way in ("diffusers-model", "diffusers-sequential")
        for steps in lengths:
            for words in WORDS[1:2] if is_slow else WORDS[1:]:
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                found = draw(pipe, kind, steps, words, is_tiny=is_tiny)
                taken = round(time.perf_counter() - begin, 3)
                key = str(steps)
                row["seconds"][key] = min(taken, row["seconds"].get(key, math.inf))
                row["images"][f"{key}/{WORDS.index(words)}"] = digest(found)
                if on_gpu:
                    row["reserved"][key] = max(gib(torch.cuda.max_memory_reserved()), row["reserved"].get(key, 0.0))
                    row["allocated"] = max(gib(torch.cuda.max_memory_allocated()), row.get("allocated", 0.0))
        if few == kind.steps[0] and not is_slow:
            row["phases_s"] = phases(pipe, kind, is_tiny)
        if on_gpu:
            memory = torch.cuda.memory_stats()
            row["allocator"] = {name: memory[name] for name in ("num_alloc_retries", "num_ooms")}
        if attached is not None:
            row["stats"] = str(attached.stats())[:1500]
            row["plan_of_last"] = str(attached.explain())[:1500]
    except Exception as problem:  # Whatever goes wrong is the case's result.
        row["error"] = f"{type(problem).__name__}: {str(problem)[:700]}"
    return row


def cases(kind: Kind) -> list[tuple[str, str, str | None, tuple[int, ...]]]:
    """Name, way, limit and numbers of steps, the whole model first."""
    found: list[tuple[str, str, str | None, tuple[int, ...]]] = [("resident", "resident", None, kind.steps)]
    for budget in reversed(kind.budgets):
        found.append((budget, "samovar", budget, kind.steps if not kind.longer else kind.steps[:1]))
        longer = kind.steps[1:] if budget in kind.longer else ()
        found += [(f"{budget} {steps} steps", "samovar", budget, (steps,)) for steps in longer]
    for peer in kind.peers:
        way, _, limit = peer.partition(":")
        found.append((way, way, limit, kind.steps if way == "diffusers-group" else kind.steps[:1]))
    return found


def compare(rows: Mapping[str, Any]) -> None:
    """Whether bits are those of the whole model, and how much longer it takes."""
    base = rows.get("resident")
    if not isinstance(base, dict) or "error" in base:
        return
    for row in rows.values():
        if isinstance(row, dict) and "images" in row and "error" not in row:
            shared = set(row["images"]) & set(base["images"])
            row["same_images"] = sum(row["images"][key] == base["images"][key] for key in shared)
            row["of_images"] = len(shared)
            shared = set(row["latents"]) & set(base["latents"])
            row["same_latents"] = all(row["latents"][key] == base["latents"][key] for key in shared) if shared else None
            row["of_resident"] = {n: round(s / base["seconds"][n], 3) for n, s in row["seconds"].items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    gpu_parts.add_options(parser)
    parser.add_argument("--only", default="", metavar="CASES", help="such as flux,wan/22GiB (all)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # A pool of threads would not survive the fork.
    context = multiprocessing.get_context("fork")
    parts = gpu_parts.Parts(options, about=in_child(context, about, options.tiny))
    wanted = [word for word in options.only.split(",") if word]
    for name, kind in KINDS.items():
        due = []
        for case, way, limit, lengths in cases(kind)[: 1 if options.tiny else None]:
            full = f"{name}/{case}"
            if (not wanted or name in wanted or full in wanted) and parts.is_missing(full):
                due.append((full, way, limit, lengths))
        if not due or not parts.is_due(due[0][0], kind.build_s + kind.run_s):
            continue
        begin = time.perf_counter()
        pipe = kind.make(options.tiny)
        print(f"{kind.title}: built in {time.perf_counter() - begin:.0f} s", flush=True)
        gc.collect()
        gc.freeze()
        for full, way, limit, lengths in due:
            if not parts.is_due(full, kind.run_s):
                continue
            given = pipe, kind, way, limit, options.tiny, lengths
            parts.note(full, in_child(context, run_case, *given, limit_s=kind.run_s * 4))
        del pipe
        gc.unfreeze()
        gc.collect()
        compare(parts.rows[name])
        if options.json is not None:
            gpu_models.write(options.json, parts.rows)
    show(parts.rows)
    return parts.end()


def show(rows: Mapping[str, Any]) -> None:
    """A short table, last."""
    for name, group in rows.items():
        for case, row in group.items() if name in KINDS else ():
            if "error" in row:
                print(f"{name:8} {case:22} {row['error'][:150]}")
                continue
            times = ", ".join(f"{n}: {s} s" for n, s in row["seconds"].items())
            most = max(row["reserved"].values(), default=0)
            bits = f"images {row.get('same_images')}/{row.get('of_images')}, latents {row.get('same_latents')}"
            print(
                f"{name:8} {case:22} set up {row['set_up_s']}, first {row['first_s']}, {times}, reserved {most}, {bits}"
            )


if __name__ == "__main__":
    sys.exit(main())
