"""Several threads, or several pipelines, on one offloaded transformer: right, or refused, and never mixed."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import zoo
from pipelines import PIPELINES
from samovar.core.errors import SettingError
from samovar.hooks import HookOrder, HookRegistry, ModelHook
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload

from .foreseen import count_small_layers
from .holding import CASES, Holder, layerwise

FLUX = PIPELINES["flux"]
STEPS = 6


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Between threads, so that what can go wrong does. Calls of the zoo set torch's stance, which all threads have in
    common, and each sets it back to what it was."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with torch.compiler.set_stance("default"):
        yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _small_layers_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ahead" in request.node.name:
        count_small_layers(monkeypatch)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """The results of jobs that run at the same time, or their errors. One that hangs fails the test."""
    results: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        start.wait()
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return results


def sharing(pipe: Any, *names: str) -> Any:
    """Another pipeline with some of the same components and copies of all else. Threads must not share a tokenizer: it
    keeps how the current call pads."""
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    other = type(pipe)(**{n: part if n in names else copy.deepcopy(part) for n, part in parts.items()})
    other.set_progress_bar_config(disable=True)
    return other


def offload(pipe: Any, mode: Any, *, lazy: bool = False) -> Offloaded:
    config = {"mode": "layerwise", "precompute": True} if mode == "ahead" else {"mode": mode}
    return apply_offload(pipe, OffloadConfig(**config, activations=0), stage=HostStage(lazy=lazy))


def whole(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("mode", ["model", "layerwise", "ahead"])
def test_two_pipelines_share_a_transformer_and_one_is_offloaded(mode: str, lazy: bool) -> None:
    pipe = FLUX.build(0)
    expected = [FLUX.run(pipe, STEPS, seed=seed) for seed in range(2)]
    before = copy.deepcopy(pipe.transformer.state_dict())
    other = sharing(pipe, "transformer")
    offloaded = offload(pipe, mode, lazy=lazy)
    for _ in range(3):
        got = together(lambda: FLUX.run(pipe, STEPS, seed=0), lambda: FLUX.run(other, STEPS, seed=1))
        assert all(map(torch.equal, got, expected)), got
    offloaded.detach()
    assert whole(pipe.transformer, before)


@pytest.mark.parametrize("mode", ["model", "layerwise"])
def test_encoders_and_transformer_in_two_threads(mode: str) -> None:
    """They take turns on the device, so each call may unload what the other thread needs next."""
    pipe = FLUX.build(0)
    other = sharing(pipe, "transformer", "text_encoder", "text_encoder_2")

    @torch.no_grad()
    def encode() -> list[torch.Tensor]:
        return [other.encode_prompt("a cat", None, device="cpu", max_sequence_length=8)[0] for _ in range(8)]

    expected = FLUX.run(pipe, STEPS), encode()[0]
    offloaded = offload(pipe, mode)
    picture, encoded = together(lambda: FLUX.run(pipe, STEPS), encode)
    assert torch.equal(picture, expected[0])
    assert all(torch.equal(one, expected[1]) for one in encoded)
    offloaded.detach()


def test_one_model_called_by_many_threads() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    expected = [case.run(model, step) for step in range(4)]
    offloaded = layerwise(model)
    calls = [lambda step=step: [case.run(model, step) for _ in range(3)] for step in range(4)]
    for step, outputs in enumerate(together(*calls)):
        assert not isinstance(outputs, Exception), outputs
        assert all(zoo.equal(output, expected[step]) for output in outputs)
    offloaded.detach()


@pytest.mark.parametrize("change", ["detach", "replan"])
def test_taken_off_or_replanned_while_another_thread_calls(change: str) -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    expected, before = case.run(model, 0), copy.deepcopy(model.state_dict())
    for _ in range(5):
        holder = Holder(transformer=model, text_encoder=torch.nn.Linear(2, 2))
        offloaded = layerwise(holder)

        def act(offloaded: Offloaded = offloaded) -> None:
            if change == "detach":
                offloaded.detach()
            else:
                for mode in ("model", "layerwise"):
                    offloaded.replan(mode=mode)

        *outputs, error = together(*[lambda: case.run(model, 0)] * 3, act)
        assert error is None
        for output in outputs:
            if isinstance(output, SettingError):
                assert "another thread" in str(output)
            else:
                assert zoo.equal(output, expected)
        offloaded.detach()
        assert offloaded.stage.stats.held_bytes == 0
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert zoo.equal(case.run(model, 0), expected)


class Raises(ModelHook):
    """Raises before or after the call, outside or inside the hooks of offload."""

    def __init__(self, order: HookOrder, method: str) -> None:
        self.order = order

        def fail(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

        setattr(self, method, fail)


@pytest.mark.parametrize("order", [HookOrder.CACHE, HookOrder.OTHER])
@pytest.mark.parametrize("method", ["pre_forward", "post_forward", "failed_forward"])
@pytest.mark.parametrize("path", ["", "transformer_blocks.0", "x_embedder", "proj_out"])
def test_whoever_raises_the_lock_is_free_again(order: HookOrder, method: str, path: str) -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    expected = case.run(model, 0)
    holder = Holder(transformer=model, text_encoder=torch.nn.Linear(2, 2))
    offloaded = layerwise(holder)
    module = model.get_submodule(path)
    registry = HookRegistry.get_or_create(module)
    registry.register_hook("raises", Raises(order, method))
    if method == "failed_forward":
        registry.register_hook("raises too", Raises(HookOrder.OTHER, "pre_forward"))
    with pytest.raises(ZeroDivisionError):
        case.run(model, 0)
    registry.remove_hook("raises")
    registry.remove_hook("raises too")
    assert zoo.equal(together(lambda: case.run(model, 0))[0], expected)
    offloaded.detach()


def test_two_offloaded_pipelines_do_not_wait_for_each_other() -> None:
    pipes = [FLUX.build(seed) for seed in range(2)]
    expected = [FLUX.run(pipe, STEPS) for pipe in pipes]
    offloaded = [offload(pipe, "layerwise") for pipe in pipes]
    got = together(*[lambda pipe=pipe: FLUX.run(pipe, STEPS) for pipe in pipes])
    assert all(map(torch.equal, got, expected))
    for one in offloaded:
        one.detach()
