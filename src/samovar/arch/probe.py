"""What do the blocks really carry? One forward of the model, watched.

It gives the order in which stacks run, which modules run between their blocks, and through which
parameter each returned value reaches the next block: by identity of the tensors, and where the model
makes a new tensor in between, by shape.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import DeclarationError, ModelError
from .blocks import Anatomy, BlockStack, Stream, find_anatomy, in_form_of, output_values
from .declarations import declaration_for
from .kinds import Inputs, run_model, with_kinds
from .modules import is_container, named_parts, parameters_of, unwrapped


def probe_anatomy(model: torch.nn.Module, inputs: Inputs, later_inputs: Inputs | None = None) -> Anatomy:
    """A transformer's anatomy, confirmed by running it.

    `inputs` are the keyword arguments of one denoising step, `later_inputs` those of a later one: what
    differs between them is the sample. Without them, streams get no kind.
    """
    model = unwrapped(model)
    anatomy = find_anatomy(model)
    if not anatomy.stacks:
        raise ModelError(
            f"No stack of blocks was found in {anatomy.model_class}: no list of modules that are built "
            "alike and add to what they are given. Declare it: register_declaration(class_name, "
            "BlockDeclaration(stacks=(path, ...)))."
        )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        watcher = Watcher(model, anatomy)
        watcher.watch(inputs)
        anatomy = watcher.anatomy()
        if later_inputs is not None:
            anatomy = with_kinds(model, anatomy, watcher.returned, inputs, later_inputs)
    return replace(anatomy, leader=_leader(anatomy, declaration_for(model).leader))


def probe_pipeline(pipeline: Any, denoiser: torch.nn.Module, **settings: Any) -> Anatomy:
    """The anatomy of a pipeline's denoiser, from two steps of the pipeline itself, called with `settings`."""
    calls: list[dict[str, Any]] = []
    denoiser = unwrapped(denoiser)
    parameters = parameters_of(denoiser)
    settings = {"prompt": "a samovar", "num_inference_steps": 2, "output_type": "latent"} | settings

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(dict(zip(parameters, args, strict=False)) | kwargs)

    handle = denoiser.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.compiler.set_stance("force_eager"):  # Two steps are not worth a compilation.
            pipeline(**settings)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{type(pipeline).__name__} could not be run with the settings {settings}: {error} Give the settings that "
            f"it needs, or probe its {type(denoiser).__name__} with inputs of your own: probe_anatomy."
        ) from error
    finally:
        handle.remove()
    if len(calls) < 2:
        raise ModelError(
            f"{type(pipeline).__name__} called its {type(denoiser).__name__} {len(calls)} times in two steps; at least "
            "two calls are needed to see what a step changes. Probe it with inputs of your own: probe_anatomy."
        )
    # However many branches there are, the call half-way is the first branch of the second step.
    return probe_anatomy(denoiser, calls[0], calls[len(calls) // 2])


def _leader(anatomy: Anatomy, declared: str | None) -> str:
    """The declared leader if it ran, else the first stack that sees what is denoised."""
    if declared in [stack.path for stack in anatomy.stacks]:
        return declared
    for stack in anatomy.stacks:
        if any(stream.kind in ("image", "joint") for stream in stack.streams):
            return stack.path
    return anatomy.stacks[0].path


@dataclass
class _Call:
    """One call of a block, as long as it is needed."""

    arguments: dict[str, Any]
    output: Any = None


@dataclass
class _Carry:
    """The parameters through which one returned value may have gone on."""

    by_identity: set[str] = field(default_factory=set)
    by_shape: set[str] | None = None


def other_modules(model: torch.nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, torch.nn.Module]]:
    """The children of all containers that are not in a block, with their container's path."""
    stacks = tuple(stack.path for stack in anatomy.stacks)
    for path, container in named_parts(model).items():
        inside = path in stacks or path.startswith(tuple(f"{stack}." for stack in stacks))
        if is_container(container) and not inside:
            for child in container.children():
                yield path, child


class Watcher:
    """Notes what a forward does with the blocks, keeping no more than one call of each stack.

    `watch` runs the forward itself; others, who see the calls anyway, tell it of each.
    """

    def __init__(self, model: torch.nn.Module, anatomy: Anatomy) -> None:
        self._model = model
        self._structure = anatomy
        self._last: dict[str, _Call] = {}
        self.order: list[str] = []
        """The container of each call, one after the other."""
        self.carries: dict[str, dict[int, _Carry]] = defaultdict(lambda: defaultdict(_Carry))
        """By stack and position in the output."""
        self.changing: dict[str, set[str]] = defaultdict(set)
        """By stack: the parameters that did not get the same value at every call."""
        self.returned: dict[torch.nn.Module, Any] = {}
        """By block: what it returned, as tensors without data."""

    def watch(self, inputs: Inputs) -> None:
        with contextlib.ExitStack() as removals:
            for stack in self._structure.stacks:
                for block in dict.fromkeys(stack.modules(self._model)):
                    before = functools.partial(self.before_block, stack)
                    after = functools.partial(self.after_block, stack)
                    removals.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                    removals.callback(block.register_forward_hook(after).remove)
            for path, child in other_modules(self._model, self._structure):
                before = functools.partial(self.before_other, path)
                removals.callback(child.register_forward_pre_hook(before).remove)
            run_model(self._model, inputs)

    def anatomy(self) -> Anatomy:
        """The anatomy as structure and what was seen of the forward tell it."""
        return _confirm(self._model, self._structure, self)

    def before_other(self, path: str, *_: Any) -> None:
        """Told before a module that is no block, but a member of the container at this path, is called."""
        self.order.append(path)

    def before_block(self, stack: BlockStack, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Told before a block of a stack is called."""
        call = _Call(stack.arguments(module, args, kwargs))
        if stack.path in self._last:
            self._compare(stack.path, self._last[stack.path], call)
        self.order.append(stack.path)
        self._last[stack.path] = call

    def after_block(self, stack: BlockStack, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Told when it has returned."""
        self._last[stack.path].output = output
        self.returned[module] = _without_data(output)

    def _compare(self, path: str, earlier: _Call, later: _Call) -> None:
        """Note through which parameters of the later call the earlier one's values may have gone on."""
        tensors = {name: value for name, value in later.arguments.items() if isinstance(value, torch.Tensor)}
        self.changing[path] |= {name for name, v in tensors.items() if not _equal(v, earlier.arguments.get(name))}
        for position, value in enumerate(output_values(earlier.output)):
            carry = self.carries[path][position]
            if isinstance(value, torch.Tensor):
                carry.by_identity |= {name for name, v in tensors.items() if v is value}
                alike = {name for name, v in tensors.items() if (v.shape, v.dtype) == (value.shape, value.dtype)}
                carry.by_shape = alike if carry.by_shape is None else carry.by_shape & alike


def _confirm(model: torch.nn.Module, anatomy: Anatomy, watcher: Watcher) -> Anatomy:
    """The stacks that ran, in that order, with their streams; what ran between blocks is set aside."""
    known = {stack.path: stack for stack in anatomy.stacks}
    moments: dict[str, list[int]] = defaultdict(list)
    for moment, path in enumerate(watcher.order):
        moments[path].append(moment)

    def runs_inside_another(path: str) -> bool:
        return any(
            other[0] < moments[path][0] < other[-1] for name, other in moments.items() if name in known and name != path
        )

    side = tuple(path for path in moments if path in anatomy.side or runs_inside_another(path))
    ran = [known[path] for path in moments if path in known and path not in side]
    if not ran:
        raise ModelError(
            f"None of the blocks of {anatomy.model_class} ran, in {', '.join(map(repr, known))}; at least those of one "
            "stack were expected to. Probe the model before hooks that skip blocks are attached, with inputs that "
            "reach the blocks."
        )
    return replace(
        anatomy,
        stacks=tuple(_with_streams(stack, _count_returned(model, stack, watcher), watcher) for stack in ran),
        side=side,
        idle=tuple(path for path in known if path not in moments),
    )


def _count_returned(model: torch.nn.Module, stack: BlockStack, watcher: Watcher) -> int:
    """How many values a block of a stack returns."""
    blocks = zip(stack.block_paths, stack.modules(model), strict=True)
    path_by_count = {
        len(output_values(watcher.returned[block])): path for path, block in blocks if block in watcher.returned
    }
    if len(path_by_count) != 1:
        counts = ", ".join(f"{count} by {path!r}" for count, path in path_by_count.items())
        raise ModelError(
            f"The blocks of {stack.path!r} return different numbers of values ({counts}); the same from each was "
            "expected. Such a model needs an extractor of its own."
        )
    return next(iter(path_by_count))


def _with_streams(stack: BlockStack, count: int, watcher: Watcher) -> BlockStack:
    """The stack as the watcher saw it; what was declared stays as declared."""
    if stack.evidence != "declaration":
        return replace(stack, streams=_streams(stack, count, watcher), evidence="probe")
    if count != len(stack.streams):
        raise DeclarationError(
            f"A declaration carries {len(stack.streams)} values through {stack.path!r}, but its blocks return {count}. "
            "Declare one parameter for each value that they return, None for one that is not passed on."
        )
    return stack


def _streams(stack: BlockStack, count: int, watcher: Watcher) -> tuple[Stream, ...]:
    carries, changing = watcher.carries[stack.path], watcher.changing[stack.path]
    if not carries and count == len(stack.streams):  # One block alone hands nothing on: its return statement tells.
        return stack.streams
    order = {name: place for place, name in enumerate(stack.parameters)}

    def first(names: set[str]) -> str:  # What only `**kwargs` takes has no place of its own.
        return min(names, key=lambda name: (order.get(name, len(order)), name))

    found: dict[int, str] = {}
    for position, carry in carries.items():
        certain = carry.by_identity & changing or carry.by_identity
        if certain:
            found[position] = first(certain)
    for position, carry in carries.items():
        likely = (carry.by_shape or set()) & changing - set(found.values())
        if position not in found and likely:
            named = {stream.parameter for stream in stack.streams[position : position + 1] if stream.parameter}
            found[position] = first(likely & named or likely)
    return tuple(Stream(found.get(position)) for position in range(count))


def _equal(value: torch.Tensor, other: Any) -> bool:
    return value is other or (isinstance(other, torch.Tensor) and torch.equal(value, other))


def _without_data(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach().to("meta")
    return in_form_of(output, list(map(_without_data, output))) if isinstance(output, (tuple, list)) else None
