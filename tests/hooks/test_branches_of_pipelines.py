"""Real pipelines that do not name their branches, and make some of their conditioning anew at each step."""

from __future__ import annotations

import diffusers
import pytest
from test_context import Watch

from pipelines.builder import Recipe, build
from pipelines.recipes import RECIPES
from pipelines.standins import standins
from pipelines.trying import call_of
from samovar import Omni
from samovar.hooks import BranchHook, HookRegistry


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "branches"),
    [
        ("FluxControlNetPipeline", 1),
        ("FluxControlNetImg2ImgPipeline", 1),
        ("Lumina2Pipeline", 2),
        ("AceStepPipeline", 1),
    ],
)
def test_the_same_branches_at_every_step(name: str, branches: int) -> None:
    recipe = RECIPES.get(name, Recipe())
    with standins():
        pipe = build(getattr(diffusers, name), recipe)
        watch, hook = Watch(), BranchHook()
        registry = HookRegistry.get_or_create(pipe.transformer)
        registry.register_hook("watch", watch)
        registry.register_hook("branches", hook)
        with Omni(pipe, device="cpu", progress=False) as omni:
            for _ in range(2):
                watch.seen.clear()
                omni.generate("a cat", **call_of(omni, recipe) | {"num_inference_steps": 7})
                names = [context.branch for context in watch.seen]
                assert len(names) >= 4 * branches
                assert len(set(names[:branches])) == branches
                assert names == names[:branches] * (len(names) // branches)
                assert None not in names
                assert hook.trouble() is None
