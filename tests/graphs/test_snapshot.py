"""What is looked at is cheap, and what is not looked at does not matter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zoo
from samovar.graphs.snapshot import Snapshot, obstacle
from samovar.hooks import HookOrder, HookRegistry, ModelHook

CASES = {case.id: case for case in zoo.load()}


@pytest.fixture
def model() -> Any:
    return CASES["FluxTransformer2DModel"].build()


def test_a_forward_changes_nothing(model: Any) -> None:
    CASES["FluxTransformer2DModel"].run(model)
    snapshot = Snapshot(model)
    CASES["FluxTransformer2DModel"].run(model, 1)
    assert snapshot.is_in_place()
    assert snapshot.is_current()


def test_a_copy_of_its_output_changes_nothing(model: Any) -> None:
    """Python notes the slots of a class when the first object of it is copied."""
    output = model(**CASES["FluxTransformer2DModel"].inputs(0))
    kind: Any = type(output)
    if "__slotnames__" in vars(kind):
        del kind.__slotnames__
    snapshot = Snapshot(model)
    copy.copy(output)
    assert "__slotnames__" in vars(kind)
    assert snapshot.is_current()


def test_another_processor_and_its_settings_are_seen(model: Any) -> None:
    attention = model.transformer_blocks[0].attn
    snapshot = Snapshot(model)
    try:
        model.set_attention_backend("_native_math")
        assert not snapshot.is_current()
    finally:
        model.set_attention_backend("native")  # diffusers makes a model's backend that of the process, too.
    snapshot = Snapshot(model)
    attention.set_processor(type(attention.processor)())
    assert not snapshot.is_current()
    assert "processor" in snapshot.changed()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Of peft.
def test_adapters_are_seen(model: Any) -> None:
    from peft import LoraConfig

    def has_changed() -> bool:
        nonlocal snapshot
        before, snapshot = snapshot, Snapshot(model)
        return not (before.is_in_place() and before.is_current())

    snapshot = Snapshot(model)
    for name in ("one", "two"):
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name=name)
        assert has_changed()
    for change in (
        lambda: model.set_adapter("one"), model.disable_adapters, model.enable_adapters,
        lambda: model.set_adapters(["one", "two"], [0.5, 1.0]), lambda: model.set_adapters(["one", "two"], [0.7, 1.0]),
        model.fuse_lora, model.unfuse_lora, lambda: model.delete_adapters("two"),
    ):  # fmt: skip
        change()
        assert has_changed(), change
    assert not has_changed()


def test_idle_modules_do_not_count(model: Any) -> None:
    block = model.transformer_blocks[0]
    snapshot = Snapshot(model, set(block.modules()))
    block.attn.scale = 123.0
    block.attn.to_q.weight.data = block.attn.to_q.weight.data.clone()
    assert snapshot.is_in_place()
    assert snapshot.is_current()
    model.proj_out.weight.data = model.proj_out.weight.data.clone()
    assert not snapshot.is_in_place()
    assert snapshot.changed() == "its weights"


def test_obstacles(model: Any) -> None:
    assert obstacle(model) is None
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "global hooks" in str(obstacle(model))
    handle.remove()

    class Sharded(ModelHook):
        order = HookOrder.SHARD

    registry = HookRegistry.get_or_create(model)
    registry.register_hook("shard", Sharded())
    assert obstacle(model) == "ranks exchange tensors inside its forward"
    registry.remove_hook("shard")
    from diffusers import FirstBlockCacheConfig

    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    assert "which a replay would not call" in str(obstacle(model))
    model.disable_cache()
    assert obstacle(model) is None
