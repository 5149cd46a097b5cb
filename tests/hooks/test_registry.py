"""The hook contract: order, the one override, refusal, replacement, removal."""

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
from typing import Any

import pytest
import torch

from samovar.core.errors import SamovarError
from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook


class Echo(torch.nn.Module):
    """Appends to a string, so that an output tells who ran, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, text: str, *, suffix: str = "ECHO") -> str:
        return text + suffix


class Around(ModelHook):
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return (args[0] + self.mark, *args[1:]), kwargs

    def post_forward(self, module: torch.nn.Module, output: str) -> str:
        return output + self.mark


class Override(Around):
    def new_forward(self, module: torch.nn.Module, text: str) -> str:
        return text + "OVERRIDE"


class Recorder(ModelHook):
    """Notes what happens to it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.events.append("initialize")
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.events.append("detach")
        return module

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.events.append("reset")
        return module


def hooked(*hooks: tuple[str, ModelHook]) -> tuple[Echo, HookRegistry]:
    module = Echo()
    registry = HookRegistry.get_or_create(module)
    for name, hook in hooks:
        registry.register_hook(name, hook)
    return module, registry


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("order", list(itertools.permutations("12")))
def test_plain_hooks_run_in_sorted_order_whatever_the_order_of_registration(order: tuple[str, ...]) -> None:
    module, _ = hooked(*((mark, Around(mark)) for mark in order))
    assert module("") == "12ECHO21"


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_the_overriding_hook_is_innermost_whatever_its_name(order: tuple[str, ...]) -> None:
    hooks = {"a": Around("1"), "b": Override("3"), "c": Around("2")}
    module, _ = hooked(*((name, hooks[name]) for name in order))
    assert module("") == "123OVERRIDE321"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_order_class_comes_before_name(order: tuple[int, ...]) -> None:
    classes = [HookOrder.SHARD, HookOrder.CACHE, HookOrder.OFFLOAD, HookOrder.OTHER]
    hooks = []
    for position, (name, order_class) in enumerate(zip("dcba", classes, strict=True)):
        hook = Around(str(position))
        hook.order = order_class
        hooks.append((name, hook))
    module, registry = hooked(*(hooks[index] for index in order))
    assert module("") == "0123ECHO3210"
    assert repr(registry) == "HookRegistry(Echo: d (shard), c (cache), b (offload), a (other))"
    assert registry.chain == tuple(zip("dcba", classes, strict=True))


def test_calls_that_meet_run_what_is_inside_the_cache_once() -> None:
    class Twice(ModelHook):
        """Goes on with another argument, as one does who has the arguments of two calls."""

        order = HookOrder.MEETING

        def arrive(self, module: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return f"<{forward((args[0] * 2,), kwargs)}>"

    inner, outer = Around("3"), Around("1")
    inner.order, outer.order = HookOrder.OFFLOAD, HookOrder.SHARD
    module, registry = hooked(("inner", inner), ("twice", Twice()), ("outer", outer))
    assert module("x") == module.forward("x") == "<x1x13ECHO3>1"
    registry.remove_hook("twice")
    assert module("x") == "x13ECHO31"


def test_calling_forward_or_dispatch_goes_through_the_hooks_once() -> None:
    module, registry = hooked(("1", Around("1")))
    assert module("") == module.forward("") == registry.dispatch("") == "1ECHO1"
    assert module("", suffix="!") == module.forward("", suffix="!") == "1!1"


def test_an_override_can_call_the_original() -> None:
    class Twice(ModelHook):
        def new_forward(self, module: torch.nn.Module, text: str) -> str:
            return self.call_original(module, self.call_original(module, text))

    module, _ = hooked(("twice", Twice()), ("1", Around("1")))
    assert module("") == "1ECHOECHO1"


def test_a_bare_hook_does_not_override_and_changes_nothing() -> None:
    module, _ = hooked(("nothing", ModelHook()))
    assert module("") == "ECHO"
    with pytest.raises(NotImplementedError, match="ModelHook does not override new_forward"):
        ModelHook().new_forward(module)


def test_update_sorted_hooks_follows_a_changed_order() -> None:
    first, second = Around("1"), Around("2")
    module, registry = hooked(("1", first), ("2", second))
    first.order, second.order = HookOrder.OTHER, HookOrder.SHARD
    registry.update_sorted_hooks()
    assert module("") == "21ECHO12"


# ------------------------------------------------------------------------------------------------ bypass


def test_a_bypassed_call_is_seen_by_no_other_hook_and_not_by_the_module() -> None:
    class Cached(ModelHook):
        answer: Any = NOT_BYPASSED

        def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.answer

    cached = Cached()
    module, _ = hooked(("z", cached), ("1", Around("1")), ("o", Override("2")))
    assert module("") == "12OVERRIDE21"
    cached.answer = "CACHED"
    assert module("") == module.forward("") == "CACHED"
    cached.answer = None
    assert module("") is None


# ------------------------------------------------------------------------------------------------ refusal


def test_a_second_override_is_refused_and_never_runs() -> None:
    module, registry = hooked(("first", Override("1")))
    refused = Override("REFUSED")
    with pytest.raises(RuntimeError, match=r"'second' overrides new_forward, but 'first' does so already"):
        registry.register_hook("second", refused)
    assert registry.get_hook("second") is None
    assert module("") == "1OVERRIDE1"
    registry.register_hook("third", Around("2"))
    assert module("") == "21OVERRIDE12"
    registry.remove_hook("first")
    assert module("") == "2ECHO2"


def test_a_hook_whose_initialisation_raises_is_not_attached() -> None:
    class Failing(Around):
        def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
            raise OSError("no room")

    module, registry = hooked()
    before = dict(vars(module))
    with pytest.raises(OSError, match="no room"):
        registry.register_hook("failing", Failing("1"))
    assert vars(module) == before
    assert type(module) is Echo
    registry.register_hook("kept", Around("2"))
    with pytest.raises(OSError, match="no room"), pytest.warns(UserWarning, match="is replaced"):
        registry.register_hook("kept", Failing("1"))
    assert module("") == "2ECHO2"


def test_an_override_may_replace_itself_and_replacing_warns() -> None:
    module, registry = hooked(("o", Override("1")))
    with pytest.warns(UserWarning, match=r"Hook 'o' on Echo is replaced"):
        registry.register_hook("o", Override("2"))
    assert module("") == "2OVERRIDE2"


def test_replacing_detaches_the_old_before_the_new_begins() -> None:
    events: list[str] = []

    class Noting(ModelHook):
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
            events.append(f"{self.name} begins")
            if self.fails:
                raise OSError("no room")
            return module

        def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
            events.append(f"{self.name} ends")
            return module

    _, registry = hooked(("x", Noting("old")))
    with pytest.raises(OSError, match="no room"), pytest.warns(UserWarning, match="is replaced"):
        registry.register_hook("x", Noting("failing", fails=True))
    assert events == ["old begins", "old ends", "failing begins", "old begins"]
    with pytest.warns(UserWarning, match="is replaced"):
        registry.register_hook("x", Noting("new"))
    assert events[-2:] == ["old ends", "new begins"]


@pytest.mark.filterwarnings("error")
def test_where_warnings_are_errors_nothing_is_replaced() -> None:
    module, registry = hooked(("1", Around("1")))
    with pytest.raises(UserWarning, match="is replaced"):
        registry.register_hook("1", Around("2"))
    assert module("") == "1ECHO1"


def test_a_module_that_cannot_be_hooked_is_refused_and_left_alone() -> None:
    class Recorded(Recorder):
        pass

    class Unextendable(torch.nn.Module):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise TypeError("final")

    module, recorder = Unextendable(), Recorded()
    before = dict(vars(module))
    with pytest.raises(SamovarError, match="A Unextendable cannot be hooked"):
        HookRegistry.get_or_create(module).register_hook("r", recorder)
    assert vars(module) == before
    assert "r" not in HookRegistry.get_or_create(module)
    assert recorder.events == ["initialize", "detach"]


def test_an_order_that_is_none_is_refused() -> None:
    hook = Around("1")
    hook.order = "cache"  # type: ignore[assignment]
    module, registry = hooked()
    with pytest.raises(SamovarError, match=r"must be a HookOrder, such as HookOrder.CACHE; not 'cache'"):
        registry.register_hook("1", hook)
    registry.register_hook("2", Around("2"))
    assert module("") == "2ECHO2"


def test_a_second_registry_on_a_hooked_module_is_refused() -> None:
    module, _ = hooked(("1", Around("1")))
    with pytest.raises(RuntimeError, match="hooked through another registry"):
        HookRegistry(module).register_hook("2", Around("2"))
    assert module("") == "1ECHO1"


@pytest.mark.parametrize(("name", "hook"), [(Around("1"), "name"), ("name", Around), (3, Around("1"))])
def test_bad_arguments_are_refused_by_name(name: Any, hook: Any) -> None:
    _, registry = hooked()
    with pytest.raises(ValueError, match="register_hook takes a name and then a ModelHook"):
        registry.register_hook(name, hook)
    with pytest.raises(SamovarError, match=r"torch\.nn\.Module, not to 'text' \(str\)"):
        HookRegistry.get_or_create("text")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ coming off


def test_the_life_of_a_hook() -> None:
    recorder = Recorder()
    _, registry = hooked(("r", recorder))
    registry.reset_hook("r")
    registry.remove_hook("r")
    registry.remove_hook("r")
    registry.reset_hook("r")
    assert recorder.events == ["initialize", "reset", "detach"]
    replaced, new = Recorder(), Recorder()
    registry.register_hook("r", replaced)
    with pytest.warns(UserWarning, match="is replaced"):
        registry.register_hook("r", new)
    registry.reset()
    assert replaced.events == ["initialize", "detach"]
    assert new.events == ["initialize", "reset", "detach"]


def test_after_the_last_removal_nothing_is_left() -> None:
    module = Echo()
    before, cls = dict(vars(module)), type(module)
    registry = HookRegistry.get_or_create(module)
    registry.register_hook("1", Around("1"))
    registry.register_hook("2", Around("2"))
    registry.remove_hook("1")
    assert module("") == "2ECHO2"
    registry.remove_hook("2")
    assert vars(module) == before
    assert type(module) is cls
    assert module("") == "ECHO"


def test_reset_restores_the_original_and_the_registry_stays_usable() -> None:
    module, registry = hooked(("1", Around("1")), ("o", Override("2")))
    before = dict(vars(Echo()))
    registry.reset()
    assert vars(module).keys() == before.keys()
    assert type(module) is Echo
    assert module("") == "ECHO"
    registry.register_hook("3", Around("3"))
    assert module("") == "3ECHO3"


def test_one_registry_a_module() -> None:
    module = Echo()
    registry = HookRegistry.get_or_create(module)
    assert HookRegistry.check_if_exists_or_initialize(module) is registry
    registry.register_hook("1", Around("1"))
    held = weakref.ref(registry)
    del registry
    gc.collect()
    again = HookRegistry.get_or_create(module)
    assert again is held()
    assert "1" in again
    assert HookRegistry.get_or_create(Echo()) is not again


def test_a_hooked_module_can_be_collected() -> None:
    class Holding(ModelHook):
        def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
            self.module = module
            return module

    module, registry = hooked(("holding", Holding()))
    gone = weakref.ref(module)
    del module, registry
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------------------------------------ as of a bare one


def test_the_signature_survives() -> None:
    module, _ = hooked(("1", Around("1")))
    assert inspect.signature(module.forward) == inspect.signature(Echo().forward)
    assert module.forward.__doc__ == Echo.forward.__doc__
    assert type(module).__name__ == "Echo"
    assert isinstance(module, Echo)
    assert repr(module) == repr(Echo())


def _deepcopied(module: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(module)


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    return copy.copy(module)


def _pickled(module: torch.nn.Module) -> torch.nn.Module:
    data = pickle.dumps(module)
    assert b"samovar" not in data
    return pickle.loads(data)


def _saved(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [_deepcopied, _copied, _pickled, _saved])
def test_a_copy_is_of_the_bare_module(duplicate: Any) -> None:
    parent = torch.nn.Sequential(Echo())
    parent[0].weight.data.mul_(3)
    HookRegistry.get_or_create(parent[0]).register_hook("1", Around("1"))
    twin = duplicate(parent)
    child = twin[0]
    if duplicate is _copied:  # Shallow: the child is shared, hooks and all.
        assert child is parent[0]
        child = duplicate(child)
    assert type(child) is Echo
    assert child("") == "ECHO"
    assert parent("") == "1ECHO1"
    assert list(parent.state_dict()) == list(twin.state_dict()) == ["0.weight"]
    assert torch.equal(child.weight, parent[0].weight)
    assert vars(child).keys() == vars(Echo()).keys()


def test_a_class_that_copies_itself_gives_a_bare_copy() -> None:
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    registry = HookRegistry.get_or_create(module)
    registry.register_hook("r", Recorder())
    twin = copy.deepcopy(module)
    assert "r" not in HookRegistry.get_or_create(twin)
    assert "r" in registry
    assert torch.equal(twin(torch.ones(1, 2)), module(torch.ones(1, 2)))

    class WithArguments(Echo):
        def __new__(cls, *args: Any) -> Any:
            return super().__new__(cls)

        def __getnewargs__(self) -> tuple[int]:
            return (1,)

    special = WithArguments()
    HookRegistry.get_or_create(special).register_hook("1", Around("1"))
    assert copy.deepcopy(special)("") == "ECHO"


def test_to_others_the_class_is_what_it_was() -> None:
    module, _ = hooked(("1", Around("1")))
    assert module.__class__ is Echo
    assert isinstance(module, Echo)


def test_parameters_move_and_load_as_of_a_bare_module() -> None:
    module, _ = hooked(("1", Around("1")))
    module.load_state_dict({"weight": torch.full((2,), 5.0)})
    assert module.to(torch.float64).weight.tolist() == [5.0, 5.0]
    assert [name for name, _ in module.named_parameters()] == ["weight"]


# ------------------------------------------------------------------------------------------------ failures


class Opening(ModelHook):
    """Opens something before a call that must be closed after it."""

    def __init__(self, fail_in: str = "") -> None:
        self.fail_in = fail_in
        self.depth = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.fail_in == "pre":
            raise RuntimeError("pre")
        self.depth += 1
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.fail_in == "post":
            raise RuntimeError("post")
        self.depth -= 1
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self.depth -= 1


@pytest.mark.parametrize("place", ["pre", "forward", "post", "override"])
def test_a_failing_call_leaves_every_hook_ready_for_the_next(place: str) -> None:
    class Broken(ModelHook):
        is_broken = True

        def new_forward(self, module: torch.nn.Module, text: str) -> str:
            if self.is_broken:
                raise RuntimeError("override")
            return text

    hooks = [Opening(), Opening(place), Opening()]
    broken = Broken()
    module, registry = hooked(*((str(index), hook) for index, hook in enumerate(hooks)))
    if place == "override":
        registry.register_hook("broken", broken)
    for call in (module, module.forward):
        with pytest.raises((RuntimeError, TypeError)):
            call(None if place == "forward" else "")
        assert [hook.depth for hook in hooks] == [0, 0, 0]
    hooks[1].fail_in, broken.is_broken = "", False
    assert module("x") in ("xECHO", "x")
    assert [hook.depth for hook in hooks] == [0, 0, 0]


def test_a_hook_that_fails_to_close_stops_no_other() -> None:
    class Worse(Opening):
        def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
            super().failed_forward(module, error)
            raise OSError("could not close") from error

    hooks = [Opening(), Worse(), Opening()]
    module, _ = hooked(*((str(index), hook) for index, hook in enumerate(hooks)))
    with pytest.raises(OSError, match="could not close") as caught:
        module(None)
    assert isinstance(caught.value.__cause__, TypeError)
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
    module, _ = hooked(("once", type("Once", (Once,), {place: methods[place]})()))
    assert module("") == module("") == "ECHO"
    assert type(module) is Echo


def test_a_module_that_calls_itself_goes_through_its_hooks_each_time() -> None:
    class Countdown(torch.nn.Module):
        def forward(self, number: int) -> list[int]:
            return [number, *self(number - 1)] if number else []

    class Depth(Opening):
        deepest = 0

        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            result = super().pre_forward(module, *args, **kwargs)
            self.deepest = max(self.deepest, self.depth)
            return result

    module, depth = Countdown(), Depth()
    HookRegistry.get_or_create(module).register_hook("depth", depth)
    assert module(3) == [3, 2, 1]
    assert (depth.deepest, depth.depth) == (4, 0)


def test_threads_on_one_module_and_on_two_keep_apart() -> None:
    class Slow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = threading.Barrier(2, timeout=20)

        def forward(self, text: str) -> str:
            self.gate.wait()
            return text + "ECHO"

    one, other = Slow(), Slow()
    other.gate = one.gate
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


def test_no_warnings_in_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, registry = hooked(("1", Around("1")))
        assert module("") == "1ECHO1"
        registry.reset()
