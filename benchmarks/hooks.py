"""The cost of a hook per call, beside diffusers' own registry, in one run.

    python benchmarks/hooks.py [--json FILE]

A module that does nothing is called with 0, 1 and 4 hooks that do nothing before and after it. The best of many
short rounds is kept, ours and theirs in turn, so that a busy machine disturbs both alike.
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
import diffusers.hooks.hooks as theirs
import torch

from samovar.hooks import HookRegistry, ModelHook

CALLS, ROUNDS = 2_000, 400


class Nothing(torch.nn.Module):
    """Does nothing, but has a parameter, as every module worth hooking has or contains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: int) -> int:
        return x


class Ours(ModelHook):
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output


class Theirs(theirs.ModelHook):
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output


def with_ours(count: int) -> torch.nn.Module:
    """A module with hooks of ours; with none left, one that had a hook before."""
    module = Nothing()
    registry = HookRegistry.get_or_create(module)
    registry.register_hook("once", Ours())
    registry.remove_hook("once")
    for index in range(count):
        registry.register_hook(str(index), Ours())
    return module


def with_theirs(count: int) -> torch.nn.Module:
    module = Nothing()
    registry = theirs.HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Theirs(), "once")
    registry.remove_hook("once")
    for index in range(count):
        registry.register_hook(Theirs(), str(index))
    return module


def one_round(call: Callable[[int], int]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call(0)
    return (time.perf_counter() - start) / CALLS * 1e9


def measure() -> list[dict[str, Any]]:
    bare = Nothing()
    rows = []
    for count in (0, 1, 4):
        contestants = {"bare": bare, "ours": with_ours(count), "diffusers": with_theirs(count)}
        best = dict.fromkeys(contestants, float("inf"))
        for _ in range(ROUNDS):
            for name, module in contestants.items():
                best[name] = min(best[name], one_round(module))
        added = {name: best[name] - best["bare"] for name in ("ours", "diffusers")}
        rows.append({"hooks": count, **{f"{name}_ns": round(value) for name, value in best.items()},
                     "ours_added_ns": round(added["ours"]), "diffusers_added_ns": round(added["diffusers"]),
                     "ratio_of_added": round(added["ours"] / added["diffusers"], 2) if count else None})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    rows = measure()
    print("hooks   bare call   with ours   with diffusers'   added by ours / by diffusers'")
    for row in rows:
        ratio = f"{row['ratio_of_added']:.2f}" if row["hooks"] else "-"
        print(f"{row['hooks']:5}{row['bare_ns']:9} ns{row['ours_ns']:9} ns{row['diffusers_ns']:15} ns   "
              f"{row['ours_added_ns']:6} / {row['diffusers_added_ns']} ns = {ratio}")  # fmt: skip
    if options.json:
        about = {"command": "python benchmarks/hooks.py", "date": date.today().isoformat(),
                 "python": platform.python_version(), "torch": torch.__version__,
                 "diffusers": diffusers.__version__, "processor": platform.machine()}  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
