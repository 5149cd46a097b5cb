"""After a check that failed nothing is skipped, and no model is judged by the wrong blocks, or left out without a word.

Each of these was once: a crash, steps skipped at any threshold, blocks that ran at every skipped step, or none skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import UNGUARDED, Attention, Block, counted, differing, masks
from strangers import TEXT, VECTOR, WIDTH, Net, denoise, mask_of

import zoo
from pipelines import PIPELINES
from samovar import attach, find_anatomy

ALL = {**UNGUARDED, "rel_l1_thresh": 1e9}
"""Whatever can be skipped is."""
both = pytest.mark.parametrize("name", ["tea_cache"])


# ------------------------------------------------------------------------------------------------ self-checks that fail


class Refine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = torch.nn.LayerNorm(WIDTH), Attention(WIDTH)
        self.proj = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return text + self.proj(self.attn(self.norm(text)))


class Joint(Refine):
    """Attends to picture and text, and adds to the picture in place."""

    def forward(self, img: torch.Tensor, text: torch.Tensor, c: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        both = self.proj(self.attn(torch.cat([self.norm(img) * (1 + c), text], dim=1)))
        img += both[:, : img.shape[1]]
        return img


class Refined(Net):
    """Refines its text by blocks before the sample comes in; behind the blocks it may use what went through them."""

    leaks = False

    def __init__(self) -> None:
        super().__init__(refiner=Refine, blocks=Joint)

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.refiner:
            text = block(text)
        h, middle = self.inp(x), torch.zeros(())
        for block in self.blocks:
            middle = h.clone()
            h = block(h, text, t)
        return self.out(h + middle if self.leaks else h)


@both
@pytest.mark.parametrize("leaks", [True, False])
def test_a_refiner_of_the_text_never_judges_the_sample(leaks: bool, name: str) -> None:
    """Another sample at every step, and a threshold that nothing stays below."""
    model, bare = Refined(), Refined()
    model.leaks = bare.leaks = leaks
    with attach(model, cache={"backend": name, "rel_l1_thresh": 1e-12, "min_steps": 0}) as attached, torch.no_grad():
        for step in range(20):
            given = zoo.noise(step, 1, 6, 8), torch.tensor(1 - step / 20), TEXT
            assert torch.equal(model(*given), bare(*given)), f"step {step}"
        (stats,) = attached.stats().cache.denoisers.values()
    assert stats.skipped == 0
    assert (stats.problem is not None) is leaks


@both
def test_after_a_failed_check_nothing_is_skipped_at_any_threshold(name: str) -> None:
    model, bare = Refined(), Refined()
    model.leaks = bare.leaks = True
    with attach(model, cache={"backend": name, **ALL}) as attached:
        assert differing(denoise(model, TEXT), denoise(bare, TEXT)) == []
        (stats,) = attached.stats().cache.denoisers.values()
    assert "differs" in stats.problem
    assert f"nothing is skipped: {stats.problem}" in str(stats)


class Permuted(Net):
    """Space and time in turns, as Latte has it: tokens are permuted between the blocks of one list."""

    def __init__(self) -> None:
        super().__init__(blocks=lambda: Block(WIDTH))

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, t + y).transpose(0, 1).contiguous()
        return self.out(h)


@both
def test_tokens_that_are_permuted_between_blocks_do_no_harm(name: str) -> None:
    model = Permuted()
    exact = denoise(model, VECTOR, frames=3)
    for threshold in (0.0, 1e9):
        with attach(model, cache={"backend": name, **UNGUARDED, "rel_l1_thresh": threshold}) as attached:
            found, mask = denoise(model, VECTOR, frames=3), mask_of(attached)
        assert torch.equal(found[0], exact[0])
        assert ("." in mask) is (threshold > 0)
    assert differing(denoise(model, VECTOR, frames=3), exact) == []


class Double(Refine):
    def forward(self, img: torch.Tensor, txt: torch.Tensor) -> Any:  # type: ignore[override]
        both = self.proj(self.attn(torch.cat([img, txt], dim=1)))
        return img + both[:, : img.shape[1]], txt + both[:, img.shape[1] :]


class Single(torch.nn.Module):
    """No child of it is called attention, as in the original code of FLUX and HunyuanVideo."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear1(self.norm(x)).chunk(3, dim=-1)
        return x + self.linear2(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v)


class Original(Net):
    def __init__(self) -> None:
        super().__init__(refiner=Refine, doubles=Double, singles=Single)

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        img = self.inp(x) * (1 + t)
        for block in self.refiner:
            text = block(text)
        for block in self.doubles:
            img, text = block(img, text)
        h = torch.cat([img, text], dim=1)
        for block in self.singles:
            h = block(h)
        return self.out(h[:, : img.shape[1]])


@both
def test_blocks_without_an_attention_by_name_are_skipped_like_all_others(name: str) -> None:
    model = Original()
    assert {stack.path for stack in find_anatomy(model).stacks} == {"refiner", "doubles", "singles"}
    blocks = [*model.refiner, *model.doubles, *model.singles]
    with attach(model, cache={"backend": name, **ALL}) as attached, counted(blocks) as calls:
        denoise(model, TEXT)
        (stats,) = attached.stats().cache.denoisers.values()
    (branch,) = stats.branches.values()
    assert branch.mask == "#..........."
    assert len(calls) == len(blocks) * branch.computed
    assert stats.coverage.share > 0.8


# ------------------------------------------------------------------------------------------------ nothing skipped


class Trunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, c)
        return x


class Wrapper(Net):
    """Holds its trunk under a name that pipelines use for a denoiser."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        setattr(self, name, Trunk())

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.out(getattr(self, self._name)(self.inp(x), t + y))


@both
@pytest.mark.parametrize("held_as", ["trunk", "transformer", "model", "dit"])
def test_a_denoiser_is_cached_under_whatever_name_it_holds_its_trunk(held_as: str, name: str) -> None:
    model = Wrapper(held_as)
    with attach(model, cache={"backend": name, **ALL}) as attached:
        denoise(model, VECTOR)
        assert mask_of(attached) == "#..........."


@both
def test_prompts_of_different_lengths_are_skipped_alike(name: str) -> None:
    """Each branch has a form of inputs of its own, which it learns whoever leads."""
    qwen = PIPELINES["qwen-image"]
    pipe = qwen.build(0)
    with attach(pipe, cache={"backend": name, "rel_l1_thresh": 1e9}) as attached:
        qwen.run(pipe, 20, negative_prompt="an owl that flies over a forest")
        leading, following = masks(attached.stats().cache)
    assert leading == following
    assert leading.count(".") > 12
