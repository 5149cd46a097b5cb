"""What does each way to share an attention cost, in time and bytes? Beside diffusers' own context parallel.

    python benchmarks/parallel.py [--ranks 2] [--tokens 1024] [--json FILE]
    python benchmarks/parallel.py --device cuda      the cost of a degree of one on a single GPU, which must be none

A Flux of a few wide blocks runs on real processes over gloo, one thread each, and once alone on one thread. The best
of several forwards is kept. diffusers' `enable_parallelism` does not run on a CPU; its parts do when they are put
together by hand, and that is what is measured here, where they can: its ring needs an attention that returns the
log-sum-exp, which torch's own does not.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist

from samovar.parallel import (
    Ranks,
    SequenceParallelConfig,
    disable_sequence_parallel_for_model,
    enable_sequence_parallel_for_model,
    make_mesh,
)

ROUNDS, TEXT = 5, 64


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


def best_of(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def in_diffusers(model: torch.nn.Module, ulysses: int, ring: int) -> None:
    """diffusers' context parallel, put together by hand for a CPU."""
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    settings = ContextParallelConfig(ulysses_degree=ulysses, ring_degree=ring)
    config = ParallelConfig(context_parallel_config=settings)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None:
            processor._parallel_config = config
    apply_context_parallel(model, config.context_parallel_config, model._cp_plan)


@torch.no_grad()
def measure(tokens: int, degrees: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """The rows of the table, on one rank of all."""
    given, rows = inputs(tokens), []
    expected = build()(**given)[0]

    def row(name: str, model: torch.nn.Module, sent: Callable[[], int] | None, plan: str) -> None:
        error = float((model(**given)[0] - expected).abs().max())
        before = sent() if sent else 0
        model(**given)
        num_bytes = sent() - before if sent else None
        dist.barrier()
        seconds = best_of(lambda: model(**given))
        rows.append({"strategy": name, "plan": plan, "seconds": seconds, "sent_bytes": num_bytes, "max_error": error})

    for name, settings in degrees.items():
        for plan in ("_cp_plan", "derived"):
            model = build()
            if plan == "derived":
                vars(model)["_cp_plan"] = None
            config = SequenceParallelConfig(**settings)
            enable_sequence_parallel_for_model(model, config)
            row(name, model, lambda config=config: make_mesh(config).traffic.total_bytes, plan)
            disable_sequence_parallel_for_model(model)
    for name, settings in (
        ("diffusers' ulysses", (dist.get_world_size(), 1)),
        ("diffusers' ring", (1, dist.get_world_size())),
    ):
        model = build()
        in_diffusers(model, *settings)
        try:
            row(name, model, None, "_cp_plan")
        except ValueError as error:
            rows.append({"strategy": name, "plan": "_cp_plan", "refused": str(error)})
    return rows


@torch.no_grad()
def alone(tokens: int) -> float:
    model, given = build(), inputs(tokens)
    model(**given)
    return best_of(lambda: model(**given))


@torch.no_grad()
def degree_of_one(tokens: int, device: str) -> dict[str, Any]:
    """A forward before and after enabling a degree of one, in turn, so that a busy machine disturbs both alike."""
    model = build(layers=8 if device == "cuda" else 1).to(device)
    given = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in inputs(tokens).items()}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def run() -> None:
        model(**given)
        wait()

    run()
    times: dict[str, float] = {"bare": float("inf"), "degree 1": float("inf")}
    for _ in range(20 if device == "cuda" else 4):
        times["bare"] = min(times["bare"], best_of(run))
        attached = enable_sequence_parallel_for_model(model, SequenceParallelConfig())
        times["degree 1"] = min(times["degree 1"], best_of(run))
        disable_sequence_parallel_for_model(model)
    return {"attached": attached is not None, **{f"{name} ms": 1000 * value for name, value in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"degree of one": degree_of_one(options.tokens, options.device)}
    print(f"degree 1 on {options.device}: {result['degree of one']}")
    if options.device == "cpu":
        strategies = ("ulysses", "ring", "gathered", *(("hybrid",) if options.ranks >= 4 else ()))
        configs = {name: SequenceParallelConfig.of_strategy(name, options.ranks) for name in strategies}
        degrees = {
            name: {
                "ulysses_degree": c.ulysses_degree,
                "ring_degree": c.ring_degree,
                "allgather_degree": c.allgather_degree,
            }
            for name, c in configs.items()
        }
        result |= {"ranks": options.ranks, "tokens": options.tokens, "alone_seconds": alone(options.tokens)}
        with Ranks(options.ranks, backend="gloo", num_threads=1) as ranks:
            result["rows"] = ranks.call(measure, options.tokens, degrees)[0]
        print(f"alone on one thread: {result['alone_seconds']:.3f} s")
        for row in result["rows"]:
            if "refused" in row:
                print(f"{row['strategy']:20} {row['plan']:10} refused: {row['refused']}")
                continue
            sent = "-" if row["sent_bytes"] is None else f"{row['sent_bytes'] / 1e6:.2f} MB"
            figures = f"{row['seconds']:7.3f} s {sent:>10} sent   {row['max_error']:.1e}"
            print(f"{row['strategy']:20} {row['plan']:10} {figures}")
    if options.json:
        about = {
            "command": f"python benchmarks/parallel.py --ranks {options.ranks} --tokens {options.tokens} "
            f"--device {options.device}",
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "processor": platform.machine(),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(about | result, indent=2) + "\n")


if __name__ == "__main__":
    main()
