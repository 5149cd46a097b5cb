"""Throughput with many clients, by the engine's own queue and workers, without HTTP.

    python benchmarks/gpu_serving.py --json benchmarks/results/gpu_serving.json --seconds 500
    python benchmarks/gpu_serving.py --tiny                   # all of it at tiny size on a CPU, to see that it runs

`builtin` is the model that comes with Samovar, `cached` the same with the cache "auto"; the others are FLUX.1 of full
size (denoiser, T5-XXL, CLIP-L and VAE) with random weights that are made on the GPU. Each client asks for its next
image as soon as it has its last one; images that set something up or teach the engine do not count. `stages` has the
parts of a call. A worker is a thread here and not a process, so that a model need not be written
to a disk and read again; the rest is the engine of `samovar serve`. Each row is kept in the file as soon as it is
there, and not made again; --only makes some parts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import queue
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import gpu_models
import torch
from gpu_bench import gib
from gpu_parts import Parts, add_options

from samovar.builtin import BUILTIN_MODELS
from samovar.engine import OmniDiffusionConfig, OmniDiffusionSamplingParams, Request, Supervisor, Worker
from samovar.engine.events import Done, Event, Listener
from samovar.engine.messages import Cancel, Finished, Ready, Run, Update

PROMPT = "a photograph of a samovar on a garden table, number {}"
FEW = 4
"""Steps of a distilled model."""
GOALS = {"builtin": 8.0, "flux256": 1.7, "flux512": 1.0, "flux1024": 1.0, "streamed": 0.9}
"""Of the ratio of each part. Nowhere may a batch be slower than one at a time, but for what a measurement varies."""
START_S, BUILD_S, MOVE_S = 20.0, 20.0, 45.0
"""How long an engine takes beside what is measured, from its start to the last answer; FLUX.1 until it is made; and its
weights to the host and back."""


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


class Clients:
    """Clients that ask again and again; what they got, and how long each waited."""

    def __init__(self, served: tuple[Supervisor, Counter[int]], scale: Scale, count: int, **params: Any) -> None:
        self._engine, self._sizes = served
        self._scale, self._count, self._params = scale, count, params
        self._waits: list[float] = []
        self._made: dict[int, str] = {}
        self._problems: list[str] = []
        self._all_warm = threading.Barrier(count, action=self._begin)
        self._begun = 0.0

    def measure(self, least: int) -> dict[str, Any]:
        """A row of figures, after images that do not count: first alone, then, if there are batches, three for each
        client. So the sizes that will be seen have run twice, prompts of two lengths have met, and what is learned or
        set up once is over. Then each client makes at least this number of images."""
        for seed in (500, 501):
            self._ask(seed)
        threads = [threading.Thread(target=self._client, args=(number, least)) for number in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._problems:
            raise RuntimeError(self._problems[0])
        took, waits = time.perf_counter() - self._begun, sorted(self._waits)
        row: dict[str, Any] = {"clients": self._count, "images": len(waits), "images_s": round(len(waits) / took, 3)}
        row |= {f"p{part}_s": round(waits[min(len(waits) - 1, len(waits) * part // 100)], 3) for part in (50, 99)}
        if self._scale.device.type == "cuda":
            row["peak_gib"] = gib(torch.cuda.max_memory_allocated())
        sizes = {str(size): count for size, count in sorted(self._sizes.items())}
        return row | {"batches": sizes, "first": self._made[0]}

    def _begin(self) -> None:
        """All clients are there, and nothing runs."""
        self._sizes.clear()
        if self._scale.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._begun = time.perf_counter()

    def _client(self, number: int, least: int) -> None:
        first = 1000 * number
        try:
            for warm in range(3 if self._engine.max_batch > 1 and self._count > 1 else 0):
                self._ask(first + 510 + warm)
            self._all_warm.wait()
            for seed in itertools.count(first):
                if seed >= first + least and time.perf_counter() >= self._begun + self._scale.seconds:
                    return
                self._waits.append(self._ask(seed))
        except (RuntimeError, threading.BrokenBarrierError) as error:
            self._problems.append(str(error))
            self._all_warm.abort()

    def _ask(self, seed: int) -> float:
        answer: queue.SimpleQueue[Event] = queue.SimpleQueue()
        started = time.perf_counter()
        prompt = PROMPT.format(seed) + ", with cups beside it" * (seed // 1000 % 2)
        self._engine.submit(Request(prompt, OmniDiffusionSamplingParams(seed=seed, **self._params)), answer.put)
        while not hasattr(event := answer.get(), "result"):
            if hasattr(event, "error"):
                raise RuntimeError(str(event.error))
        assert isinstance(event, Done)
        self._made[seed] = hashlib.sha256(event.result.images[0].tobytes()).hexdigest()[:12]
        return time.perf_counter() - started


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


class Benchmark:
    """The rows that are asked for, one after the other."""

    def __init__(self, scale: Scale, tiny: bool, parts: Parts) -> None:
        self.scale, self.tiny, self.parts = scale, tiny, parts
        self._flux: Any = None

    def flux(self) -> Any:
        """Made once, if a row needs it."""
        if self._flux is None:
            self._flux = flux(self.scale, self.tiny)
        return self._flux

    def row(
        self, name: str, clients: int, side: int = 0, steps: int | None = None, least: int = 1, **settings: Any
    ) -> None:
        """Images a second of an engine with these settings; of FLUX.1 if they have sides."""
        takes_s = self.scale.seconds + START_S + MOVE_S * ("offload" in settings)
        takes_s += BUILD_S if side and self._flux is None else 0.0
        if not self.parts.is_due(name, takes_s):
            return
        size = {"height": side, "width": side, "max_sequence_length": self.scale.tokens} if side else {}
        params = {"num_inference_steps": 2 if self.tiny else steps}
        with serving(self.flux() if side else None, self.scale, defaults=size, **settings) as served:
            found = Clients(served, self.scale, clients, **params).measure(least)
        if not side and self._flux is not None:
            found.pop("peak_gib", None)  # FLUX.1 is there beside it.
        self.parts.note(name, found)

    def ratio(self, part: str, one: str, others: Sequence[str], what: str) -> None:
        """One row over the best of others, once all are there."""
        rows = [self.parts.get(f"{part}/{one}"), *map(self.parts.get, others)]
        if None not in rows:
            first, *rest = [row["images_s"] for row in rows if row is not None]
            found = {"of": what, "ratio": first / max(rest), "goal": GOALS.get(part)}
            self.parts.note(f"{part}/ratio", found)

    def batches(self, part: str, clients: int, side: int = 0, steps: int | None = None, **settings: Any) -> None:
        """As many clients, one at a time and together."""
        for most in (1, clients):
            self.row(f"{part}/max_batch_{most}", clients, side, steps, max_batch=most, **settings)
        self.ratio(
            part, f"max_batch_{clients}", [f"{part}/max_batch_1"], f"max_batch {clients} over 1, {clients} clients"
        )

    def builtin(self) -> None:
        self.batches("builtin", 4 if self.tiny else 16)

    def cached(self) -> None:
        self.batches("cached", 4 if self.tiny else 16, cache="auto")

    def flux256(self) -> None:
        self.batches("flux256", 8, self.scale.small, self.scale.steps)

    def flux512(self) -> None:
        self.batches("flux512", 8, self.scale.small * 2, self.scale.steps)

    def flux1024(self) -> None:
        self.batches("flux1024", 4, self.scale.large, FEW)

    def streamed(self) -> None:
        """At the least memory with four clients, beside `flux1024`, which is resident."""
        how = {"least": 3, "max_batch": 4}
        self.row("streamed/max_batch_4", 4, self.scale.large, FEW, offload="layerwise", **how)
        resident = ["flux1024/max_batch_1", "flux1024/max_batch_4"]
        self.ratio("streamed", "max_batch_4", resident, "streamed, over the better of resident, 4 clients")

    def not_ahead(self) -> None:
        """The same without layers that are computed ahead. They cross the bus once for each prompt or batch, which
        nothing hides; with the blocks they cross it in each step, which computing may hide."""
        offload = {"mode": "layerwise", "precompute": False, "device": str(self.scale.device)}
        self.row("streamed/not_ahead", 4, self.scale.large, FEW, least=3, max_batch=4, offload=offload)

    def stages(self) -> None:
        """What of a batch's time is spent where."""
        for count in (1, 3, 4):
            if self.parts.is_due(f"stages/{count}", 10.0 + (BUILD_S if self._flux is None else 0.0)):
                self.parts.note(f"stages/{count}", stages(self.flux(), self.scale, count))


@torch.no_grad()
def stages(pipe: Any, scale: Scale, count: int) -> dict[str, Any]:
    """Milliseconds for each image of what a call does, with this number of images at once."""
    side, prompts = scale.large // pipe.vae_scale_factor, [PROMPT] * count
    latents = torch.randn(count, 16, side, side, device=scale.device, dtype=scale.dtype)
    texts, pooled, _ = pipe.encode_prompt(prompts, None, device=scale.device, max_sequence_length=scale.tokens)
    how = {"height": scale.large, "width": scale.large, "num_inference_steps": FEW, "output_type": "latent"}

    def decode() -> Any:
        return pipe.vae.decode(latents, return_dict=False)[0]

    decoded = decode()
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: pipe.encode_prompt(prompts, None, device=scale.device, max_sequence_length=scale.tokens),
        "denoise": lambda: pipe(prompt_embeds=texts, pooled_prompt_embeds=pooled, **how),
        "decode": decode,
        "to_pil": lambda: pipe.image_processor.postprocess(decoded, output_type="pil"),
    }
    return {
        f"{name}_ms_each": statistics.median(gpu_models.times_ms(call, scale.device, 3, warm=1)) / count
        for name, call in calls.items()
    }


PARTS = ("builtin", "cached", "flux256", "flux1024", "streamed", "stages", "flux512", "not_ahead")
"""Those with a goal first."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts (all)")
    parser.add_argument("--each", type=float, metavar="S", help="seconds of each measurement (12; 1.5 with --tiny)")
    options = parser.parse_args(arguments)
    scale = TINY if options.tiny else FULL
    scale = scale._replace(seconds=options.each or scale.seconds)
    parts = Parts(options, gpu_models.header(scale.device))
    benchmark = Benchmark(scale, options.tiny, parts)
    for name in options.only:
        getattr(benchmark, name)()
    return parts.end()


if __name__ == "__main__":
    sys.exit(main())
