"""The hooks of a module: their order, the one override, refusals, failures, copies and the end of it all."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from samovar.core.errors import SamovarError
from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook


class Echo(torch.nn.Module):
    """Appends to a string, so that an output shows who ran, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, text: str, *, suffix: str = "ECHO") -> str:
        """Repeats what it is given."""
        return text + suffix


class Around(ModelHook):
    def __init__(self, mark: str, order: HookOrder = HookOrder.OTHER) -> None:
        self.mark, self.order = mark, order

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return (args[0] + self.mark, *args[1:]), kwargs

    def post_forward(self, module: torch.nn.Module, output: str) -> str:
        return output + self.mark


class Override(Around):
    def new_forward(self, module: torch.nn.Module, text: str) -> str:
        return text + "OVERRIDE"


class Noting(ModelHook):
    """Notes what happens to it."""

    def __init__(self, name: str = "", events: list[str] | None = None, fails: bool = False) -> None:
        self.name, self.events, self.fails = name, [] if events is None else events, fails

    def _note(self, event: str) -> None:
        self.events.append(f"{self.name} {event}".strip())

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._note("begins")
        if self.fails:
            raise OSError("no room")
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._note("ends")
        return module

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self._note("forgets")
        return module


def hooked(**hooks: ModelHook) -> tuple[Echo, HookRegistry]:
    module = Echo()
    registry = HookRegistry.get_or_create(module)
    for name, hook in hooks.items():
        registry.register_hook(name, hook)
    return module, registry


# ------------------------------------------------------------------------------------------------ order


def test_the_order_is_that_of_classes_and_names_with_the_override_innermost() -> None:
    hooks = {
        "d": Around("0", HookOrder.SHARD), "c": Around("1", HookOrder.CACHE), "b": Around("2", HookOrder.OFFLOAD),
        "a": Override("4"), "e": Around("3"),
    }  # fmt: skip
    for names in itertools.permutations(hooks):
        module, registry = hooked(**{name: hooks[name] for name in names})
        assert module("") == "01234OVERRIDE43210"
    assert repr(registry) == "HookRegistry(Echo: d (shard), c (cache), b (offload), e (other), a (other))"
    assert registry.chain == (*((name, hooks[name].order) for name in "dcbea"),)
    assert registry.hooks(HookOrder.OTHER) == {"e": hooks["e"], "a": hooks["a"]}


def test_calls_that_meet_run_what_is_inside_the_cache_once() -> None:
    class Twice(ModelHook):
        """Goes on with another argument, as one does who has the arguments of two calls."""

        order = HookOrder.MEETING

        def arrive(self, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return f"<{forward((args[0] * 2,), kwargs)}>"

    module, registry = hooked(inner=Around("3", HookOrder.OFFLOAD), twice=Twice(), outer=Around("1", HookOrder.SHARD))
    assert module("x") == module.forward("x") == "<x1x13ECHO3>1"
    registry.remove_hook("twice")
    assert module("x") == "x13ECHO31"


# ------------------------------------------------------------------------------------------------ refusals


class Unextendable(Echo):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError("final")


def of_no_order() -> ModelHook:
    hook = Around("1")
    hook.order = "cache"  # type: ignore[assignment]
    return hook


@pytest.mark.parametrize(
    ("name", "hook", "error", "message"),
    [
        ("second", Override("R"), RuntimeError, "'second' overrides new_forward, but 'first' does so already"),
        ("second", Noting(fails=True), OSError, "no room"),
        ("first", Noting(fails=True), OSError, "no room"),
        ("second", of_no_order(), SamovarError, r"must be a HookOrder, such as HookOrder.CACHE; not 'cache'"),
        (Around("1"), "second", ValueError, "register_hook takes a name and then a ModelHook"),
        ("second", Around, ValueError, "register_hook takes a name and then a ModelHook"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is replaced")
def test_a_refused_hook_changes_nothing(name: Any, hook: Any, error: type[Exception], message: str) -> None:
    module, registry = hooked(first=Override("1"), other=Around("2"))
    before = registry.chain
    with pytest.raises(error, match=message):
        registry.register_hook(name, hook)
    assert registry.chain == before
    assert registry.get_hook("second") is None
    assert module("") == "21OVERRIDE12"


def test_a_module_that_cannot_be_hooked_is_left_alone() -> None:
    module, noting = Unextendable(), Noting()
    before = dict(vars(module))
    with pytest.raises(SamovarError, match="A Unextendable cannot be hooked"):
        HookRegistry.get_or_create(module).register_hook("r", noting)
    assert (vars(module), type(module)) == (before, Unextendable)
    assert "r" not in HookRegistry.get_or_create(module)
    assert noting.events == ["begins", "ends"]
    with pytest.raises(SamovarError, match=r"torch\.nn\.Module, not to 'text' \(str\)"):
        HookRegistry.get_or_create("text")  # type: ignore[arg-type]


def test_replacing_warns_and_ends_the_old_hook_before_the_new_begins() -> None:
    events: list[str] = []
    _, registry = hooked(x=Noting("old", events))
    with pytest.raises(OSError, match="no room"), pytest.warns(UserWarning, match="Hook 'x' on Echo is replaced"):
        registry.register_hook("x", Noting("failing", events, fails=True))
    assert events == ["old begins", "old ends", "failing begins", "old begins"]
    with pytest.warns(UserWarning, match="is replaced"):
        registry.register_hook("x", Noting("new", events))
    assert events[-2:] == ["old ends", "new begins"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is replaced"):
            registry.register_hook("x", Noting("another", events))
    assert events[-1] == "new begins"


# ------------------------------------------------------------------------------------------------ the end


def test_one_registry_a_module_as_long_as_it_lives() -> None:
    class Holding(ModelHook):
        def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
            self.module = module
            return module

    module = Echo()
    registry = HookRegistry.get_or_create(module)
    assert HookRegistry.get_or_create(module) is registry is not HookRegistry.get_or_create(Echo())
    registry.register_hook("holding", Holding())
    held, gone = weakref.ref(registry), weakref.ref(module)
    del registry
    gc.collect()
    assert HookRegistry.get_or_create(module) is held()
    del module
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------------------------------ as a bare one


def test_to_others_a_hooked_module_is_what_it_was() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, _ = hooked(one=Around("1"))
    assert module.__class__ is Echo
    assert isinstance(module, Echo)
    assert (type(module).__name__, repr(module)) == ("Echo", repr(Echo()))
    assert inspect.signature(module.forward) == inspect.signature(Echo().forward)
    assert module.forward.__doc__ == "Repeats what it is given."
    module.load_state_dict({"weight": torch.full((2,), 5.0)})
    assert module.to(torch.float64).weight.tolist() == [5.0, 5.0]
    assert [name for name, _ in module.named_parameters()] == ["weight"]


def pickled(module: Any) -> Any:
    data = pickle.dumps(module)
    assert b"samovar" not in data
    return pickle.loads(data)


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickled, saved])
def test_a_copy_is_of_the_bare_module(duplicate: Callable[[Any], Any]) -> None:
    parent = torch.nn.Sequential(Echo())
    parent[0].weight.data.mul_(3)
    HookRegistry.get_or_create(parent[0]).register_hook("1", Around("1"))
    twin = duplicate(parent)
    assert list(parent.state_dict()) == list(twin.state_dict()) == ["0.weight"]
    if duplicate is copy.copy:  # Shallow: the child is shared, hooks and all.
        assert twin[0] is parent[0]
        twin = [duplicate(twin[0])]
    assert (type(twin[0]), vars(twin[0]).keys(), twin[0]("")) == (Echo, vars(Echo()).keys(), "ECHO")
    assert torch.equal(twin[0].weight, parent[0].weight)
    assert parent("") == "1ECHO1"


def test_a_class_that_copies_itself_gives_a_bare_copy() -> None:
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    HookRegistry.get_or_create(module).register_hook("r", Noting())
    twin = copy.deepcopy(module)
    assert "r" not in HookRegistry.get_or_create(twin)
    assert "r" in HookRegistry.get_or_create(module)
    assert torch.equal(twin(torch.ones(1, 2)), module(torch.ones(1, 2)))

    class WithArguments(Echo):
        def __new__(cls, *args: Any) -> Any:
            return super().__new__(cls)

        def __getnewargs__(self) -> tuple[int]:
            return (1,)

    special = WithArguments()
    HookRegistry.get_or_create(special).register_hook("1", Around("1"))
    assert copy.deepcopy(special)("") == "ECHO"


# ------------------------------------------------------------------------------------------------ failures


class Opening(ModelHook):
    """Opens something before a call that must be closed after it."""

    def __init__(self, fail_in: str = "") -> None:
        self.fail_in = fail_in
        self.depth = self.deepest = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.fail_in == "pre":
            raise RuntimeError("pre")
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.fail_in == "post":
            raise RuntimeError("post")
        self.depth -= 1
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self.depth -= 1
        if self.fail_in == "closing":
            raise OSError("could not close") from error


class Broken(ModelHook):
    is_broken = True

    def new_forward(self, module: torch.nn.Module, text: str) -> str:
        if self.is_broken:
            raise RuntimeError("override")
        return text


@pytest.mark.parametrize("place", ["pre", "forward", "post", "override", "closing"])
def test_a_failing_call_leaves_every_hook_ready_for_the_next(place: str) -> None:
    hooks, broken = [Opening(), Opening(place), Opening()], Broken()
    module, registry = hooked(**{str(index): hook for index, hook in enumerate(hooks)})
    if place == "override":
        registry.register_hook("broken", broken)
    for call in (module, module.forward):
        with pytest.raises((RuntimeError, TypeError, OSError)) as caught:
            call("" if place in ("pre", "post", "override") else None)
        assert [hook.depth for hook in hooks] == [0, 0, 0]
        assert place != "closing" or isinstance(caught.value.__cause__, TypeError)
    hooks[1].fail_in, broken.is_broken = "", False
    assert module("x") in ("xECHO", "x")
    assert [hook.depth for hook in hooks] == [0, 0, 0]


@pytest.mark.parametrize("place", ["bypass", "pre_forward", "new_forward", "post_forward"])
def test_a_hook_may_remove_itself_during_a_call(place: str) -> None:
    class Once(ModelHook):
        def leave(self, module: torch.nn.Module) -> None:
            HookRegistry.get_or_create(module).remove_hook("once")

    methods: dict[str, Any] = {
        "bypass": lambda self, module, *args: self.leave(module) or NOT_BYPASSED,
        "pre_forward": lambda self, module, *args, **kwargs: self.leave(module) or (args, kwargs),
        "new_forward": lambda self, module, *args: self.leave(module) or self.call_original(module, *args),
        "post_forward": lambda self, module, output: self.leave(module) or output,
    }
    module, _ = hooked(once=type("Once", (Once,), {place: methods[place]})())
    assert module("") == module("") == "ECHO"
    assert type(module) is Echo


def test_threads_on_one_module_and_on_two_keep_apart() -> None:
    class Slow(torch.nn.Module):
        def __init__(self, gate: threading.Barrier) -> None:
            super().__init__()
            self.gate = gate

        def forward(self, text: str) -> str:
            self.gate.wait()
            return text + "ECHO"

    gate = threading.Barrier(2, timeout=20)
    one, other = Slow(gate), Slow(gate)
    for module in (one, other):
        HookRegistry.get_or_create(module).register_hook("1", Around("1"))
    # A torch hook makes the call take the long way, where a thread must not take another's call for its own.
    one.register_forward_pre_hook(lambda module, args: None)
    for pair in ([one, other], [one, one]):
        results: list[str] = []
        calls = zip(pair, "ab", strict=True)
        threads = [threading.Thread(target=lambda m, t, r: r.append(m(t)), args=(*call, results)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert sorted(results) == ["a1ECHO1", "b1ECHO1"]
