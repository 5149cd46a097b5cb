"""Models of other people that are tried: the originals, out of checkouts, tiny, with random weights.

`make test-foreign FOREIGN=folder` runs them; the folder holds one checkout a repository, named `owner+name`. Nothing of
a repository is kept here: each file of this folder says for one family how a model is built and what a step of its
sampler hands to it. Importing this package imports no model: `CASES` is data, and `Case.build()` does the work.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .checkouts import World, world

VARIABLE = "SAMOVAR_FOREIGN"
"""The environment variable that names the folder of checkouts."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: by position, and by name."""
Steps = Callable[[float], Call]
"""What a model is called with at a step. Steps in between are allowed: two that are near differ little."""


class Missing(Exception):
    """A checkout, or a file of it, is not there."""


def folder() -> Path | None:
    """Where the checkouts are, if that was said."""
    name = os.environ.get(VARIABLE)
    return Path(name).expanduser().resolve() if name else None


@dataclass(frozen=True)
class Case:
    """One model class of one repository, with one kind of input."""

    model: str
    repository: str
    """As `owner/name`."""
    make: Callable[[], torch.nn.Module]
    """Imports the class and makes a tiny model; called with the checkout on the path."""
    inputs: Callable[[], Steps]
    """Begins a run: conditioning is made here, once; what it returns makes the rest anew at every step."""
    variant: str = ""
    """What is special about this case: "image-to-video" ... Empty for the plain one."""
    paths: tuple[str, ...] = ("",)
    """The folders of the checkout that are on the path."""
    needs: tuple[str, ...] = ()
    """Packages that have a stand-in for this case, though other repositories do without them."""
    init: str = "zeros"
    """Which weights are made anew: those that are all "zeros", or "all", where the model leaves its memory as it is."""
    notes: str = field(default="", compare=False)
    """What was patched, and what is to know; it goes into the table."""

    @property
    def id(self) -> str:
        name = f"{self.repository.split('/')[1]}-{self.model}"
        return f"{name}-{self.variant}" if self.variant else name

    def world(self) -> World:
        """The checkout; raises `Missing` if it is not there."""
        root = folder()
        if root is None:
            raise Missing(f"no folder of checkouts: make test-foreign FOREIGN=folder, or {VARIABLE}=folder")
        checkout = root / self.repository.replace("/", "+")
        if not checkout.is_dir():
            raise Missing(f"there is no {checkout.name} in the folder of checkouts")
        return world(checkout, self.paths, self.needs)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the checkout can be imported, and nothing is compiled, so that no C++ compiler is needed."""
        with self.world().inside(), torch.compiler.set_stance("force_eager"), torch.no_grad():
            yield

    def build(self, seed: int = 0) -> torch.nn.Module:
        """The model in eval mode, with nothing left at zero: a zero gate would hide errors."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self._made()
            for name, parameter in model.named_parameters():
                if self.init == "all":
                    _fill(name, parameter)
                elif not parameter.detach().any():
                    torch.nn.init.normal_(parameter, std=0.1)
        return model.eval().requires_grad_(False)

    def _made(self) -> torch.nn.Module:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Some print what they do.
                return self.make()
        except ModuleNotFoundError as error:
            raise Missing(f"{error.name} is neither in the checkout nor installed") from error


def of(path: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    """How a class is made with these settings; it is imported then."""

    def make() -> torch.nn.Module:
        module, _, name = path.rpartition(".")
        made: torch.nn.Module = getattr(importlib.import_module(module), name)(**settings)
        return made

    return make


def _fill(name: str, parameter: torch.nn.Parameter) -> None:
    """Weights of the size that layers start with: matrices that keep lengths, gains about one, small offsets."""
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    else:
        torch.nn.init.normal_(parameter, mean=float("bias" not in name), std=0.1)


# ------------------------------------------------------------------------------------------------ what goes in


def seeded(*key: object) -> torch.Generator:
    """A generator that depends on the key alone, so that equal calls give equal tensors."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def noise(step: float, *shape: int, name: str = "latents") -> torch.Tensor:
    """What is denoised: a new tensor at each step, near the last one as in a real run."""
    start, end = (torch.randn(shape, generator=seeded(name, shape, part)) for part in ("start", "end"))
    return start + 0.03 * step * (end - start)


def cond(name: str, *shape: int) -> torch.Tensor:
    """Conditioning: made once a run, and handed on as the same object at every step."""
    return torch.randn(shape, generator=seeded("cond", name, shape))


def time(step: float, batch: int = 1, scale: float = 1000.0) -> torch.Tensor:
    """The time of a step, from `scale` downwards, one for each item of the batch."""
    return torch.full((batch,), scale * (0.98 - 0.05 * step))


def rising(step: float, batch: int = 1) -> torch.Tensor:
    """The time of a step where it rises from 0 to 1, as flows are written by some."""
    return torch.full((batch,), 0.02 + 0.05 * step)


def label(*values: int) -> torch.Tensor:
    """Classes, or ids of tokens."""
    return torch.tensor(values)


def load() -> tuple[Case, ...]:
    """All cases of all files, by name."""
    found: list[Case] = []
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("test_"):
            cases: Iterable[Case] = getattr(importlib.import_module(f"{__name__}.{info.name}"), "CASES", ())
            found.extend(cases)
    ids = [case.id for case in found]
    assert len(ids) == len(set(ids)), "two cases of one name"
    return tuple(sorted(found, key=lambda case: case.id.lower()))


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of an output, whatever holds them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for item in value.values() for found in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in tensors(item)]
    return []
