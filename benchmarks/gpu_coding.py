"""Speed and size of coded weights on a GPU, beside a plain copy of the same bytes.

    python benchmarks/gpu_coding.py [--quick] [--json benchmarks/results/gpu_coding.json]

Every decoded tensor is compared with the original bit for bit, and a variant of the kernel that differs is said to.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_models
import torch

from samovar.offload import coding
from samovar.offload.coding import Coded, decode_into, encode

MEGABYTES = (19, 75, 94, 113)
VARIANTS = {"no asm": {"asm": False}}
TOGETHER = 10
"""Launches that are timed together, as they follow each other in a stream; each on other memory."""


def milliseconds(calls: Sequence[Callable[[], object]], times: int = 20) -> float:
    """The median time of a call on the device, of some that follow each other."""
    for call in calls:
        call()
    taken = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # The host is ahead when the first one starts.
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / len(calls))
    return sorted(taken)[times // 2]


def host_microseconds(call: Callable[[], object], times: int = 200) -> float:
    """What one call takes of the host's time, beside the device's."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / times * 1e6


def weights(kind: str, count: int, device: torch.device) -> torch.Tensor:
    """Random weights of a distribution."""
    generator = torch.Generator(device).manual_seed(0)
    normal = partial(torch.randn, count, generator=generator, device=device)
    uniform = partial(torch.rand, count, generator=generator, device=device)
    if kind == "normal":
        drawn = normal() * 0.02
    elif kind == "uniform":
        drawn = uniform() * 0.04 - 0.02
    elif kind == "laplace":
        drawn = -uniform().log() * 0.02 * normal().sign()
    elif kind == "outliers":
        drawn = torch.where(uniform() < 0.05, normal(), normal() * 0.02)
    elif kind == "rows of other scales":
        drawn = normal() * 0.02 * (torch.arange(count, device=device) // 4096 % 16 - 8).float().exp2()
    elif kind == "sparse":
        drawn = torch.where(uniform() < 0.5, 0.0, normal() * 0.02)
    else:
        return torch.randint(-(2**15), 2**15, (count,), generator=generator, device=device, dtype=torch.int16).view(
            torch.bfloat16
        )
    return drawn.to(torch.bfloat16)


def report_sizes(count: int, device: torch.device) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"{'weights':<22}{'bits':>7}{'share':>8}{'escapes':>9}{'decode':>13}  same bits")
    for kind in ("normal", "uniform", "laplace", "outliers", "rows of other scales", "sparse", "random bits"):
        words = weights(kind, count, device)
        coded = encode(words)
        row = {"weights": kind, "dtype": "bfloat16", "bits": 16.0}
        rows.append(row)
        if coded is None:
            print(f"{kind:<22}{16:>7}{1:>8}  left raw")
            continue
        form, out = coded.form, torch.empty(words.numel() * 2, dtype=torch.uint8, device=device)
        decode = partial(decode_into, form, coded.data, out)
        speed = form.raw_bytes / milliseconds([decode] * TOGETHER) / 1e6
        same = same_bits(out, words)
        bits, share = form.num_bytes * 8 / count, form.num_bytes / form.raw_bytes
        escapes = form.num_escapes / count
        print(f"{kind:<22}{bits:>7.2f}{share:>8.3f}{escapes:>9.2%}{speed:>8.0f} GB/s  {same}")
        row |= {"bits": round(bits, 3), "escapes": round(escapes, 4), "gb_s": round(speed), "bits_are": same}
    return rows


def same_bits(out: torch.Tensor, words: torch.Tensor) -> str:
    return "same" if torch.equal(out, words.view(torch.uint8)) else "DIFFERENT"


def report_kernels(device: torch.device) -> dict[str, Any]:
    """GB/s of output by variant and size; without a variant's name, as it is used."""
    from samovar.offload.decode_kernel import decode

    found: dict[str, Any] = {"megabytes": MEGABYTES}
    print(f"\n{'GB/s of decoded weights':<30}" + "".join(f"{size:>9} MB" for size in MEGABYTES) + "   bits")
    cases: list[tuple[torch.Tensor, list[Coded], list[torch.Tensor]]] = []
    for size in MEGABYTES:
        words = weights("normal", size * 10**6 // 2 // coding.TILE * coding.TILE, device)
        coded = encode(words)
        assert coded is not None
        copies = [Coded(coded.form, coded.data.clone()) for _ in range(TOGETHER)]
        cases.append((words, copies, [torch.empty_like(words).view(torch.uint8) for _ in copies]))
    rows = {"as used": decode} | {name: partial(decode, **options) for name, options in VARIANTS.items()}
    bits = cases[-1][1][0].form.num_bytes * 8 / cases[-1][0].numel()
    by_variant = found["bfloat16"] = {"bits": round(bits, 3)}
    for name, call in {**rows, "torch operations": coding.decode}.items():
        speeds, same = [], set()
        for words, copies, outs in cases:
            pairs = list(zip(copies, outs, strict=True))[: 1 if call is coding.decode else TOGETHER]
            calls = [partial(call, copy.form, copy.data, out) for copy, out in pairs]
            speeds.append(words.numel() * 2 / milliseconds(calls) / 1e6)
            same |= {same_bits(out, words) for _, out in pairs}
        print(f"{name:<30}" + "".join(f"{s:>12.0f}" for s in speeds), *same, flush=True)
        by_variant[name] = {"gb_s": [round(speed) for speed in speeds], "bits_are": sorted(same)}
    speeds = []
    for words, _, outs in cases:
        calls = [partial(out.copy_, words.view(torch.uint8)) for out in outs]
        speeds.append(words.numel() * 2 / milliseconds(calls) / 1e6)
    print(f"{'a plain copy':<30}" + "".join(f"{speed:>12.0f}" for speed in speeds))
    by_variant["a plain copy"] = {"gb_s": [round(speed) for speed in speeds]}
    _, copies, outs = cases[0]
    launch = partial(decode_into, copies[0].form, copies[0].data, outs[0])
    found["host_us"] = round(host_microseconds(launch), 1)
    print(f"A call of decode_into takes {found['host_us']:.0f} microseconds of the host.")
    return found


def report_encoding(device: torch.device, gigabytes: float) -> dict[str, float]:
    found = {}
    count = int(94e6) // 2 // coding.TILE * coding.TILE
    words = weights("normal", count, device)
    times = max(int(gigabytes * 1e9 / (count * 2)), 1)
    encode(words)
    for name, source in (("device", words), ("host (pageable)", words.cpu())):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        for _ in range(times):
            encode(source, device=device)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        beside = (torch.cuda.max_memory_allocated() - before) / 2**20
        speed = times * count * 2 / seconds / 1e9
        print(
            f"Coding from the {name}: {speed:.1f} GB/s, {24 * 2**30 / speed / 1e9:.1f} s for 24 GiB; {beside:.0f} MiB"
        )
        found[name] = round(speed, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer weights")
    parser.add_argument("--json", type=Path, default=None, help="where the result is written")
    arguments = parser.parse_args()
    quick = arguments.quick
    if not torch.cuda.is_available():
        sys.exit("This needs a GPU.")
    device = torch.device("cuda", 0)
    print(torch.cuda.get_device_name(device), "torch", torch.__version__, flush=True)
    result = gpu_models.header(device)
    result["sizes"] = report_sizes(2**20 if quick else 2**25, device)
    result["decode_gb_s"] = report_kernels(device)
    result["encode_gb_s"] = report_encoding(device, 1 if quick else 10)
    if arguments.json is not None:
        gpu_models.write(arguments.json, result)


if __name__ == "__main__":
    main()
