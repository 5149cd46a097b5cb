"""What the tests of the cache drive: pipelines, loops of a user's own, and a model that is none of diffusers'."""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zoo
from pipelines import PIPELINES, TinyPipeline
from samovar.cache import PipelineStats, TeaCacheBackend, TeaCacheHook
from samovar.hooks import HookOrder, HookRegistry, ModelHook, call_context, running

INFINITE = float("inf")
UNGUARDED: Mapping[str, Any] = {"max_skips": None, "min_steps": 0, "last_steps": 0}
"""Plain TeaCache: no step but the first is computed for any other reason than its signal."""


def case(name: str) -> zoo.Case:
    """A tiny model of the zoo."""
    found = _cases()[name]
    if found.model not in zoo.exported_classes():
        pytest.skip(f"the installed diffusers has no {found.model}")
    return found


@functools.cache
def _cases() -> dict[str, zoo.Case]:
    return {found.id: found for found in zoo.load()}


# ------------------------------------------------------------------------------------------------ pipelines


class Driven(TeaCacheBackend):
    """TeaCache on one pipeline."""

    def __init__(self, pipe: Any, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.handle = self.enable(pipe)


def cached(pipe: Any, **settings: Any) -> Driven:
    """TeaCache on a pipeline, without guards unless they are asked for."""
    return Driven(pipe, {**UNGUARDED, **settings})


def hook_on(module: torch.nn.Module) -> TeaCacheHook:
    """The hook that a backend put on a denoiser."""
    hook = HookRegistry.get_or_create(module).get_hook("teacache")
    assert isinstance(hook, TeaCacheHook)
    return hook


def hooks_of(tiny: TinyPipeline, pipe: Any) -> list[TeaCacheHook]:
    return [hook_on(getattr(pipe, name)) for name in tiny.denoisers]


def masks(stats: PipelineStats) -> list[str]:
    """What was computed, for each denoiser and each of its branches."""
    return [branch.mask for denoiser in stats.denoisers.values() for branch in denoiser.branches.values()]


def second(pipe: Any) -> Any:
    """Another pipeline of the same denoiser. All else is its own: text encoders do not bear two threads at a time."""
    own = {name: copy.deepcopy(part) for name, part in pipe.components.items() if name != "transformer"}
    other = type(pipe)(transformer=pipe.transformer, **own)
    other.set_progress_bar_config(disable=True)
    return other


flux: TinyPipeline = PIPELINES["flux"]
qwen: TinyPipeline = PIPELINES["qwen-image"]


class Recorder(ModelHook):
    """Notes what the denoiser is called with: each call once, however often the cache runs its forward."""

    order = HookOrder.OUTERMOST

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.outputs: list[Any] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls.append((args, dict(kwargs)))
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self.outputs.append(output[0] if isinstance(output, tuple) else output)
        return output


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[Recorder]:
    recorder, registry = Recorder(), HookRegistry.get_or_create(module)
    registry.register_hook("recorder", recorder)
    yield recorder
    registry.remove_hook("recorder")


@contextmanager
def counted(modules: Iterable[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """The modules among these that really run, call by call."""
    calls: list[torch.nn.Module] = []
    handles = [module.register_forward_pre_hook(lambda module, _: calls.append(module)) for module in modules]
    yield calls
    for handle in handles:
        handle.remove()


class Stepped:
    """A loop whose scheduler says which step it is, so that any sample at any time can be a step of it."""

    def __init__(self, transformer: torch.nn.Module, steps: int = 1000) -> None:
        self.transformer = transformer
        self.scheduler = types.SimpleNamespace(timesteps=list(range(steps)), _step_index=-1)
        self._num_timesteps = steps

    def call(self, call: Callable[[], Any]) -> Any:
        """One step of the loop."""
        self.scheduler._step_index += 1
        return call()


@contextmanager
def stepped(model: torch.nn.Module, steps: int = 1000) -> Iterator[Stepped]:
    """A run of such a loop."""
    loop = Stepped(model, steps)
    with running(loop):
        yield loop


# ------------------------------------------------------------------------------------------------ a model of one's own


class Attention(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_qkv = torch.nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        return torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.attn = Attention(width)
        self.ff = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm(x) * (1 + temb))
        return x + self.ff(x).tanh()


class Plain(torch.nn.Module):
    """A denoiser as a library other than diffusers might have it; tests make variants of its `embed` and `run`."""

    width = 8

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed_x = torch.nn.Linear(4, self.width)
            self.embed_t = torch.nn.Linear(1, self.width)
            self.embed_c = torch.nn.Linear(4, self.width)
            self.blocks = torch.nn.ModuleList(self.block() for _ in range(num_blocks))
            self.unembed = torch.nn.Linear(self.width, 4)

    def block(self) -> torch.nn.Module:
        return Block(self.width)

    def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        temb: torch.Tensor = self.embed_t(time[:, None].to(conditioning)) + self.embed_c(conditioning)
        return temb[:, None]

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, temb)
        return x

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        temb = self.embed(timestep, encoder_hidden_states)
        output: torch.Tensor = self.unembed(self.run(self.embed_x(hidden_states), temb))
        return output


class Leaking(Plain):
    """Its blocks hand something to the end of the forward behind everybody's back."""

    class Block(Block):
        leak: list[torch.Tensor]

        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            self.leak.append(x.mean(dim=1, keepdim=True))
            return super().forward(x, temb)

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        leak: list[torch.Tensor] = []
        for block in self.blocks:
            block.leak = leak
        x = super().run(x, temb)
        return x + sum(leak)


COND, UNCOND = zoo.cond("cond", 1, 4), zoo.cond("uncond", 1, 4)


def at(step: int, steps: int = 12, name: str = "latents") -> tuple[torch.Tensor, torch.Tensor]:
    """Sample and time of a step."""
    return zoo.noise(step, 1, 5, 4, name=name), torch.full((1,), 1.0 - step / steps)


@torch.no_grad()
def loop(
    model: torch.nn.Module, steps: int = 12, conditioning: torch.Tensor = COND, branch: str = "only", name: str = "x"
) -> list[torch.Tensor]:
    """A user's own loop over one branch, which goes the same way whatever the model says."""
    with call_context(branch=branch):
        return [model(*at(step, steps, name), conditioning) for step in range(steps)]


def differing(found: Sequence[Any], expected: Sequence[Any]) -> list[int]:
    """Which of two lists of outputs are not the same, bit for bit."""
    return [index for index, pair in enumerate(zip(found, expected, strict=True)) if not zoo.equal(*pair)]


def state_of(model: torch.nn.Module) -> list[tuple[type, set[str]]]:
    """What hooks leave on modules: another class, and entries of their own."""
    return [(type(module), set(vars(module))) for module in model.modules()]


def tensors_in(*roots: Any) -> list[torch.Tensor]:
    """All tensors with data that objects of ours hold, each once; modules and their parameters are not ours."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, (torch.nn.Module, type, types.FunctionType, str)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.device.type != "meta" and not isinstance(item, torch.nn.Parameter):
                found[id(item)] = item
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            stack += item
        elif type(item).__module__.startswith("samovar."):
            stack += getattr(item, "__dict__", {}).values()
            stack += [getattr(item, name, None) for name in getattr(type(item), "__slots__", ())]
    return list(found.values())
