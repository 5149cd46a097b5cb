"""Find the layers that see neither the sample nor the text's tokens, and what leads to them.

Modulations are fed by time, guidance and pooled text alone, so their outputs can be computed before the step that needs
them. A rehearsal finds them: a shadow of the model runs without weights, and every torch function that it calls is
noted. What does not depend on a large argument is kept as a tape. Played with the small arguments of another step, the
tape gives the inputs of these layers at that step, by the calls that the model itself would make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..arch.modules import named_parts, unwrapped
from ..core import nested
from ..core.interop import memory_of
from ..core.tensor_parts import num_bytes_of
from ..hooks.intercept import bare_class
from .shadow import Shadow, TrialFailed, trial
from .tape import Call, Form, Here, Tape, Value, Weight, make_tape, map_parts, tensors_in
from .weightless import Weightless, simplify, weightless, with_few_values

_LARGE = 2**16
"""An argument with more elements than this, or with tokens, is not looked at."""
SMALL_OUTPUT = 1 / 8
"""A layer's outputs may take this share of the bytes of its weights."""
_PLAIN = ("torch.nn.modules.linear", "torch.nn.modules.sparse", "torch.nn.modules.conv")
"""Where layers come from whose output follows from their weights and arguments alone."""
_RANDOM = ("rand", "dropout", "alpha_dropout", "feature_dropout", "bernoulli", "normal_", "uniform_", "multinomial",
           "exponential_", "cauchy_", "log_normal_", "geometric_", "poisson")  # fmt: skip
_PLACES = ("device", "is_cuda", "is_cpu", "get_device")
"""What tells where a weight is: the weights of these layers stay on the host."""
_HERE = torch.device("cpu", 0)
"""What a rehearsal says of the device of any tensor."""


class Search(NamedTuple):
    """What a rehearsal has found."""

    tape: Tape | None
    problem: str = ""
    """Why there was no rehearsal, if there was none."""


def find_tape(
    model: torch.nn.Module, args: Any, kwargs: Any, least_bytes: int, among: Collection[str] | None = None
) -> Search:
    """The tape of a forward with these arguments, if a layer of at least `least_bytes`, and `among` these paths, is
    time-only."""
    rejected: set[str] = set()

    def is_wanted(path: str, layer: torch.nn.Module) -> bool:
        is_large = _own_bytes(layer) >= max(least_bytes, 1)
        return is_large and path not in rejected and (among is None or path in among)

    if is_autocast():
        return Search(None, "it is called under autocast")
    while True:
        try:
            # A thread of its own is free of the modes that the caller is in, such as those that watch attentions.
            with ThreadPoolExecutor(1) as thread:
                recorder = thread.submit(_rehearse, unwrapped(model), args, kwargs, is_wanted).result()
        except TrialFailed as error:
            return Search(None, str(error))
        wrong = recorder.rejected.intersection(recorder.layers)  # A layer that is called in two ways.
        if not wrong:
            return Search(recorder.tape())
        rejected |= wrong


def is_autocast() -> bool:
    """Whether torch changes dtypes as it likes."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def is_plain(module: torch.nn.Module) -> bool:
    """Whether a module is one of torch's own layers, as it came."""
    return (
        not module._modules
        and "forward" not in vars(module)
        and getattr(bare_class(module).forward, "__module__", None) in _PLAIN
    )


def _rehearse(model: torch.nn.Module, args: Any, kwargs: Any, is_wanted: Callable[[str, Any], bool]) -> _Recorder:
    with trial((args, kwargs)):
        shadow = Shadow(model, {}, sharded=False)
        try:
            recorder = _Recorder(shadow.root, is_wanted)
            given = recorder.given((args, kwargs))
            # torch gives up for good what it has compiled if it is called inside a mode that sees operations.
            with torch.compiler.set_stance("force_eager"), Weightless(), recorder:
                shadow.root(*given[0], **given[1])
            return recorder
        finally:
            shadow.close()


class _Recorder(TorchFunctionMode):
    """Notes what a shadow does with the tensors that do not depend on large arguments."""

    def __init__(self, shadow: torch.nn.Module, is_wanted: Callable[[str, torch.nn.Module], bool]) -> None:
        super().__init__()
        self.rejected: set[str] = set()
        self.layers: list[str] = []
        self._calls: list[Call] = []
        self._indices: dict[int, int] = {}
        """By the identity of a tensor: which value it is. A tensor that is in no table is unknown."""
        self._weights: dict[int, Weight] = {}
        self._inputs: dict[int, int] = {}
        """The value of each argument that is not large, by its place among all."""
        self._kept: list[Any] = []
        """All tensors of the tables, so that no identity is used twice."""
        self._in_memory: dict[int, list[int]] = {}
        """By memory: the identities of the known tensors in it."""
        self._inside: str | None = None
        self._count = 0
        self._attributes = {id(tensor): tensor for m in shadow.modules() for tensor in nested.tensors(_attributes(m))}
        """Tensors that the model holds, but not as parameters or buffers."""
        twins: dict[int, torch.Tensor] = {}
        for path, module in named_parts(shadow).items():
            module._forward_pre_hooks.clear()  # Nobody needs to bring weights.
            if not is_plain(module):
                simplify(module)
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        twin = twins.setdefault(id(tensor), weightless(tensor))
                        self._kept += [tensor, twin]
                        self._weights.setdefault(id(twin), Weight(path, name))
                        held[name] = twin  # type: ignore[assignment]
            if path and is_plain(module) and is_wanted(path, module):
                vars(module)["forward"] = self._watched(path, module)

    # ------------------------------------------------------------------------------------------------ what is seen

    def given(self, arguments: Any) -> Any:
        """The arguments for the rehearsal."""
        places = iter(range(10**6))

        def take(tensor: torch.Tensor) -> torch.Tensor:
            place = next(places)
            is_large = tensor.numel() > _LARGE or (tensor.is_floating_point() and tensor.ndim > 2)
            taken = with_few_values(tensor)
            if not is_large:
                (self._inputs[place],) = self._name([taken])
            return taken

        return nested.map_tensors(take, arguments)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(function.__self__, "__name__", name)
        with torch._C.DisableTorchFunction():
            if name in ("to", "type_as") and len(args) == 2 and isinstance(args[1], torch.Tensor):
                function, args = torch.Tensor.to, (args[0], args[1].dtype)  # The other tensor's values do not matter.
            tensors = tensors_in((args, kwargs))
            if name == "device":
                self._check_weights(tensors)
                return _HERE
            is_known = all(map(self._is_known, tensors)) and name != "normal" and not name.startswith(_RANDOM)
            versions = list(map(nested.version, tensors))
            called = args, kwargs
            if name == "to" or "device" in kwargs:
                called = map_parts(lambda part: "cpu" if isinstance(part, torch.device) else part, called)
        output = function(*called[0], **called[1])
        with torch._C.DisableTorchFunction():
            made = tensors_in(output)
            if name in _PLACES or made:
                self._check_weights(tensors)
            written = [t for t, version in zip(tensors, versions, strict=True) if nested.version(t) != version]
            if self._inside is None:
                self._note(Call(function, "", args, kwargs, ()), is_known, tensors, written, made)
        return output

    def _check_weights(self, tensors: Iterable[torch.Tensor]) -> None:
        """A layer whose weights others look at must keep them where they are."""
        for tensor in tensors:
            weight = self._weights.get(id(tensor))
            if weight is not None and weight.path != self._inside:
                self.rejected.add(weight.path)

    def _note(self, call: Call, is_known: bool, tensors: list[Any], written: list[Any], made: list[Any]) -> None:
        is_known = is_known and not is_autocast()
        for target in written:
            if is_known:
                self._add(call, made=[], memory=memory_of(target))
            else:  # An unknown value was written into this memory.
                for identity in self._in_memory.pop(memory_of(target), ()):
                    self._indices.pop(identity, None)
        fresh = [tensor for tensor in made if all(tensor is not other for other in tensors)]
        if is_known and fresh and len(fresh) == len(made) and not written:
            self._add(call, made)

    def _watched(self, path: str, module: torch.nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside is not None or path in self.rejected:
                return forward(*args, **kwargs)
            tensors = tensors_in((args, kwargs))
            if is_autocast() or not all(map(self._is_known, tensors)):
                self.rejected.add(path)
                return forward(*args, **kwargs)
            self._inside = path
            try:
                output = forward(*args, **kwargs)
            finally:
                self._inside = None
            if output.nbytes > SMALL_OUTPUT * _own_bytes(module) or not output.is_contiguous():
                self.rejected.add(path)
                return forward(*args, **kwargs)  # What it does may lead to other layers.
            forms = tuple(Form(tensor.shape, tensor.dtype) for tensor in tensors)
            self._add(Call(None, path, args, kwargs, (), None, forms, Form(output.shape, output.dtype)), [output])
            self.layers.append(path)
            return output

        return watched

    # ------------------------------------------------------------------------------------------------ the tape

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the tape, a weight, or one that the model holds."""
        return id(tensor) in self._indices or id(tensor) in self._weights or id(tensor) in self._attributes

    def _held(self, item: Any) -> Any:
        """A part of the arguments as the tape keeps it."""
        if isinstance(item, torch.Tensor):
            index, weight = self._indices.get(id(item)), self._weights.get(id(item))
            return weight or (item if index is None else Value(index))
        return Here() if isinstance(item, torch.device) and item == _HERE else item

    def _name(self, made: list[torch.Tensor]) -> tuple[int, ...]:
        start, self._count = self._count, self._count + len(made)
        self._kept += made
        for index, tensor in enumerate(made, start):
            self._indices[id(tensor)] = index
            self._in_memory.setdefault(memory_of(tensor), []).append(id(tensor))
        return tuple(range(start, self._count))

    def _add(self, call: Call, made: list[torch.Tensor], memory: int | None = None) -> None:
        args, kwargs = map_parts(self._held, (call.args, call.kwargs))
        makes = self._name(made)
        self._calls.append(Call(call.function, call.layer, args, kwargs, makes, memory, call.given, call.returns))

    def tape(self) -> Tape | None:
        """What leads to the layers that were found."""
        memories = {index: memory_of(t) for t in self._kept if (index := self._indices.get(id(t))) is not None}
        return make_tape(self._calls, self._inputs, memories)


def _attributes(module: torch.nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name not in ("_modules", "_parameters", "_buffers")]


def _own_bytes(module: torch.nn.Module) -> int:
    return num_bytes_of(parameter for parameter in module._parameters.values() if parameter is not None)
