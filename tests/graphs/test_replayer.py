"""What is replayed, what is recorded again, and what runs: on models of every kind."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from samovar.core import nested
from samovar.graphs import apply_graphs, recorders
from samovar.graphs.static_inputs import StaticInputs
from samovar.hooks import HookOrder, HookRegistry, ModelHook

# ------------------------------------------------------------------------------------------------ a model of our own


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.scale = 1.0
        self.table = {"gain": 1.0}
        self.shift = torch.zeros(8)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, bias: float = 0.0, extra: Any = None) -> Any:
        out = self.drop(self.inner(x)) * self.scale * self.table["gain"] + self.shift + bias
        return {"out": out, "extra": [out.sum(), None]} if extra is None else {"out": out + extra["y"][0], "extra": []}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        for layer in self.layers:
            returned = layer(x, **more)
            x = returned["out"]
        return returned


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(device: str) -> Model:
    torch.manual_seed(0)
    made = Model().eval().to(device)
    for layer in made.layers:
        layer.shift = layer.shift.to(device)
    return made


def x(device: str, seed: int = 0, *shape: int) -> torch.Tensor:
    made = torch.randn(*(shape or (2, 8)), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return made.to(device)


@torch.no_grad()
def call(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def test_modes_and_settings_of_torch_are_other_forms(model: Model, device: str) -> None:
    def settings() -> list[Any]:
        found = [call(model, x(device))]
        with torch.autocast(device, torch.bfloat16):
            found.append(call(model, x(device)))
        with torch.inference_mode():
            found.append(model(x(device)))
        torch.backends.cudnn.deterministic = True
        found.append(call(model, x(device)))
        torch.backends.cudnn.deterministic = False
        return found

    expected = settings()
    with apply_graphs(model) as hook:
        for _ in range(3):
            assert all(map(nested.equal, settings(), expected))
    assert hook.stats().recorded == 4


SETTINGS: dict[str, tuple[Any, str, Any]] = {
    "TF32": (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "TF32 everywhere": (torch.backends, "fp32_precision", "tf32"),
    "float16 sums": (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "uninitialised memory": (torch.utils.deterministic, "fill_uninitialized_memory", False),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_another_choice_of_kernels_is_a_change(model: Model, device: str, setting: str) -> None:
    owner, name, value = SETTINGS[setting]
    before = getattr(owner, name)
    with apply_graphs(model) as hook:
        for seed in range(4):
            call(model, x(device, seed))
        setattr(owner, name, value)
        try:
            call(model, x(device))
            assert (hook.stats().replayed, hook.stats().run) == (2, 3)
        finally:
            setattr(owner, name, before)
        call(model, x(device))
        assert hook.stats().replayed == 3


def test_modes_that_see_functions(model: Model, device: str) -> None:
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            return output * 2 if func is torch.nn.functional.linear else output

    with apply_graphs(model) as hook:
        before = [call(model, x(device)) for _ in range(4)][-1]
        with Doubles():
            found = call(model, x(device))
        assert not nested.equal(found, before)
        assert "a mode of torch" in hook.stats().reasons[0]
        with torch.device(device):  # Where tensors are made by default is a mode as well, and is nobody's eye.
            for _ in range(3):
                assert nested.equal(call(model, x(device)), before)
        assert (hook.stats().recorded, hook.stats().replayed) == (2, 3)
    with Doubles():
        assert nested.equal(found, call(model, x(device)))


def test_what_changes_back_and_forth_at_each_call_is_recorded_twice(model: Model, device: str) -> None:
    """As where two requests with other adapters are denoised in turn."""
    with apply_graphs(model) as hook:
        for number in range(10):
            model.layers[1].scale = float(number % 2)
            found = call(model, x(device))
        assert hook.stats().recorded == 2
        assert hook.stats().replayed == 6
    assert nested.equal(found, call(model, x(device)))


def test_weights_that_were_replaced_are_not_kept(model: Model, device: str) -> None:
    """Neither by the form that is called, nor by others; and while new ones are loaded there is room for them."""
    with apply_graphs(model) as hook:
        for length in (2, 3):
            for seed in range(3):
                call(model, x(device, seed, length, 8))
        assert hook.stats().recorded == 2
        weights = [weakref.ref(weight) for weight in model.parameters()]
        others = {name: weight * 2 for name, weight in model.state_dict().items()}
        model.load_state_dict(others, assign=True)
        gc.collect()
        assert not any(weight() is not None for weight in weights)
        call(model, x(device))
        assert hook.stats().recorded == 0, "what cannot come back is dropped"


def test_gradients_are_not_lost(model: Model, device: str) -> None:
    with apply_graphs(model) as hook:
        for _ in range(3):
            model(x(device))["out"].sum().backward()
        assert hook.stats().reasons == ("gradients are recorded; call it under torch.no_grad()",)
    assert model.layers[0].inner.weight.grad is not None


class Strange(torch.nn.Module):
    """Does one thing that cannot be replayed."""

    def __init__(self, strangely: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self._strangely, self.count = torch.nn.Linear(8, 8), strangely, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self._strangely(self, self.inner(x))


def _counts(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.count += 1
    return x + module.count


def _remembers(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.seen += 1
    return x + module.seen


STRANGE: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a number": (
        lambda m, x: x * 2 if x.sum().item() > 0 else x,
        "its forward waits for the device (_local_scalar_dense)",
    ),
    "a mask": (lambda m, x: x[x > 0].sum(), "its forward waits for the device (index with a mask)"),
    "random": (lambda m, x: x + torch.randn_like(x), "its forward draws random numbers"),
    "a count": (_counts, "its forward changes what it depends on: the attribute 'count'"),
    "a buffer": (_remembers, "its forward writes into what outlives it (add_)"),
    "an object": (lambda m, x: (x, threading.Lock()), "a replay gives other bits than its forward"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_cannot_be_replayed_runs_with_the_reason(kind: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    def outputs(model: Any) -> list[Any]:
        torch.manual_seed(3)
        found = [call(model, x(device, seed)) for seed in range(8)]
        return [one[0] if isinstance(one, tuple) else one for one in found]

    torch.manual_seed(1)
    bare = Strange(STRANGE[kind][0]).to(device)
    torch.manual_seed(1)
    graphed = Strange(STRANGE[kind][0]).to(device)
    with apply_graphs(graphed) as hook:
        found = outputs(graphed)
    if kind not in ("a count", "a buffer"):
        assert all(map(torch.equal, found, outputs(bare)))
    assert hook.stats().replayed == 0
    assert STRANGE[kind][1] in hook.stats().reasons[0]
    assert caplog.text.count("runs without graphs") == 1


def test_a_tensor_that_the_model_drops_is_kept(device: str) -> None:
    """What a function remembers is read by every replay, and nobody can see that it was forgotten."""

    @functools.cache
    def table(device: torch.device) -> torch.Tensor:
        return torch.arange(8.0, device=device)

    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * table(x.device)

    model = Tables().to(device)
    with apply_graphs(model) as hook:
        expected, *_ = [call(model, x(device)) for _ in range(3)]
        table.cache_clear()
        filler = [torch.full((8,), 5.0, device=device) for _ in range(64)]
        assert torch.equal(call(model, x(device)), expected)
        assert hook.stats().replayed == 2
    assert len(filler) == 64


def test_numbers_that_become_tensors_on_the_way(device: str) -> None:
    """On a GPU each of them is a copy from the host, which no graph can do."""

    class Makes(torch.nn.Module):
        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            most = torch.as_tensor(factor, device=x.device) * torch.tensor([1.0, 2.0] * 4, device=x.device)
            return torch.where(x > 0, x * most.add_(1), x.new_tensor(3.0)) + torch.tensor(0.5)

    model = Makes()
    with apply_graphs(model) as hook:
        for factor in (2.0, 3.0):
            for seed in range(4):
                given = x(device, seed)
                numbers = factor * torch.tensor([1.0, 2.0] * 4, device=device) + 1
                expected = torch.where(given > 0, given * numbers, torch.full_like(given, 3.0)) + 0.5
                assert torch.equal(call(model, given, factor), expected)
    assert not hook.stats().reasons
    assert hook.stats().replayed == 4


def test_hooks_of_others_are_called(model: Model, device: str) -> None:
    seen: list[int] = []
    handle = model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    with apply_graphs(model) as hook:
        for _ in range(5):
            call(model, x(device))
        assert len(seen) == 5
        assert "forward hooks of its user" in hook.stats().reasons[0]
        handle.remove()
        for _ in range(8):
            call(model, x(device))
        assert hook.stats().replayed > 0, "they are gone"


def test_own_hooks_inside_are_not_left_out(model: Model, device: str) -> None:
    class Counts(ModelHook):
        order = HookOrder.OTHER
        calls = 0

        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            self.calls += 1
            return args, kwargs

    inside, outside = Counts(), Counts()
    HookRegistry.get_or_create(model).register_hook("outside", outside)
    with apply_graphs(model) as hook:
        for _ in range(4):
            call(model, x(device))
        assert (hook.stats().replayed, outside.calls) == (2, 4)
        HookRegistry.get_or_create(model.layers[1]).register_hook("inside", inside)
        for _ in range(4):
            call(model, x(device))
        assert inside.calls == 4
        assert "layers.1 has what a replay would leave out: the hook 'inside'" in hook.stats().reasons


def test_a_failed_capture_leaves_everything_working(
    model: Model, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorders.recorder_for(x(device).device)
    assert recorder is not None
    fails = True
    real = recorder.record

    def record(function: Callable[[], Any]) -> Any:
        def out_of_memory() -> Any:
            function()
            raise torch.OutOfMemoryError("no room")

        return real(out_of_memory if fails else function)

    monkeypatch.setattr(recorder, "record", record)
    with apply_graphs(model) as hook:
        expected = call(model, x(device))
        for _ in range(3):
            assert nested.equal(call(model, x(device)), expected)
        assert "no room" in hook.stats().reasons[0]
        assert caplog.text.count("runs without graphs") == 1
        torch.randn(4, device=device)  # The generator is not taken to be captured.
        fails = False
        for _ in range(8):
            assert nested.equal(call(model, x(device)), expected)
        assert hook.stats().replayed > 0, "it is tried again"


def test_what_changes_at_every_call_is_given_up(model: Model, device: str) -> None:
    with apply_graphs(model) as hook:
        for number in range(24):
            model.layers[1].scale = float(number // 2)
            found = call(model, x(device))
        stats = hook.stats()
    assert nested.equal(found, call(model, x(device)))
    assert stats.reasons == ("what it depends on changes from call to call",)
    assert (stats.run, stats.recorded) == (24, 3), "less and less is recorded"


def test_a_form_that_changes_at_every_call_is_told_once(
    model: Model, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    with apply_graphs(model) as hook:
        for step in range(40):
            found = call(model, x(device), bias=1.0 / (step + 1))
        assert "each call has another form" in hook.stats().reasons[0]
        for seed in range(4):
            call(model, x(device, seed), bias=2.0)
        assert hook.stats().replayed == 2, "a form that comes again is recorded"
    assert caplog.text.count("runs without graphs: each call has another form") == 1
    assert nested.equal(found, call(model, x(device), bias=1.0 / 40))


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # Torch says so in each new thread.
def test_two_threads(model: Model, device: str) -> None:
    given = [x(device, seed) for seed in range(4)]
    expected = [call(model, one) for one in given]
    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(30):
            if not nested.equal(call(model, given[number]), expected[number]):
                wrong.append(number)

    with apply_graphs(model) as hook:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert hook.stats().replayed > 0


def test_no_input_is_overwritten_before_the_last_replay_has_read_it(
    model: Model, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on another thread's stream: the recorder has this one wait before anything is copied in."""
    recorder = recorders.recorder_for(x(device).device)
    assert recorder is not None
    done: list[str] = []
    with apply_graphs(model):
        for seed in range(3):
            call(model, x(device, seed))
        plain = StaticInputs.fill
        monkeypatch.setattr(recorder, "take_turn", lambda: done.append("wait"))
        monkeypatch.setattr(StaticInputs, "fill", lambda *args: (done.append("copy"), plain(*args))[1])
        call(model, x(device))
        assert done == ["wait", "copy"]


def test_what_is_compiled_stays_compiled(model: Model, device: str) -> None:
    runs: list[Any] = []

    def counting(graph: Any, _: Any) -> Any:
        return lambda *args: (runs.append(graph), graph(*args))[1]

    for layer in model.layers:
        layer.compile(backend=counting)
    try:
        with apply_graphs(model) as hook:
            for seed in range(4):
                call(model, x(device, seed))
            assert hook.stats().replayed
        runs.clear()
        call(model, x(device))
        assert len(runs) == len(model.layers)
    finally:
        torch.compiler.reset()
