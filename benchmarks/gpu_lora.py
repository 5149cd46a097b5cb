"""The cost of a LoRA adapter on a GPU: loading it, switching to it, a step with it, and what of a step that is.

    python benchmarks/gpu_lora.py --json benchmarks/results/gpu_lora.json --seconds 500
    python benchmarks/gpu_lora.py --tiny                      # the same on a CPU, to see that it runs

FLUX.1 of full size with random weights that are made on the GPU, and two adapters of rank 16 on all projections of
attention and MLP, saved and loaded as files. Steps are measured as they are, replayed as a graph, where the host takes
no part, and with streamed blocks. `layers` has the operations of which an adapter consists, for the shapes of FLUX.1,
and other ways to compute the same. A switch is what happens between two requests, without the step that follows it.
Each output is compared to the bit with that of a model in which only this adapter was ever loaded. Each part is kept
in the file as soon as it is there, and not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_models
import torch
from gpu_bench import Bench, gib, is_same
from gpu_parts import Parts, add_options

from samovar import attach
from samovar.engine.lora import Adapters
from samovar.engine.request import Adapter
from simulated import SimulatedRecorder, recording_by

RANK, MANY, FEW = 16, (3, 12), (1, 4)
"""The last two: rounds of steps, and switches; few where a step takes long."""
GOAL_MS = 50.0
"""The most that a switch may take, resident."""
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "proj_mlp",
           "ff.net.0.proj", "ff.net.2"]  # fmt: skip
ORDERS: dict[str, tuple[Adapter, ...]] = {
    "none": (), "a": (Adapter("a"),), "b": (Adapter("b"),), "a_at_0.7": (Adapter("a", 0.7),)
}  # fmt: skip


def build(bench: Bench) -> Any:
    """A pipeline of a denoiser alone."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    transformer = gpu_models.build("flux", bench.device, bench.dtype, tiny=bench.tiny)
    others = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **others)


def save(pipe: Any, folder: Path, seed: int) -> str:
    from peft import LoraConfig, get_peft_model_state_dict

    torch.manual_seed(seed)
    pipe.transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
    weights = get_peft_model_state_dict(pipe.transformer)
    for name, tensor in weights.items():
        if "lora_B" in name:  # peft begins with zeros, which would change nothing.
            tensor.normal_(std=0.02)
    pipe.save_lora_weights(folder, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})
    pipe.unload_lora_weights()
    return str(folder)


# ------------------------------------------------------------------------------------------------ operations of a layer


class Shape(NamedTuple):
    """A kind of layer, and how many of them FLUX.1 has."""

    tokens: int
    width: int
    output: int
    count: int


def shapes(tiny: bool) -> dict[str, Shape]:
    if tiny:
        return {"projection": Shape(8, 32, 32, 9), "to_mlp": Shape(8, 32, 128, 5)}
    return {
        "projection of both": Shape(4608, 3072, 3072, 3 * 38),
        "to_mlp of both": Shape(4608, 3072, 12288, 38),
        "projection of the image": Shape(4096, 3072, 3072, 4 * 19),
        "to_mlp of the image": Shape(4096, 3072, 12288, 19),
        "from_mlp of the image": Shape(4096, 12288, 3072, 19),
        "projection of the text": Shape(512, 3072, 3072, 4 * 19),
    }


Way = Callable[[torch.Tensor], torch.Tensor]
"""From the output of a layer, which it may overwrite, to the output with an adapter."""


def operations(shape: Shape, bench: Bench) -> dict[str, Any]:
    """Milliseconds of each operation that peft adds to a layer, of all of them, and of other ways; by way, the bits.

    Bytes bound them: a way moves the layer's input once, and its output four times (widen, add), with peft's scale six
    times, `addmm` twice."""
    from torch.nn.functional import linear

    def random(*size: int, by: float = 0.02) -> torch.Tensor:
        return (torch.randn(*size, device=bench.device) * by).to(bench.dtype)

    def ms(call: Callable[[], object]) -> float:
        return round(bench.pass_ms(call, passes=3 if bench.tiny else 50)[0], 4)

    x, base = random(shape.tokens, shape.width, by=1.0), random(shape.tokens, shape.output, by=1.0)
    narrow, wide = random(RANK, shape.width), random(shape.output, RANK)
    inner, added = linear(x, narrow), linear(linear(x, narrow), wide)
    parts = {
        "narrow": lambda: linear(x, narrow),
        "widen": lambda: linear(inner, wide),
        "scale": lambda: added * 1.0,
        "add": lambda: base + added,
    }
    ways: dict[str, Way] = {
        "peft": lambda base: base + linear(linear(x, narrow), wide) * 1.0,
        "unscaled": lambda base: base + linear(linear(x, narrow), wide),
        "in place": lambda base: base.add_(linear(linear(x, narrow), wide)),
        "addmm": lambda base: torch.addmm(base, linear(x, narrow), wide.T),
    }
    row: dict[str, Any] = {"tokens": shape.tokens, "in": shape.width, "out": shape.output, "layers": shape.count}
    row |= {f"{name}_ms": ms(call) for name, call in parts.items()}
    scratch = base.clone()
    row |= {f"{name}_ms": ms(lambda: way(scratch)) for name, way in ways.items()}  # noqa: B023 - Called at once.
    expected = ways["peft"](base)
    row["same_bits"] = {name: is_same(way(base.clone()), expected) for name, way in ways.items()}
    three = torch.cat([narrow] * 3)  # As if to_q, to_k and to_v shared a product.
    row["three_narrow_in_one_ms"] = ms(lambda: linear(x, three))
    row["same_bits"]["three narrow in one"] = is_same(linear(x, three)[:, :RANK], inner)
    return row


# ------------------------------------------------------------------------------------------------ a whole step


class Subject:
    """The model with its adapters, and what it must give."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench, self.pipe = bench, build(bench)
        self._inputs = gpu_models.inputs("flux", bench.device, bench.dtype, tiny=bench.tiny)
        self.sources = {name: save(self.pipe, folder / name, seed) for seed, name in enumerate("ab")}

    @torch.no_grad()
    def forward(self) -> torch.Tensor:
        output: torch.Tensor = self.pipe.transformer(**self._inputs)[0]
        return output

    def load(self) -> float:
        """Load the adapters as the engine does, after diffusers has shown what they must give; the seconds."""
        self.expected = {"none": self.forward().cpu()}
        for order, chosen in ORDERS.items():
            for name, scale in chosen:
                self.pipe.load_lora_weights(self.sources[name], adapter_name=name)
                self.pipe.set_adapters([name], [scale])
                self.expected[order] = self.forward().cpu()
                self.pipe.unload_lora_weights()

        def load() -> None:
            self.adapters = Adapters(self.pipe, self.sources)

        return self.bench.seconds(load)

    def measure(self, rounds: int, switches: int) -> dict[str, Any]:
        """Figures of the pipeline as it is now."""
        row: dict[str, Any] = {}
        times: dict[str, list[float]] = {order: [] for order in ORDERS}
        for number in range(rounds):
            for order, chosen in ORDERS.items():
                self.adapters.use(chosen)
                taken, row[f"peak_gib_{order}"] = self.bench.pass_ms(self.forward, warm=1 if number else 3)
                times[order].append(taken)
                if number == 0:
                    row[f"same_bits_{order}"] = is_same(self.forward(), self.expected[order])
        row |= {f"step_ms_{order}": statistics.median(taken) for order, taken in times.items()}
        row |= {
            f"added_percent_{order}": 100 * (row[f"step_ms_{order}"] / row["step_ms_none"] - 1)
            for order in ("a", "b", "a_at_0.7")
        }
        return row | self._switches(switches)

    def _switches(self, count: int) -> dict[str, float]:
        orders, switches, steps = list(ORDERS.values()), list[float](), list[float]()
        for number in range(count):
            chosen = orders[number % len(orders)]
            switches.append(1e3 * self.bench.seconds(lambda: self.adapters.use(chosen)))  # noqa: B023 - Called at once.
            steps.append(1e3 * self.bench.seconds(self.forward))
        found = {"switch_ms": statistics.median(switches), "switch_ms_most": max(switches)}
        return found | {"step_ms_after_a_switch": statistics.median(steps)}

    @contextlib.contextmanager
    def attached(self, **settings: Any) -> Iterator[None]:
        """Inside, features are attached."""
        simulated = (
            recording_by(SimulatedRecorder(), self.bench.device) if self.bench.tiny else contextlib.nullcontext()
        )
        with simulated:
            attached = attach(self.pipe, **settings) if settings else None
            try:
                yield
            finally:
                if attached is not None:
                    attached.detach()


WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "peft": ({}, 20.0),
    "peft_graphs": ({"compile": "graphs"}, 30.0),
    "peft_layerwise": ({"offload": "layerwise"}, 70.0),
}
"""By name: what is attached, and how many seconds it takes at full size."""


def run(bench: Bench, folder: Path, parts: Parts, only: Sequence[str]) -> None:
    for name, shape in shapes(bench.tiny).items() if "layers" in only else ():
        if parts.is_due(f"layers/{name}", 3.0):
            parts.note(f"layers/{name}", operations(shape, bench))
    bench.clear()
    ways = {name: way for name, way in WAYS.items() if name in only}
    if not any(parts.is_missing(name) for name in ways) or not parts.is_due("model", 30.0):
        return
    subject = Subject(bench, folder)
    step_ms, peak_gib = bench.pass_ms(subject.forward)
    parts.note("bare", {"step_ms": step_ms, "peak_gib": peak_gib})
    load_s = subject.load()
    parts.note("adapters", {"load_s_both": load_s, "gib_each": gib(subject.adapters.bytes["a"])})
    for name, (settings, takes_s) in ways.items():
        if not parts.is_due(name, takes_s):
            continue
        if "offload" in settings:
            settings = {"offload": {"mode": settings["offload"], "device": str(bench.device)}}
        with subject.attached(**settings):
            parts.note(name, subject.measure(*(FEW if "offload" in settings else MANY)))
        bench.clear()
    subject.adapters.close()


def judge(parts: Parts, tiny: bool) -> bool:
    """Whether the bits and the time of a switch are as they should be, as far as they were measured."""
    rows = [row for name in WAYS if (row := parts.get(name)) is not None]
    same = all(value for row in rows for name, value in row.items() if name.startswith("same_bits"))
    resident = parts.get("peft")
    switch_ms = 0.0 if resident is None else resident["switch_ms"]
    print(f"same bits: {same}; a switch takes {switch_ms:.1f} ms, the goal is {GOAL_MS:g}")
    return same and (switch_ms <= GOAL_MS or tiny)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    names = ("layers", *WAYS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some parts (all)")
    options = parser.parse_args()
    bench = Bench(torch.device("cpu" if options.tiny else "cuda"), options.tiny)
    parts = Parts(options, gpu_models.header(bench.device, "peft") | {"rank": RANK})
    with tempfile.TemporaryDirectory() as folder:
        run(bench, Path(folder), parts, options.only)
    code = parts.end()
    return code if judge(parts, options.tiny) else 1


if __name__ == "__main__":
    sys.exit(main())
