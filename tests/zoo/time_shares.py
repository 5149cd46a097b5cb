"""The share of each class that depends on time alone, written to `time_only.json`, for docs/reference/models.md.

    PYTHONPATH=src:tests python -m zoo.time_shares [CLASS ...]

Of the model that a class makes by default, without weights, in 16 bits. The layers are those at the paths that the
forward of the tiny model shows.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from samovar.arch.modules import named_parts, tensor_bytes, unwrapped
from samovar.core.errors import ModelError
from samovar.offload.sizes import read_parts, split_parts
from samovar.offload.time_layers import choose_layers
from samovar.trace.time_only import Tape, find_tape

from . import Case, load

FILE = Path(__file__).with_name("time_only.json")


def share_of(case: Case) -> dict[str, Any]:
    """The bytes of a class, and the share of it that depends on time alone."""
    try:
        (component, *_) = split_parts(read_parts(case.model, torch.bfloat16))
    except ModelError:
        return {"problem": "it has no default size"}
    size = tensor_bytes([component.module])
    found = {"gib": round(size / 2**30, 2)}
    with torch.compiler.set_stance("force_eager"):
        tape = find_tape(case.build(), (), case.inputs(0), 1)
    if tape.problem:
        return found | {"problem": tape.problem.splitlines()[0]}
    layers, _ = choose_layers(component, _alike(unwrapped(component.module), tape))
    return found | {"share": round(tensor_bytes(layers.values()) / size, 4)}


def _alike(model: torch.nn.Module, tape: Tape) -> list[str]:
    """The paths like those on a tape, whichever block they are in."""
    patterns = {re.sub(r"\\?\d+", r"\\d+", re.escape(path)) for path in tape.layers}
    return [path for path in named_parts(model) if any(re.fullmatch(pattern, path) for pattern in patterns)]


def main(names: list[str]) -> None:
    cases: dict[str, Case] = {}
    for case in load():
        if case.model not in cases or not case.variant:
            cases[case.model] = case
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in names or sorted(cases):
        found[name] = share_of(cases[name])
        print(name, found[name], file=sys.stderr, flush=True)
        text = json.dumps(dict(sorted(found.items())), indent=1)
        FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
