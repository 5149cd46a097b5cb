"""Time and bytes of each way to share an attention, beside diffusers' own context parallel.

    python benchmarks/parallel.py [--ranks 2] [--tokens 1024] [--rounds 5] [--json FILE]
    python benchmarks/parallel.py --device cuda      the cost of a degree of one on a single GPU, which must be none

A Flux of a few wide blocks runs on real processes over gloo, one thread each. In each round every contestant runs once,
the first one alone on one rank while the others wait, so that a busy machine disturbs all alike; the best round of each
counts, and times are given as parts of that of one rank: `elapsed`, which needs as many idle cores as there are ranks
to mean anything, and `work`, the time that the processor spent in one rank, which does not. Bytes are what one rank
sends to others in a forward.

diffusers' `enable_parallelism` is called first, and what it says is kept. It does not run without an accelerator; its
parts do when they are put together by hand, and that is what is measured. Its ring needs an attention that returns the
log-sum-exp, which its one for CPUs does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils._python_dispatch import TorchDispatchMode

from samovar.hooks import HookRegistry
from samovar.parallel import SequenceParallelConfig, enable_sequence_parallel_for_model, join_world

TEXT = 64
Row = dict[str, Any]


def build(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=32,
        num_attention_heads=8, joint_attention_dim=64, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    return model.eval()


def inputs(tokens: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    side = int(tokens**0.5)
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(side)), torch.arange(float(tokens // side)))
    return {
        "hidden_states": torch.randn(1, len(ids), 16, generator=random),
        "encoder_hidden_states": torch.randn(1, TEXT, 64, generator=random),
        "pooled_projections": torch.randn(1, 32, generator=random),
        "timestep": torch.ones(1),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }


@dataclass
class Best:
    """The least of several times."""

    elapsed: float = math.inf
    work: float = math.inf
    """What the processor spent."""

    def time(self, run: Callable[[], Any]) -> None:
        elapsed, work = time.perf_counter(), time.process_time()
        run()
        self.elapsed = min(self.elapsed, time.perf_counter() - elapsed)
        self.work = min(self.work, time.process_time() - work)


# ------------------------------------------------------------------------------------------------ diffusers


class SentBytes(TorchDispatchMode):
    """Counts what torch's collectives send from this rank; diffusers uses the functional ones."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and isinstance(args[0], torch.Tensor):
            size, world = args[0].numel() * args[0].element_size(), dist.get_world_size()
            if "all_to_all" in func.name():
                self.total += size * (world - 1) // world
            elif "all_gather" in func.name():
                self.total += size * (world - 1)
        elif func.name() == "c10d::send":
            self.total += sum(tensor.numel() * tensor.element_size() for tensor in args[0])
        elif func.name() == "c10d::_allgather_base_":
            self.total += args[1].numel() * args[1].element_size() * (dist.get_world_size() - 1)
        elif func.name() == "c10d::alltoall_base_":
            self.total += (args[1].numel() - args[4][dist.get_rank()]) * args[1].element_size()
        return func(*args, **(kwargs or {}))


def why_not_as_it_is() -> str | None:
    """What diffusers' own way to switch it on says here; None if it works."""
    try:
        build().enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    except (ZeroDivisionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def by_hand(ulysses: int, ring: int) -> torch.nn.Module:
    """diffusers' context parallel, put together for a CPU."""
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    model = build()
    settings = ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring)
    config = ParallelConfig(context_parallel_config=settings)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None:
            processor._parallel_config = config
    apply_context_parallel(model, config.context_parallel_config, model._cp_plan)
    return model


# ------------------------------------------------------------------------------------------------ on each rank


@torch.no_grad()
def contestants(degrees: dict[str, dict[str, int]], given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Row]]:
    """Models by name, each run once, and what is known of them: bytes, and how far they are from one rank."""
    models: dict[str, Any] = {}
    rows: dict[str, Row] = {}
    expected = build()(**given)[0]

    def enter(name: str, model: torch.nn.Module) -> None:
        with SentBytes() as sent:
            error = float((model(**given)[0] - expected).abs().max())
        rows[name] = {"max_error": error, "sent_bytes": sent.total}
        models[name] = model

    for name, settings in degrees.items():
        for plan in ("_cp_plan", "derived plan"):
            model, config = build(), SequenceParallelConfig(**settings)
            if plan != "_cp_plan":
                vars(model)["_cp_plan"] = None
            enable_sequence_parallel_for_model(model, config)
            model(**given)  # The first forward also chooses the plan, and checks it.
            enter(f"{name}, {plan}", model)
    for name, sizes in {"ulysses": (dist.get_world_size(), 1), "ring": (1, dist.get_world_size())}.items():
        try:
            enter(f"diffusers' {name}, _cp_plan", by_hand(*sizes))
        except ValueError as error:
            rows[f"diffusers' {name}, _cp_plan"] = {"refused": str(error)}
    return models, rows


@torch.no_grad()
def measure(tokens: int, degrees: dict[str, dict[str, int]], rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    join_world(backend="gloo")
    given, bare = inputs(tokens), build()
    reason = why_not_as_it_is()
    models, rows = contestants(degrees, given)
    best, alone = {name: Best() for name in models}, Best()
    for _ in range(rounds):
        dist.barrier()
        if dist.get_rank() == 0:
            alone.time(lambda: bare(**given))
        for name, model in models.items():
            dist.barrier()
            best[name].time(lambda model=model: model(**given))
    for name, times in best.items():
        rows[name] |= {"elapsed": times.elapsed / alone.elapsed, "work": times.work / alone.work}
    return {
        "one_rank": {"elapsed_s": alone.elapsed, "work_s": alone.work},
        "enable_parallelism": reason or "works",
        "rows": rows,
    }


@torch.no_grad()
def degree_of_one(tokens: int, device: str, rounds: int) -> dict[str, Any]:
    """A forward before and after enabling a degree of one, in turn. Nothing is attached, so nothing can be slower."""
    model = build(layers=8 if device == "cuda" else 1).to(device)
    given = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in inputs(tokens).items()}

    def run() -> None:
        model(**given)
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    before = [(type(module), set(vars(module))) for module in model.modules()]
    bare, one = Best(), Best()
    for _ in range(4 * rounds):
        bare.time(run)
        with enable_sequence_parallel_for_model(model, SequenceParallelConfig()):
            one.time(run)
            hooks = sum(len(HookRegistry.get_or_create(module)._hooks) for module in model.modules())
            is_bare = [(type(module), set(vars(module))) for module in model.modules()] == before
    ratios = {"elapsed": one.elapsed / bare.elapsed, "work": one.work / bare.work}
    return {"hooks": hooks, "is_bare": is_bare, "bare_ms": 1000 * bare.elapsed, **ratios}


# ------------------------------------------------------------------------------------------------ the table


def degrees_of(strategy: str, ranks: int) -> dict[str, int]:
    config = SequenceParallelConfig.from_name(strategy, ranks)
    return {name: getattr(config, name) for name in ("ulysses_degree", "ring_degree", "allgather_degree")}


def show(result: dict[str, Any]) -> None:
    print(f"one rank: {result['one_rank']['elapsed_s']:.3f} s on one thread; below, parts of that")
    print(f"diffusers' enable_parallelism on this machine: {result['enable_parallelism']}")
    for name, row in result["rows"].items():
        if "refused" in row:
            print(f"{name:30} refused: {row['refused']}")
            continue
        sent = f"{row['sent_bytes'] / 1e6:6.2f} MB sent"
        times = f"elapsed {row['elapsed']:.2f}   work {row['work']:.2f}"
        print(f"{name:30} {times}   {sent}   error {row['max_error']:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = " ".join(f"--{name} {getattr(options, name)}" for name in ("ranks", "tokens", "rounds", "device"))
    result: dict[str, Any] = {
        "command": f"python benchmarks/parallel.py {command}",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "degree of one": degree_of_one(options.tokens, options.device, options.rounds),
    }
    print(f"degree 1 on {options.device}: {result['degree of one']}")
    if options.device == "cpu":
        result["load"] = os.getloadavg()[0]
        if result["load"] > (os.cpu_count() or 1) / 2:
            result["note"] = "The machine was busy with other work: elapsed times say little, work and bytes count."
        strategies = ("ulysses", "ring", "gathered", *(("hybrid",) if options.ranks >= 4 else ()))
        degrees = {name: degrees_of(name, options.ranks) for name in strategies}
        nodes = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
        launch = LaunchConfig(nproc_per_node=options.ranks, start_method="spawn", **nodes)
        result |= elastic_launch(launch, measure)(options.tokens, degrees, options.rounds)[0]
        show(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
