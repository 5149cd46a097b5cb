"""Images of a batch that are not due are left out of it, where a row is what it is in the whole batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cache.test_auto import MEAN, Known, sampled, sampled_as_a_batch
from samovar.cache import AutoConfig
from samovar.cache.some_rows import _rounded_up
from samovar.cache.teacache import apply_teacache_hook

STEPS = 28
HARD = 5.0
"""Images with a larger mean cannot be forecast."""


class Counted(Known):
    """Notes how many rows each call has. `table` is as long as a batch, and is for all images."""

    def __init__(self, mixes: bool = False, table: torch.Tensor | None = None) -> None:
        super().__init__()
        self.rows: list[int] = []
        self._mixes, self.table = mixes, table

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        table: torch.Tensor | None = None,
    ) -> Any:
        self.rows.append(len(sample))
        output = super().forward(sample, timestep, encoder_hidden_states)
        hard = encoder_hidden_states.flatten(1).mean(1) > HARD
        noise = torch.randn(output.shape[1:], generator=torch.Generator().manual_seed(int(1e6 * float(timestep[0]))))
        output = torch.where(hard.reshape(-1, 1, 1, 1), noise, output)
        if self._mixes:
            output = output + sample.mean(0)
        return output if table is None else output * table.sum()


def batch(hard: int, easy: int) -> torch.Tensor:
    shape = (hard + easy, *MEAN.shape[1:])
    means = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return means + torch.tensor([10.0] * hard + [0.0] * easy).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize(("hard", "easy", "computed"), [(1, 3, 1), (1, 7, 1), (2, 6, 2), (3, 5, 4), (4, 4, 4)])
def test_a_hard_image_is_computed_without_the_easy_ones(hard: int, easy: int, computed: int) -> None:
    mean = batch(hard, easy)
    model = Counted()
    exact = sampled(model, mean, STEPS)
    model.rows.clear()
    hook = apply_teacache_hook(model, AutoConfig(0.1))
    found = sampled(model, mean, STEPS)
    by_image = hook.stats().branches["cond"].computed_by_image()
    assert by_image[:hard] == [STEPS] * hard
    assert max(by_image[hard:]) < STEPS
    assert {hard + easy, computed} <= set(model.rows)
    assert sum(model.rows) < STEPS * (hard + easy)
    assert torch.allclose(found[:hard], exact[:hard], atol=1e-4)
    alone = Counted()
    apply_teacache_hook(alone, AutoConfig(0.1))
    start = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))[hard:]
    assert torch.allclose(found[hard:], sampled(alone, mean[hard:], STEPS, start=start), atol=1e-4)


def test_branches_in_one_batch_keep_their_rows_together() -> None:
    """Rows of guidance are copies of all images, one after the other."""
    mean = batch(1, 3)
    model, bare = Counted(), Counted()
    hook = apply_teacache_hook(model, AutoConfig(0.03))
    found, exact = sampled_as_a_batch(model, mean, scale=1.5), sampled_as_a_batch(bare, mean, scale=1.5)
    assert hook.stats().branches["cond"].computed_by_image()[0] == STEPS
    assert 2 in model.rows, "one image in two branches"
    assert torch.allclose(found[:1], exact[:1], atol=1e-4)


def test_a_model_whose_images_depend_on_each_other_is_computed_whole() -> None:
    model = Counted(mixes=True)
    apply_teacache_hook(model, AutoConfig(0.3))
    sampled(model, batch(1, 3), STEPS)
    tried = [rows for rows in model.rows if rows != 4]
    assert len(tried) == 1, "seen at the first try"


def test_an_input_that_is_as_long_as_a_batch_by_chance() -> None:
    """Taking its rows too changes what comes out, which is seen."""
    model, mean = Counted(), batch(1, 3)
    apply_teacache_hook(model, AutoConfig(0.1))
    sample, table = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0)), torch.full((4,), 0.25)
    for now, then in itertools.pairwise(torch.linspace(1, 0, STEPS + 1)):
        with torch.no_grad():
            sample = sample + (then - now) * model(sample, now.expand(4), mean, table)
    assert len([rows for rows in model.rows if rows != 4]) == 1


@pytest.mark.parametrize(
    ("due", "images"),
    [([True, False, False, False], [0]), ([False, True, True, True], [0, 1, 2, 3]), ([False, True, True], [1, 2]),
     ([True, True, True, False, False], [0, 1, 2, 3]), ([True] * 5 + [False], list(range(6)))],
)  # fmt: skip
def test_few_sizes(due: list[bool], images: list[int]) -> None:
    assert _rounded_up(due) == images
