"""What do batches and overlap bring, with many clients? The engine's own queue and workers, without HTTP.

    python benchmarks/gpu_serving.py --only builtin --json benchmarks/results/gpu_serving.json    # likewise:
    python benchmarks/gpu_serving.py --only flux256 --json benchmarks/results/gpu_serving.json    # flux1024, overlap
    python benchmarks/gpu_serving.py --tiny                   # all of it at tiny size on a CPU, to see that it runs

`builtin` is the model that comes with Samovar; the others are FLUX.1 of full size (denoiser, T5-XXL, CLIP-L and VAE)
with random weights that are made on the GPU. Each client asks for its next image as soon as it has its last one. A
worker is a thread here and not a process, so that a model need not be written to a disk and read again; the rest is
the engine of `samovar serve`. Each part is added to the file as soon as it is there, and takes under 100 s.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import gpu_models
import torch
from gpu_bench import gib

from samovar.builtin import BUILTIN_MODELS
from samovar.engine import OmniDiffusionConfig, OmniDiffusionSamplingParams, Request, Supervisor, Worker
from samovar.engine.messages import Cancel, Finished, Ready, Run, Update
from samovar.engine.request import Done, Event, Listener

PROMPT = "a photograph of a samovar on a garden table, number {}"
FEW = 4
"""Steps of a distilled model."""
GOALS = {"builtin": 8.0, "flux256": 1.7, "flux1024": 0.9}


class Scale(NamedTuple):
    """How large and how long everything is."""

    device: torch.device
    seconds: float
    steps: int
    small: int
    large: int
    tokens: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


FULL = Scale(torch.device("cuda"), 12.0, 8, 256, 1024, 512)
TINY = Scale(torch.device("cpu"), 1.5, 2, 32, 64, 16)


# ------------------------------------------------------------------------------------------------ workers and clients


class Threads:
    """A worker of threads in this process, in the place of `WorkerGroup`."""

    worker: Worker
    sizes: Counter[int]
    """How many batches there were of each number of images."""
    num_ranks, process_ids = 1, (0,)

    def __init__(self, config: Any, on_message: Callable[..., None], replica: int = 0) -> None:
        self.since = time.monotonic()
        self._on_message = on_message
        self._runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        worker = self.worker
        how = worker.facts, worker.load_seconds, worker.usage(), worker.max_batch
        on_message(self, 0, Ready(*how, num_lanes=worker.num_lanes))
        for _ in range(worker.num_lanes):
            threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (run := self._runs.get()) is not None:
            batch = run.batch
            self.sizes[len(run.requests)] += 1

            def tell(index: int, event: Event, batch: int = batch) -> None:
                self._on_message(self, 0, Update(batch, index, event))

            outcomes = self.worker.run(run.requests, Listener(tell, lambda index: False))
            self._on_message(self, 0, Finished(batch, tuple(outcomes), self.worker.usage()))

    def send(self, message: Run | Cancel) -> None:
        if isinstance(message, Run):
            self._runs.put(message)

    def describe_end(self) -> str:
        return "a thread"

    def end(self, wait_s: float = 0.0) -> None:
        for _ in range(self.worker.num_lanes):
            self._runs.put(None)


@contextlib.contextmanager
def serving(pipeline: Any, scale: Scale, **settings: Any) -> Iterator[tuple[Supervisor, Counter[int]]]:
    """An engine around a pipeline that is loaded, or around the built-in model; and the sizes of its batches."""
    config = OmniDiffusionConfig("emoji", device=str(scale.device), progress=False, max_queue=64, **settings)
    worker = Worker(config, pipeline)
    sizes: Counter[int] = Counter()
    kind = type("Group", (Threads,), {"worker": worker, "sizes": sizes})
    with mock.patch("samovar.engine.replica.WorkerGroup", kind):
        engine = Supervisor(config)
        engine.start()
        try:
            yield engine, sizes
        finally:
            engine.close()
            worker.close()
            gc.collect()
            if scale.device.type == "cuda":
                torch.cuda.empty_cache()


def load(served: tuple[Supervisor, Counter[int]], scale: Scale, clients: int, **params: Any) -> dict[str, Any]:
    """Clients that ask again and again; what they got, and how long each waited. All begin with a picture that does not
    count, at the sizes of batches that will be seen."""
    engine, sizes = served
    waits: list[float] = []
    made: dict[int, str] = {}
    problems: list[str] = []
    begun = threading.Barrier(clients)
    end = [0.0]

    def ask(seed: int) -> float:
        answer: queue.SimpleQueue[Event] = queue.SimpleQueue()
        started = time.perf_counter()
        request = Request(PROMPT.format(seed), OmniDiffusionSamplingParams(seed=seed, **params))
        engine.submit(request, answer.put)
        while not hasattr(event := answer.get(), "result"):
            if hasattr(event, "error"):
                raise RuntimeError(str(event.error))
        assert isinstance(event, Done)
        made[seed] = hashlib.sha256(event.result.images[0].tobytes()).hexdigest()[:12]
        return time.perf_counter() - started

    def client(number: int) -> None:
        try:
            ask(10_000 + number)
            if begun.wait() == 0:
                sizes.clear()
                end[0] = time.perf_counter() + scale.seconds
            begun.wait()
            seed = 1000 * number
            while time.perf_counter() < end[0]:
                waits.append(ask(seed))
                seed += 1
        except (RuntimeError, threading.BrokenBarrierError) as error:
            problems.append(str(error))
            begun.abort()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise RuntimeError(problems[0])
    took = time.perf_counter() - (end[0] - scale.seconds)
    waits.sort()
    row: dict[str, Any] = {"clients": clients, "images": len(waits), "images_s": round(len(waits) / took, 3)}
    row |= {f"p{part}_s": round(waits[min(len(waits) - 1, len(waits) * part // 100)], 3) for part in (50, 99)}
    if scale.device.type == "cuda":
        row["peak_gib"] = gib(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return row | {"batches": {str(size): count for size, count in sorted(sizes.items())}, "first": made[0]}


# ------------------------------------------------------------------------------------------------ the model


def random_part(kind: Any, config: Any, scale: Scale) -> Any:
    """A component with random weights, made where it runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(scale.dtype)
    try:
        with torch.device(scale.device):
            part = kind(config) if not isinstance(config, dict) else kind(**config)
    finally:
        torch.set_default_dtype(before)
    for name, parameter in part.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.02)
        else:
            parameter.data.fill_(1.0 if name.endswith("weight") else 0.0)
    return part.to(scale.dtype).eval().requires_grad_(False)


def flux(scale: Scale, tiny: bool) -> Any:
    """FLUX.1 as a whole. The tokenizers are those of the built-in model: the text does not matter, its length does."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(0)
    spec = gpu_models.spec("flux", tiny=tiny)
    widths = (32, 32) if tiny else (128, 256, 512, 512)
    t5 = {"d_model": spec.text_width, "vocab_size": 32128, "feed_forward_proj": "gated-gelu"}
    t5 |= {"d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2} if tiny else {"d_kv": 64, "d_ff": 10240,
           "num_layers": 24, "num_heads": 64}  # fmt: skip
    clip = {"hidden_size": spec.pooled_width, "projection_dim": spec.pooled_width, "vocab_size": 49408}
    clip |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64} if tiny else {
        "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}  # fmt: skip
    vae = {"block_out_channels": widths, "layers_per_block": 2, "latent_channels": 16, "use_quant_conv": False,
           "down_block_types": ("DownEncoderBlock2D",) * len(widths), "use_post_quant_conv": False,
           "up_block_types": ("UpDecoderBlock2D",) * len(widths), "shift_factor": 0.1159,
           "scaling_factor": 0.3611}  # fmt: skip
    folder = BUILTIN_MODELS["emoji"]
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=gpu_models.build("flux", scale.device, scale.dtype, tiny=tiny),
        text_encoder=random_part(CLIPTextModel, CLIPTextConfig(**clip), scale),
        text_encoder_2=random_part(T5EncoderModel, T5Config(**t5), scale),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        tokenizer_2=AutoTokenizer.from_pretrained(folder / "tokenizer_2"),
        vae=random_part(AutoencoderKL, vae, scale),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


# ------------------------------------------------------------------------------------------------ the parts


class Report:
    """Says what is there, and keeps it."""

    def __init__(self, file: Path | None, about: dict[str, Any]) -> None:
        self.file = file
        self.rows: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.rows["about"] = about

    def add(self, part: str, name: str, row: dict[str, Any]) -> dict[str, Any]:
        print(f"{part} {name}: {json.dumps(row)}", flush=True)
        self.rows.setdefault(part, {})[name] = row
        if self.file is not None:
            gpu_models.write(self.file, self.rows)
        return row

    def ratio(self, part: str, one: dict[str, Any], other: dict[str, Any], what: str) -> None:
        ratio = round(one["images_s"] / other["images_s"], 3)
        self.add(part, "ratio", {"of": what, "ratio": ratio, "goal": GOALS.get(part)})


def batches(part: str, pipe: Any, scale: Scale, report: Report, clients: int, size: int, **params: Any) -> None:
    """As many clients, one at a time and together."""
    rows = {}
    defaults = {} if pipe is None else {"height": size, "width": size, "max_sequence_length": scale.tokens}
    for most in (1, clients):
        with serving(pipe, scale, max_batch=most, defaults=defaults) as served:
            rows[most] = report.add(part, f"max_batch_{most}", load(served, scale, clients, **params))
    report.ratio(part, rows[clients], rows[1], f"max_batch {clients} over 1, {clients} clients")


def builtin(scale: Scale, tiny: bool, report: Report) -> None:
    batches("builtin", None, scale, report, 4 if tiny else 16, 0, num_inference_steps=2 if tiny else None)


def flux256(scale: Scale, tiny: bool, report: Report) -> None:
    batches("flux256", flux(scale, tiny), scale, report, 8, scale.small, num_inference_steps=scale.steps)


def flux1024(scale: Scale, tiny: bool, report: Report) -> None:
    """Streamed at the least memory with four clients, beside resident."""
    pipe, scale = flux(scale, tiny), scale._replace(seconds=scale.seconds * 2 / 3)
    size = {"height": scale.large, "width": scale.large, "max_sequence_length": scale.tokens}
    rows = {}
    for name, settings in (("resident", {}), ("streamed", {"offload": "layerwise"})):
        with serving(pipe, scale, max_batch=4, defaults=size, **settings) as served:
            for clients in (1, 4):
                found = load(served, scale, clients, num_inference_steps=FEW)
                rows[f"{name}_{clients}"] = report.add("flux1024", f"{name}_{clients}_clients", found)
    best = max(rows["resident_1"], rows["resident_4"], key=lambda row: row["images_s"])
    report.ratio("flux1024", rows["streamed_4"], best, "streamed with 4 clients over the better of resident")


def overlap(scale: Scale, tiny: bool, report: Report) -> None:
    """With two clients and few steps, where it can bring most; then the built-in model."""
    pipe, scale = flux(scale, tiny), scale._replace(seconds=scale.seconds * 2 / 3)
    size = {"height": scale.large, "width": scale.large, "max_sequence_length": scale.tokens}
    report.add("overlap", "stages_ms", stages(pipe, scale))
    rows = {}
    for on in (False, True):
        with serving(pipe, scale, overlap=on, defaults=size) as served:
            found = load(served, scale, 2, num_inference_steps=FEW)
            rows[on] = report.add("overlap", f"flux_{FEW}_steps_{'on' if on else 'off'}", found)
    compare(report, f"flux_{FEW}_steps", rows)
    del pipe
    rows = {}
    for on in (False, True):
        with serving(None, scale, overlap=on) as served:
            found = load(served, scale, 2, num_inference_steps=2 if tiny else None)
            rows[on] = report.add("overlap", f"builtin_{'on' if on else 'off'}", found)
    compare(report, "builtin", rows)


def compare(report: Report, name: str, rows: dict[bool, dict[str, Any]]) -> None:
    ratio = round(rows[True]["images_s"] / rows[False]["images_s"], 3)
    report.add("overlap", f"{name}_ratio", {"ratio": ratio, "same_bits": rows[True]["first"] == rows[False]["first"]})


@torch.no_grad()
def stages(pipe: Any, scale: Scale) -> dict[str, Any]:
    """Milliseconds of what could be overlapped, and of a step."""
    side = scale.large // pipe.vae_scale_factor
    latents = torch.randn(1, 16, side, side, device=scale.device, dtype=scale.dtype)

    def encode() -> None:
        pipe.encode_prompt(PROMPT, None, device=scale.device, max_sequence_length=scale.tokens)

    def decode() -> None:
        pipe.image_processor.postprocess(pipe.vae.decode(latents, return_dict=False)[0], output_type="pil")

    found = {"encode": encode, "decode": decode}
    return {name: gpu_models.summary(gpu_models.times_ms(call, scale.device, 5)) for name, call in found.items()}


PARTS: dict[str, Callable[[Scale, bool, Report], None]] = {
    "builtin": builtin,
    "flux256": flux256,
    "flux1024": flux1024,
    "overlap": overlap,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(PARTS), help="one part (all)")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--seconds", type=float, help="of each measurement (12; 1.5 with --tiny)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results are kept, beside those that are there")
    options = parser.parse_args(arguments)
    scale = TINY if options.tiny else FULL
    scale = scale._replace(seconds=options.seconds or scale.seconds)
    report = Report(options.json, gpu_models.header(scale.device) | {"tiny": options.tiny})
    for name in PARTS if options.only is None else (options.only,):
        started = time.perf_counter()
        PARTS[name](scale, options.tiny, report)
        print(f"{name}: {time.perf_counter() - started:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
