"""Observing changes nothing of what is observed: no output, no input, no counter, no hook of a user's, no adapter.

Each of these was disturbed once: models that nobody here wrote do as they like.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, UNGUARDED, Plain, at, case, differing, loop
from strangers import VECTOR, WIDTH, Net, denoise, mask_of

from pipelines import PIPELINES
from samovar import attach
from samovar.cache import make_cache_backend
from samovar.hooks import call_context

both = pytest.mark.parametrize("name", ["tea_cache"])


# ------------------------------------------------------------------------------------------------ blocks in place


class Holder(torch.nn.Module):
    """An attention whose parts are called, and itself is not, as in the original code of FLUX."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)


class Adding(torch.nn.Module):
    """Adds to what it is given in place, as ComfyUI's FLUX and Chroma do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = torch.nn.LayerNorm(WIDTH), Holder()

    def added(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attn.qkv(self.norm(x) * (1 + temb)).chunk(3, dim=-1)
        attended: torch.Tensor = self.attn.proj(torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v)
        return attended

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        x += self.added(x, temb)
        return x


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__(blocks=Adding)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, t + y)
        return self.out(h)


@both
@pytest.mark.parametrize("threshold", [0.0, 1e-12])
def test_blocks_that_add_in_place_are_exact_where_nothing_is_skipped(threshold: float, name: str) -> None:
    model = InPlace()
    exact = denoise(model, VECTOR)
    with attach(model, cache={"backend": name, "rel_l1_thresh": threshold, "min_steps": 0}) as attached:
        assert differing(denoise(model, VECTOR), exact) == []
        assert attached.stats().cache.skipped == 0


@both
def test_blocks_that_add_in_place_are_skipped_like_others(name: str) -> None:
    class Separate(Adding):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return x + self.added(x, temb)

    model, plain = InPlace(), InPlace()
    plain.blocks = torch.nn.ModuleList(Separate() for _ in range(4))
    plain.load_state_dict(model.state_dict())
    found = []
    for built in (model, plain):
        with attach(built, cache={"backend": name, **UNGUARDED, "rel_l1_thresh": 0.3}) as attached:
            found.append((denoise(built, VECTOR), mask_of(attached)))
    assert found[0][1] == found[1][1]
    assert "." in found[0][1]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ what is observed


class Scaling(Plain):
    """Writes into its input."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        hidden_states.mul_(0.5)
        return super().forward(hidden_states, timestep, encoder_hidden_states)


@both
@pytest.mark.parametrize("threshold", [0.0, 1e-12, 1e9])
def test_a_model_that_writes_into_its_input_gets_each_input_once(threshold: float, name: str) -> None:
    @torch.no_grad()
    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        sample, samples = at(0)[0], []
        with call_context(branch="only"):
            for step in range(10):
                sample = sample + 0.1 * model(sample, torch.full((1,), 1 - step / 10), COND)
                samples.append(sample.clone())
        return samples

    model = Scaling()
    with attach(model, cache={"backend": name, **UNGUARDED, "rel_l1_thresh": threshold}) as attached:
        assert differing(run(model), run(Scaling())) == []
        (stats,) = attached.stats().cache.denoisers.values()
    assert (threshold == 0) or stats.problem == "it writes into its inputs"


@both
def test_users_hooks_fire_as_often_as_on_a_bare_pipeline(name: str) -> None:
    flux, seen = PIPELINES["flux"], []
    for is_cached in (False, True):
        pipe, calls = flux.build(0), []
        if is_cached:
            backend = make_cache_backend({"backend": name, "rel_l1_thresh": 1e-9})
            assert backend is not None
            backend.enable(pipe)

        def note(module: Any, args: Any, kwargs: Any, output: Any, calls: list[Any] = calls) -> None:
            calls.append(kwargs["timestep"].tolist() if "timestep" in kwargs else [float(output.norm())])

        for module in (pipe.transformer, pipe.transformer.time_text_embed):
            module.register_forward_hook(note, with_kwargs=True)
        flux.run(pipe, 8, true_cfg_scale=1.0)
        seen.append(calls)
    assert len(seen[0]) == 16
    assert seen[0] == seen[1]


class Counting(Plain):
    """Counts its steps, as a model with a gate for each of them does."""

    count = 0

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        self.count += 1
        return super().forward(hidden_states, timestep, encoder_hidden_states) * (1 + 0.1 * self.count)


@both
def test_a_model_that_counts_its_calls_counts_steps(name: str) -> None:
    bare, model = Counting(), Counting()
    with attach(model, cache={"backend": name, **UNGUARDED, "rel_l1_thresh": 1e-9}):
        assert differing(loop(model), loop(bare)) == []
    assert model.count == bare.count


@both
@pytest.mark.parametrize("model", ["NucleusMoEImageTransformer2DModel", "MotifVideoTransformer3DModel"])
def test_scales_of_adapters_are_put_back_after_every_step(model: str, name: str) -> None:
    """These models scale their adapters before their blocks run, and scale them back behind them."""
    peft = pytest.importorskip("peft")
    found = case(model)

    def build() -> Any:
        built = found.build()
        linear = {path for path, part in built.named_modules() if isinstance(part, torch.nn.Linear)}
        targets = [path for path in linear if path.endswith(("to_q", "to_k", "to_v"))]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=sorted(targets), init_lora_weights=False)
            built.add_adapter(config)
        return built

    def step(built: Any, index: int) -> torch.Tensor:
        moving = {key: found.inputs(index)[key] for key in ("hidden_states", "timestep")}
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            output: torch.Tensor = built(**kept | moving, attention_kwargs={"scale": 0.5}, return_dict=False)[0]
        return output

    kept = found.inputs(0)
    bare, cached = build(), build()
    layers = [part for part in cached.modules() if hasattr(part, "scaling")]
    with attach(cached, cache={"backend": name, "min_steps": 0, "rel_l1_thresh": 0.5}) as attached:
        pairs = []
        for index in range(12):
            pairs.append((step(cached, index), step(bare, index)))
            assert {layer.scaling["default"] for layer in layers} == {1.0}
        mask = mask_of(attached)
    assert "." in mask
    assert [index for index, pair in enumerate(pairs) if mask[index] == "#" and not torch.equal(*pair)] == []
