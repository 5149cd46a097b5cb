"""Streaming a quantised model, beside diffusers' group offload of the same model, in one run.

    python benchmarks/gpu_quantised.py --json benchmarks/results/gpu_quantised.json
    python benchmarks/gpu_quantised.py --models flux --kinds int8 gguf-q4     # some of it; the rest of the file stays
    python benchmarks/gpu_quantised.py --tiny                                 # the same on a CPU, to see that it runs

Whichever of the libraries can be imported take part; what fails is written down with its error. On a machine without
a network they can be carried in a folder, without what they ask for:

    pip install --no-deps --target carried torchao gguf sdnq bitsandbytes
    rm carried/torchao/*.so carried/bitsandbytes/lib*_{rocm,xpu}*.so carried/bitsandbytes/lib*_cuda1[12]*.so
    PYTHONPATH=src:carried python benchmarks/gpu_quantised.py ...

Times of passes are of several in a row between two synchronisations. "over_limit" is what a streamed pass takes more
than the longer of computing with everything on the device and of bringing the bytes over the bus.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_bench import GIB, PASSES, Bench, gib, is_same, resident_set_bytes
from gpu_offload import Ours
from gpu_quantisers import QUANTISERS

from samovar.hooks import HookRegistry, ModelHook
from samovar.offload import Offloaded

KINDS = ("int8", "fp8", "fp8-cast", "nf4", "gguf-q4", "sdnq-uint4")
BUDGETS = (2.0,)
"""GiB, beside the least."""


def group_offload(bench: Bench, subject: Ours) -> dict[str, Any]:
    """diffusers' group offload of the same quantised model, one block at a time with a stream."""
    from diffusers.hooks import apply_group_offloading

    grouped = {"onload_device": bench.device, "offload_type": "block_level", "num_blocks_per_group": 1}
    streams = {"use_stream": True, "non_blocking": True, "record_stream": True} if bench.is_cuda else {}
    bench.clear()
    before, start = resident_set_bytes(), time.perf_counter()
    found: dict[str, Any] = {}
    try:
        apply_group_offloading(subject.model, offload_device=torch.device("cpu"), **grouped, **streams)
        found["setup_s"] = round(time.perf_counter() - start, 2)
        ms, peak = bench.pass_ms(subject.forward)
        found |= {"ms": round(ms, 2), "peak_gib": peak, "same_bits": is_same(subject.forward(), subject.expected)}
    except Exception as error:  # Whatever another library raises is a result here.
        found["failed"] = f"{type(error).__name__}: {error}"[:400]
    return found | {"host_gib": gib(resident_set_bytes() - before)}


def over_limit(row: dict[str, Any], resident_ms: float) -> dict[str, Any]:
    bound = "bus" if row.get("bus_ms", 0.0) > resident_ms else "computing"
    limit = max(row.get("bus_ms", 0.0), resident_ms)
    return row | ({"over_limit": round(row["ms"] / limit - 1, 4), "bound": bound} if "ms" in row else {})


def streamed(subject: Ours, resident_ms: float) -> tuple[Offloaded, dict[str, Any]]:
    """At least memory as planned and once blocks were timed, in a step that is skipped, and within budgets."""
    offloaded, found = subject.set_up()
    found["least"] = over_limit(subject.measure(offloaded), resident_ms)
    found["skip"] = subject.skip(offloaded)
    found |= subject.learn(offloaded)
    found["least_measured"] = over_limit(subject.measure(offloaded), resident_ms)
    whole = offloaded.plan.component("transformer").num_bytes
    sizes = [whole * 3 // 4 + 2**30] if subject.bench.tiny else [int(budget * GIB) for budget in BUDGETS]
    rows = [over_limit(subject.within(offloaded, size), resident_ms) for size in sizes]
    for row in rows:
        row["over_resident"] = round(row["ms"] / resident_ms - 1, 4) if "ms" in row else None
    return offloaded, found | {"within": rows}


@torch.no_grad()
def measure(bench: Bench, name: str, kind: str) -> Iterator[dict[str, Any]]:
    """Everything about one model in one kind: first ours, then beside the peer, which may end the process."""
    model = gpu_models.build(name, bench.device, bench.dtype, tiny=bench.tiny)
    start = time.perf_counter()
    try:
        QUANTISERS[kind](model, bench.dtype)
    except (ImportError, AssertionError, ValueError, NotImplementedError) as error:
        yield {"failed": f"{type(error).__name__}: {error}"[:400]}
        return
    bench.sync()
    found: dict[str, Any] = {"quantise_s": round(time.perf_counter() - start, 1)}
    subject = Ours(bench, name, model)
    bench.clear()
    try:
        found["resident"] = subject.resident(2 * PASSES)
    except Exception as error:  # A library that does not run here.
        yield found | {"failed": f"{type(error).__name__}: {error}"[:400]}
        return
    gpu_models.to_host(model)
    offloaded, rows = streamed(subject, found["resident"]["ms"])
    offloaded.detach()
    found |= rows
    found["same_bits"] = all(row.get("same_bits", True) for row in (rows["least"], rows["least_measured"]))
    yield found | {"group_offload": {"failed": "The process ended."}}
    yield found | {"group_offload": group_offload(bench, subject)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=gpu_models.NAMES, default=list(gpu_models.NAMES))
    parser.add_argument("--kinds", nargs="+", choices=QUANTISERS, default=list(KINDS))
    parser.add_argument("--device", default=None)
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--json", type=Path, default=None, help="where the result is written, after each kind")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cpu" if arguments.tiny else "cuda"))
    bench = Bench(device, arguments.tiny)
    HookRegistry.get_or_create(torch.nn.Linear(1, 1)).register_hook("first", ModelHook())  # Loads torch's compiler.
    result: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        read = json.loads(arguments.json.read_text())
        result = {name: found for name, found in read.items() if name in gpu_models.NAMES}
    result = gpu_models.header(device) | {"bus": bench.bus()} | result
    for name in arguments.models:
        for kind in arguments.kinds:
            start = time.perf_counter()
            for found in measure(bench, name, kind):
                result.setdefault(name, {})[kind] = found | {"part_s": round(time.perf_counter() - start, 1)}
                if arguments.json is not None:
                    gpu_models.write(arguments.json, result)
            print(name, kind, json.dumps(result[name][kind], indent=1), flush=True)
            bench.clear()


if __name__ == "__main__":
    main()
