"""The models that we try: every transformer that diffusers exports, tiny, with random weights.

Each file of this folder holds some families. A `Case` says how to build one model, what to feed it at
a given denoising step; its anatomy is in anatomies.json. Importing this package imports no model: `CASES` is data,
`Case.build()` does the work.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

Inputs = Callable[[int], dict[str, Any]]
ANATOMIES = Path(__file__).with_name("anatomies.json")

UNSERVED: dict[str, str] = {}
"""Classes that cannot be served, each with the reason. They are listed in docs/reference/models.md. May only shrink."""


def _waiting(operation: str) -> str:
    return f"waits for the device ({operation})"


def _unordered(operation: str) -> str:
    return f"adds up in no fixed order ({operation})"


UNREPLAYED: dict[str, str] = {
    "Cosmos3OmniTransformer": _unordered("scatter_add"),
    "GlmImageTransformer2DModel": _waiting("index with a mask"),
    "HiDreamImageTransformer2DModel": _waiting("bincount"),
    "HunyuanVideo15Transformer3DModel": _waiting("_local_scalar_dense"),
    "HunyuanVideoFramepackTransformer3DModel": _waiting("_local_scalar_dense"),
    "MochiTransformer3DModel": _waiting("nonzero"),
    "NucleusMoEImageTransformer2DModel": _unordered("scatter_add_"),
    "OmniGenTransformer2DModel": _waiting("_local_scalar_dense"),
    "QwenImage21Transformer2DModel": _waiting("repeat_interleave"),
    "RFD4ProteinaTransformer": _waiting("_local_scalar_dense"),
    "SanaWMTransformer3DModel": _waiting("index_put_ with a mask"),
    "WanAnimate2Transformer3DModel": _waiting("_local_scalar_dense"),
}
"""Classes whose forward no graph can replay: what it does, and in which operation."""


def exported_classes() -> set[str]:
    """The transformer classes of the installed diffusers."""
    import diffusers.models.transformers as transformers

    found = {name: getattr(transformers, name) for name in dir(transformers)}
    return {name for name, cls in found.items() if inspect.isclass(cls) and issubclass(cls, torch.nn.Module)}


def equal(one: Any, other: Any) -> bool:
    """Whether two outputs are the same, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return True


def as_built(model: Any) -> Any:
    """The model or pipeline, with its weights at the start of a cache line each, as torch allocates them.

    Those that were read from a safetensors file begin at any multiple of eight bytes, and on some processors the
    libraries that multiply matrices round differently there: such a copy may be compared bit for bit only after this.
    """
    parts = [part for part in getattr(model, "components", {"": model}).values() if isinstance(part, torch.nn.Module)]
    for tensor in (tensor for part in parts for tensor in (*part.parameters(), *part.buffers())):
        tensor.data = tensor.data.clone()
    return model


class Stack(NamedTuple):
    """The anatomy of one stack of repeated blocks.

    `carried` follows the order of the block's return value: the block parameter into which the next block takes that
    value, or None for a value that no parameter carries. `kinds` says, in the same order, what the stream's tokens are
    made of: the inputs that are denoised ("image", though a frame in them may be given), conditioning alone ("text"),
    some of each ("joint"), None if uncarried.
    """

    path: str
    count: int
    block: str
    carried: list[str | None]
    kinds: list[str | None]


@functools.cache
def _anatomies() -> dict[str, Any]:
    """By case: its stacks in the order in which they run, and the modules between blocks that are no stack of their
    own, as found and compared with the model's source by a person. `python -m zoo.table --write` finds them anew."""
    found: dict[str, Any] = json.loads(ANATOMIES.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True)
class Case:
    """One model class in one configuration with one kind of input."""

    model: str
    config: Mapping[str, Any]
    inputs: Inputs
    variant: str = ""
    """What is special about this case: "controlnet", "image-to-video" ... Empty for the plain one."""
    notes: str = field(default="", compare=False)

    @property
    def id(self) -> str:
        return f"{self.model}-{self.variant}" if self.variant else self.model

    @property
    def stacks(self) -> list[Stack]:
        return [Stack(*stack) for stack in _anatomies()[self.id]["stacks"]]

    @property
    def side(self) -> list[str]:
        return list(_anatomies()[self.id].get("side", ()))

    def build(self, seed: int = 0) -> torch.nn.Module:
        """The model in float32 and eval mode, with nothing left at zero: a zero gate would hide errors.

        Nor is anything left uninitialised, as some classes of older diffusers do.
        """
        import diffusers.models.transformers as transformers

        with torch.random.fork_rng(devices=[]), mock.patch("torch.empty", torch.zeros):
            torch.manual_seed(seed)
            model: torch.nn.Module = getattr(transformers, self.model)(**self.config)
            for parameter in model.parameters():
                if not parameter.detach().any():
                    torch.nn.init.normal_(parameter, std=0.1)
        return model.eval()

    @torch.no_grad()
    def run(self, model: torch.nn.Module, step: int = 0) -> Any:
        """One forward, as a tuple or tensor. Nothing is compiled, so that no C++ compiler is needed."""
        plain = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
        with torch.compiler.set_stance("force_eager"):
            return model(**self.inputs(step), **plain)


def seeded(*key: object) -> torch.Generator:
    """A generator that depends on the key alone, so that equal calls give equal tensors."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def noise(step: int, *shape: int, name: str = "latents") -> torch.Tensor:
    """What is denoised: another tensor at each step, near the last one as in a real run."""
    start = torch.randn(shape, generator=seeded(name, shape))
    return start + 0.05 * step * torch.randn(shape, generator=seeded(name, shape, step))


def cond(name: str, *shape: int) -> torch.Tensor:
    """Conditioning: the same at every step."""
    return torch.randn(shape, generator=seeded("cond", name, shape))


def time(step: int, batch: int = 1, scale: float = 1000.0) -> torch.Tensor:
    """The timestep of a step, from `scale` downwards, one for each item of the batch."""
    return torch.full((batch,), scale * (1.0 - 0.05 * step))


def tokens(name: str, *shape: int, vocabulary: int = 16) -> torch.Tensor:
    """Token ids: the same at every step."""
    return torch.randint(0, vocabulary, shape, generator=seeded("tokens", name, shape))


def load() -> tuple[Case, ...]:
    """All cases of all files, by name."""
    found: list[Case] = []
    for info in pkgutil.iter_modules(__path__):
        if info.name.startswith("test_"):
            continue
        cases: Iterable[Case] = getattr(importlib.import_module(f"{__name__}.{info.name}"), "CASES", ())
        found.extend(cases)
    ids = [case.id for case in found]
    assert len(ids) == len(set(ids)), "two cases of one name"
    return tuple(sorted(found, key=lambda case: case.id))
