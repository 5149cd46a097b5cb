"""With time-only layers computed ahead every pipeline gives the bits of the bare one: whatever it is given, whoever
changes it, and when. What cannot be foreseen is computed on the spot, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import samovar
from pipelines import PIPELINES
from samovar.core.errors import ModelError, SettingError
from samovar.hooks import HookRegistry, ModelHook, Run, running
from samovar.offload import OffloadConfig, apply_offload, time_layers
from samovar.offload.sizes import Component, find_components
from samovar.offload.time_layers import may_have_time_layers, with_layers_of
from samovar.offload.timesteps import MAX_AHEAD, coming_inputs

from .foreseen import Loop, ahead, count_small_layers, stats
from .holding import CASES, Holder
from .test_never_lost import EDITS, same_state

FLUX = PIPELINES["flux"]
STEPS = 4
MODES = ["model", "layerwise"]
TIMES = torch.tensor([999.0, 749.5, 500.25, 250.125])


@pytest.fixture(autouse=True)
def _small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    count_small_layers(monkeypatch)


def modulations(model: Any) -> list[torch.nn.Module]:
    return [part for path, part in model.named_modules() if path.endswith(("norm1.linear", "norm1_context.linear"))]


def embedders(model: Any) -> list[torch.nn.Module]:
    return [part for path, part in model.time_text_embed.named_modules() if path.endswith(("linear_1", "linear_2"))]


def parts(model: Any, which: str) -> list[torch.nn.Module]:
    elsewhere = [model.x_embedder, model.transformer_blocks[0].attn.to_q]
    return {"modulations": modulations(model), "embedders": embedders(model), "elsewhere": elsewhere}[which]


# ------------------------------------------------------------------------------------------------ what it is given


@pytest.mark.parametrize(("name", "mode"), [("flux", "model"), *((name, "layerwise") for name in PIPELINES)])
def test_every_pipeline(name: str, mode: str) -> None:
    """Other seeds, steps, prompts, batches and guidance; pooled text; two denoisers."""
    tiny = PIPELINES[name]
    bare, pipe = tiny.build(0), tiny.build(0)
    offloaded = ahead(pipe, mode)
    call = {**tiny.settings}
    calls: list[dict[str, Any]] = [{}, {"seed": 1}, {"steps": 3}, {"prompt": "a dog on a mat"}]
    calls += [{"num_images_per_prompt": 2}] if "num_frames" not in call else [{"num_videos_per_prompt": 2}]
    calls += [{"guidance_scale": 5.0}, {}]
    for changes in calls:
        steps = changes.get("steps", STEPS)
        rest = {key: value for key, value in changes.items() if key != "steps"}
        assert torch.equal(tiny.run(pipe, steps, **rest), tiny.run(bare, steps, **rest)), changes
    for denoiser in tiny.denoisers:
        seen = stats(offloaded, denoiser)
        assert seen.layers == len(offloaded.time_layers[denoiser].layers) > 2
        assert seen.found_forwards > 3 * STEPS / len(tiny.denoisers)
        assert seen.live_calls == 0
        assert offloaded.plan.component(denoiser).ahead_bytes > 0
    offloaded.detach()
    assert torch.equal(tiny.run(pipe, STEPS), tiny.run(bare, STEPS))
    assert all(same_state(getattr(pipe, one), getattr(bare, one)) for one in tiny.denoisers)


def test_the_weights_are_not_on_the_device_after_the_first_step() -> None:
    pipe = FLUX.build(0)
    offloaded = ahead(pipe)
    here: list[bool] = []

    def look(pipe: Any, *_: Any) -> Any:
        layers = offloaded.time_layers["transformer"].layers.values()
        here.append(any(offloaded.stage.is_here(p) for layer in layers for p in layer.parameters()))
        return {}

    FLUX.run(pipe, STEPS, callback_on_step_end=look)
    sent = offloaded.stats().sent_bytes
    FLUX.run(pipe, STEPS)
    first = offloaded.stats().sent_bytes - sent
    FLUX.run(pipe, 2 * STEPS)
    assert here == [False] * STEPS
    assert stats(offloaded).live_calls == 0
    assert first > 0
    offloaded.detach()


@pytest.mark.parametrize("where", ["in memory", "in files"])
def test_weights_that_visit_the_device_for_every_prompt_are_pinned(where: str, tmp_path: Path) -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    if where == "in files":
        pipe.save_pretrained(tmp_path)
        pipe = type(pipe).from_pretrained(tmp_path)
        pipe.set_progress_bar_config(disable=True)
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    offloaded = ahead(pipe)
    assert "pinned, sent once in a run" in str(offloaded.tiers)
    sent = [offloaded.stats().sent_bytes]
    for number in range(3):
        prompt = "abcdefgh"[number:]
        expected = FLUX.run(bare, 2, prompt=prompt)
        for _ in range(2):  # The second one finds what was computed for the first.
            assert torch.equal(FLUX.run(pipe, 2, prompt=prompt), expected), number
            sent.append(offloaded.stats().sent_bytes)
    news = [later - earlier for earlier, later in itertools.pairwise(sent)]
    fewest = min(first - second for first, second in zip(news[::2], news[1::2], strict=True))
    assert fewest >= stats(offloaded).num_bytes
    assert offloaded.stats().pinned_bytes >= stats(offloaded).num_bytes
    assert stats(offloaded).live_calls == 0
    offloaded.detach()
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.transformer.state_dict().items())


def schedulers() -> dict[str, Callable[[], Any]]:
    import diffusers as d

    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    return {
        "Euler": d.EulerDiscreteScheduler,
        "Euler ancestral": d.EulerAncestralDiscreteScheduler,
        "Heun": d.HeunDiscreteScheduler,
        "DPM++": d.DPMSolverMultistepScheduler,
        "DPM++ singlestep": d.DPMSolverSinglestepScheduler,
        "DDIM": d.DDIMScheduler,
        "DDPM": d.DDPMScheduler,
        "UniPC": lambda: d.UniPCMultistepScheduler(**flow),
        "flow Euler": d.FlowMatchEulerDiscreteScheduler,
        "flow Heun": d.FlowMatchHeunDiscreteScheduler,
        "LCM": d.LCMScheduler,
        "Karras": lambda: d.EulerDiscreteScheduler(use_karras_sigmas=True),
    }


@pytest.mark.parametrize("scheduler", schedulers())
def test_schedulers(scheduler: str) -> None:
    name = "LTXVideoTransformer3DModel" if "flow" in scheduler else "DiTTransformer2DModel"
    bare, pipe = (Loop(CASES[name], schedulers()[scheduler]()) for _ in range(2))
    offloaded = ahead(pipe)
    for steps in (4, 4, 6):
        assert torch.equal(pipe(steps), bare(steps))
    seen = stats(offloaded)
    assert seen.live_calls == 0
    assert seen.found_forwards >= 10
    pipe.scheduler, bare.scheduler = (schedulers()["DDIM"]() for _ in range(2))
    assert torch.equal(pipe(5), bare(5))
    offloaded.detach()


def test_custom_sigmas_and_another_pipeline_that_starts_half_way() -> None:
    from diffusers import FluxImg2ImgPipeline

    bare, pipe = FLUX.build(0), FLUX.build(0)
    offloaded = ahead(pipe)
    custom = {"sigmas": [0.93, 0.61, 0.33, 0.07]}
    for _ in range(2):
        assert torch.equal(FLUX.run(pipe, STEPS, **custom), FLUX.run(bare, STEPS, **custom))
    images = [FluxImg2ImgPipeline.from_pipe(one) for one in (bare, pipe)]
    picture = torch.linspace(0, 1, 3 * 16 * 24).reshape(1, 3, 16, 24)
    settings = {"image": picture, "strength": 0.5, "height": 16, "width": 24, "max_sequence_length": 8}
    for _ in range(2):
        drawn = [
            one("a cat", num_inference_steps=6, output_type="latent", return_dict=False,
                generator=torch.Generator().manual_seed(0), **settings)[0]
            for one in images
        ]  # fmt: skip
        assert torch.equal(*drawn)
    assert stats(offloaded).live_calls == 0
    offloaded.detach()


def test_guidance_embeddings() -> None:
    bare, pipe = (Loop(CASES["FluxTransformer2DModel"], schedulers()["flow Euler"]()) for _ in range(2))
    assert "guidance" in bare.case.inputs(0)
    offloaded = ahead(pipe)
    for guidance in (3.5, 3.5, 2.0):
        changes = {"guidance": torch.tensor([guidance])}
        assert torch.equal(pipe(STEPS, **changes), bare(STEPS, **changes))
    seen = stats(offloaded)
    assert seen.live_calls == 0
    assert seen.found_forwards >= 3 * STEPS - 2
    offloaded.detach()


@pytest.mark.parametrize("given", [0.0, 0.25])
def test_a_time_for_each_token(given: float) -> None:
    """Tokens of given frames have another time. All steps are foreseen nevertheless."""

    class PerToken(Loop):
        def inputs(self, sample: torch.Tensor, t: torch.Tensor, place: int, **changes: Any) -> dict[str, Any]:
            times = t.expand(sample.shape[0], sample.shape[1]).clone()
            times[:, :2] = given
            return self.case.inputs(0) | {"hidden_states": sample, "timestep": times}

    bare, pipe = (PerToken(CASES["LTXVideoTransformer3DModel"], schedulers()["flow Euler"]()) for _ in range(2))
    offloaded = ahead(pipe)
    for _ in range(2):
        assert torch.equal(pipe(), bare())
    seen = stats(offloaded)
    assert seen.live_calls == 0
    assert seen.found_forwards == 2 * STEPS - 1
    offloaded.detach()


def test_times_that_nobody_foresees_are_computed_step_by_step() -> None:
    class Odd(Loop):
        def inputs(self, sample: torch.Tensor, t: torch.Tensor, place: int, **changes: Any) -> dict[str, Any]:
            return super().inputs(sample, t * 0.77 + place, place, **changes)

    bare, pipe = (Odd(CASES["DiTTransformer2DModel"], schedulers()["DDIM"]()) for _ in range(2))
    offloaded = ahead(pipe)
    assert torch.equal(pipe(8), bare(8))
    seen = stats(offloaded)
    assert (seen.computed_steps, seen.found_forwards, seen.live_calls) == (8, 0, 0)
    offloaded.detach()


# ------------------------------------------------------------------------------------------------ who changes it


@pytest.mark.parametrize("which", ["modulations", "embedders", "elsewhere"])
@pytest.mark.parametrize("edit", ["through_data", "assign"])
def test_weights_that_are_changed_between_runs_and_in_a_run(edit: str, which: str) -> None:
    for at in (None, 1):

        def change(pipe: Any, step: int, timestep: Any, kwargs: Any, at: int | None = at) -> Any:
            for part in parts(pipe.transformer, which) if step == at else ():
                EDITS[edit](part)
            return kwargs

        bare, pipe = FLUX.build(0), FLUX.build(0)
        offloaded = ahead(pipe)
        for one in (bare, pipe):
            FLUX.run(one, STEPS)
        if at is None:
            for one in (bare, pipe):
                change(one, None, None, None)  # type: ignore[arg-type]
        for _ in range(2):
            drawn = [FLUX.run(one, STEPS, callback_on_step_end=change) for one in (bare, pipe)]
            assert torch.equal(*drawn), at
        offloaded.detach()
        assert same_state(pipe.transformer, bare.transformer)
        assert torch.equal(FLUX.run(bare, STEPS), FLUX.run(pipe, STEPS))


TARGETS = {
    "modulations": ["norm1.linear", "norm1_context.linear", "norm.linear"],
    "embedders": ["linear_1", "linear_2"],
    "elsewhere": ["to_q", "x_embedder"],
}


def adapt(pipe: Any, which: str) -> None:
    from peft import LoraConfig

    torch.manual_seed(1)
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=TARGETS[which], init_lora_weights=False), "a")


LORA: list[Callable[[Any], None]] = [
    lambda pipe: pipe.transformer.set_adapters("a", 0.3),
    lambda pipe: pipe.transformer.disable_adapters(),
    lambda pipe: pipe.transformer.enable_adapters(),
    lambda pipe: pipe.transformer.fuse_lora(),
    lambda pipe: pipe.transformer.unfuse_lora(),
    lambda pipe: pipe.transformer.delete_adapters("a"),
]


@pytest.mark.parametrize("is_within", [False, True])
@pytest.mark.parametrize("which", TARGETS)
def test_adapters_come_change_and_go(which: str, is_within: bool) -> None:
    acts = [lambda pipe: adapt(pipe, which), *LORA]

    def change(pipe: Any, step: int, timestep: Any, kwargs: Any) -> Any:
        if step < len(acts):
            acts[step](pipe)
        return kwargs

    bare, pipe = FLUX.build(0), FLUX.build(0)
    offloaded = ahead(pipe)
    assert torch.equal(FLUX.run(bare, STEPS), FLUX.run(pipe, STEPS))
    if is_within:
        drawn = [FLUX.run(one, len(acts) + 2, callback_on_step_end=change) for one in (bare, pipe)]
        assert torch.equal(*drawn)
    for act in () if is_within else acts:
        for one in (bare, pipe):
            act(one)
        assert torch.equal(FLUX.run(bare, 2), FLUX.run(pipe, 2))
    found = stats(offloaded).found_forwards
    assert torch.equal(FLUX.run(bare, STEPS), FLUX.run(pipe, STEPS))
    assert stats(offloaded).found_forwards > found  # Still computed ahead, after all this.
    offloaded.detach()
    assert same_state(bare.transformer, pipe.transformer)


# ------------------------------------------------------------------------------------------------ what is caught


class Toy(torch.nn.Module):
    """Blocks with modulations. What they see may depend on more than time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedder = torch.nn.Linear(8, 64)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.secret: float | None = None
        """Added to the time embedding."""
        self.late_secret: float | None = None
        """Added before the last block alone."""
        self.least = -1.0
        """Below this time, modulations see the sample."""
        self.writes = False

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        temb = self.embedder((timestep[:, None] * torch.arange(1, 9)).sin())
        if self.secret is not None:
            temb = temb + self.secret
        if float(timestep[0]) < self.least:
            temb = temb + hidden_states.mean(1)
        for block in self.blocks[:-1]:
            hidden_states = block(hidden_states, temb)
        if self.late_secret is not None:
            temb = temb + self.late_secret
        hidden_states = self.blocks[-1](hidden_states, temb)
        if self.writes:
            temb.zero_()
        return hidden_states


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mod = torch.nn.Linear(64, 128)
        self.attn = torch.nn.Linear(64, 64)

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        scale, shift = self.mod(temb).chunk(2, -1)
        return hidden_states + self.attn(hidden_states * scale[:, None] + shift[:, None])


class Scheduler:
    timesteps = torch.tensor([1.0, 0.75, 0.5, 0.25])


def toys() -> tuple[Toy, Holder]:
    holder = Holder(transformer=Toy())
    holder.scheduler = Scheduler()  # type: ignore[attr-defined]
    return Toy(), holder


def steps(model: Toy, change: Callable[[Toy, int], None] = lambda model, step: None) -> list[torch.Tensor]:
    outputs = []
    with torch.no_grad():
        for step, t in enumerate(Scheduler.timesteps):
            change(model, step)
            outputs.append(model(torch.ones(2, 5, 64), t.expand(2)))
    return outputs


def set_secret(model: Toy, step: int) -> None:
    model.secret = None if step < 2 else 0.1 * step


SECRETS: dict[str, Callable[[Toy, int], None]] = {
    "of later steps": set_secret,
    "before the last block": lambda model, step: setattr(model, "late_secret", 0.5 if step == 2 else None),
    "at the last step": lambda model, step: setattr(model, "late_secret", 0.5 if step == 3 else None),
    "that is the sample": lambda model, step: setattr(model, "least", 0.6),
}


@pytest.mark.parametrize("secret", SECRETS)
def test_a_hidden_state_of_the_model_is_an_error(secret: str) -> None:
    _, holder = toys()
    offloaded = ahead(holder)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"transformer.*precompute=False"), running(holder):
            steps(holder.transformer, SECRETS[secret])
    offloaded.replan(precompute=False)
    with running(holder):
        assert all(map(torch.equal, steps(holder.transformer, SECRETS[secret]), steps(Toy(), SECRETS[secret])))
    offloaded.detach()


def test_outside_of_a_run_the_wrong_output_is_not_even_returned() -> None:
    model = Toy()
    offloaded = ahead(model)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 5, 64), torch.ones(2)), steps(model)[0])
        model.late_secret = 0.5
        with pytest.raises(ModelError):
            model(torch.ones(2, 5, 64), torch.ones(2))
    offloaded.detach()


def test_a_model_that_writes_into_what_its_layers_were_given() -> None:
    bare, holder = toys()
    bare.writes = holder.transformer.writes = True
    offloaded = ahead(holder)
    for _ in range(2):
        with running(holder):
            assert all(map(torch.equal, steps(holder.transformer), steps(bare)))
    assert stats(offloaded).found_forwards == 7
    offloaded.detach()


@pytest.mark.parametrize("kind", ["forward", "pre", "global", "replaced", "samovar", "class"])
def test_hooks_on_a_layer_are_called(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, holder = toys()
    offloaded = ahead(holder)
    with running(holder):
        steps(holder.transformer)
    handles = []
    for model in (bare, holder.transformer):
        mod = model.blocks[1].mod
        if kind == "forward":
            mod.register_forward_hook(lambda module, args, output: output + 1)
        elif kind == "pre":
            mod.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        elif kind == "replaced":
            mod.forward = lambda x, mod=mod: torch.nn.functional.linear(x, mod.weight)
        elif kind == "samovar":
            hook = ModelHook()
            hook.post_forward = lambda module, output: output + 1  # type: ignore[method-assign]
            HookRegistry.get_or_create(mod).register_hook("theirs", hook)
    if kind == "global":
        handles.append(
            torch.nn.modules.module.register_module_forward_hook(
                lambda module, args, output: output + 1 if getattr(module, "out_features", 0) == 128 else None
            )
        )
    if kind == "class":
        forward = torch.nn.Linear.forward
        monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: forward(self, x) + 1)
    with running(holder):
        assert all(map(torch.equal, steps(holder.transformer), steps(bare)))
    for handle in handles:
        handle.remove()
    offloaded.detach()


# ------------------------------------------------------------------------------------------------ which layers

MODS = [f"blocks.{index}.mod" for index in range(3)]


def found(model: torch.nn.Module, **changes: Any) -> tuple[list[str], str]:
    (component,) = find_components(Holder(transformer=model))
    given = {"hidden_states": torch.ones(2, 5, 64), "timestep": torch.ones(2)}
    component, why = with_layers_of(replace(component, **changes), (), given)
    assert not component.reads_text
    return list(component.time_layers), why


@pytest.mark.parametrize("kind", ["compiled", "wrapped", "hooked", "ours", "shared"])
def test_what_stays_what_it_is(kind: str) -> None:
    model = Toy()
    block = model.blocks[1]
    assert found(Toy()) == (["embedder", *MODS], "")
    if kind == "compiled":
        block.compile(backend="eager")
    elif kind == "wrapped":
        model.blocks[1] = torch.compile(block, backend="eager")
    elif kind == "hooked":
        block.mod.register_forward_hook(lambda *_: None)
    elif kind == "ours":
        HookRegistry.get_or_create(block.mod).register_hook("another", ModelHook())
    skip = {"skip": frozenset({id(block.mod.weight)})} if kind == "shared" else {}
    reason = {"wrapped": "1 compiled", "hooked": "1 hooked by others", "ours": "1 hooked by others"}
    assert found(model, **skip) == (["embedder", MODS[0], MODS[2]], reason.get(kind, f"1 {kind}"))


def test_small_layers_are_not_worth_it_and_what_cannot_be_rehearsed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Toy):
        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states * float(self.embedder.weight.sum()), timestep)

    layers, why = found(Reads())
    assert (layers, "unknown" in why, "item" in why) == ([], True, True)
    assert found(torch.compile(Toy(), backend="eager")) == ([], "4 compiled")  # type: ignore[arg-type]
    monkeypatch.setattr(time_layers, "MIN_OUTSIDE", 2**20)
    assert found(Toy()) == (MODS, "1 small")
    monkeypatch.setattr(time_layers, "MIN_IN_BLOCKS", 2**20)
    assert found(Toy()) == ([], "")
    assert not may_have_time_layers(Component("transformer", "denoiser", Toy(), {}, frozenset()))


def test_layers_that_read_the_text_are_computed_for_every_prompt() -> None:
    reads = {}
    for name in ("flux", "qwen-image"):
        offloaded = ahead(PIPELINES[name].build(0))
        reads[name] = offloaded._components["transformer"].whole.reads_text
        offloaded.detach()
    assert reads == {"flux": True, "qwen-image": False}


# ------------------------------------------------------------------------------------------------ what will come


def pipeline_of(timesteps: Any) -> Any:
    holder = Holder()
    holder.scheduler = Holder()  # type: ignore[attr-defined]
    vars(holder.scheduler).update(timesteps=timesteps)  # type: ignore[attr-defined]
    return holder


FORMS = {
    "as they are": lambda t: t,
    "thousandths": lambda t: t / 1000,
    "reversed": lambda t: 1 - t / 1000,
    "reversed thousandths": lambda t: (1000 - t) / 1000,
    "bfloat16, then thousandths": lambda t: t.to(torch.bfloat16) / 1000,
    "thousandths, then bfloat16": lambda t: (t / 1000).to(torch.bfloat16),
    "double": lambda t: t.double() / 1000,
    "long": lambda t: t.long(),
}


def foresee(pipeline: Any, *given: torch.Tensor) -> list[list[torch.Tensor]]:
    return coming_inputs(Run(pipeline, "request"), given)


def holds(steps: list[list[torch.Tensor]], *expected: torch.Tensor) -> bool:
    """Whether one of the steps is this one, bit for bit, as it lies in memory."""
    return any(
        all(
            torch.equal(one, two) and one.dtype == two.dtype and (one.numel() == 1 or one.stride() == two.stride())
            for one, two in zip(step, expected, strict=True)
        )
        for step in steps
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_timesteps_is_foreseen_to_the_bit(form: str) -> None:
    pipeline, given = pipeline_of(TIMES), [FORMS[form](t).expand(2) for t in TIMES]
    for now in range(4):
        steps = foresee(pipeline, given[now])
        assert all(holds(steps, later) for later in given[now + 1 :])


def test_what_does_not_follow_the_scheduler_stays() -> None:
    pooled, guidance = torch.randn(1, 8), torch.tensor([3.5])
    steps = foresee(pipeline_of(TIMES), TIMES[:1] / 1000, pooled, guidance)
    assert all(holds(steps, (later / 1000).expand(1).clone(), pooled, guidance) for later in TIMES[1:])
    times, one = torch.tensor([1.0, 0.75, 0.5]), torch.ones(1)
    steps = foresee(pipeline_of(times), times[:1], one)
    assert all(holds(steps, later.reshape(1), one) for later in times[1:]), "guidance with the value of the first time"


def test_repeated_times_are_computed_once_and_no_more_than_a_limit() -> None:
    heun = torch.tensor([900.0, 700.0, 700.0, 500.0, 500.0, 300.0])
    assert len(foresee(pipeline_of(heun), heun[:1])) == 3
    many = torch.arange(1000, 0, -1).float()
    assert len(foresee(pipeline_of(many), many[:1])) == MAX_AHEAD


def test_schedulers_and_tensors_that_say_nothing() -> None:
    for times in (None, [999, 500], TIMES.to("meta"), torch.zeros(2, 2), torch.zeros(0)):
        assert foresee(pipeline_of(times), TIMES[:1]) == []
    assert foresee(pipeline_of(TIMES), TIMES[-1:]) == [], "nothing comes after the last step"
    assert foresee(Holder(), TIMES[:1]) == coming_inputs(None, [TIMES[:1]]) == []
    odd = [torch.zeros(0), torch.ones(2, dtype=torch.bool), TIMES[:1].to("meta"), torch.tensor([float("nan")])]
    assert all(foresee(pipeline_of(TIMES), tensor) == [] for tensor in odd)
    gone = Run(pipeline_of(TIMES), "request")
    assert coming_inputs(gone, [TIMES[:1]]) == []


# ------------------------------------------------------------------------------------------------ how it is called


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_loop_of_ones_own_without_a_pipeline(context: Any) -> None:
    case = CASES["FluxTransformer2DModel"]
    bare, model = case.build(), case.build()
    offloaded = ahead(model)
    for _ in range(2):
        with context():
            for step in range(4):
                given = case.inputs(step)
                assert torch.equal(model(**given, return_dict=False)[0], bare(**given, return_dict=False)[0])
    seen = stats(offloaded, offloaded.plan.components[0].name)
    assert seen.found_forwards == 4
    offloaded.detach()
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_autocast_and_back() -> None:
    bare, holder = toys()
    offloaded = ahead(holder)
    for is_on in (True, False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on), running(holder):
            assert all(map(torch.equal, steps(holder.transformer), steps(bare)))
    assert stats(offloaded).found_forwards > 0
    offloaded.detach()


WHERE: dict[str, dict[str, Any]] = {"streams": {"mode": "layerwise"}, "resident": {"mode": "auto", "gpu_memory": 10**9}}


@pytest.mark.parametrize("where", WHERE)
def test_a_call_with_gradients_is_refused(where: str) -> None:
    _, holder = toys()
    offloaded = ahead(holder, **WHERE[where])
    with running(holder):
        steps(holder.transformer)
    with pytest.raises(SettingError, match="gradients"):
        holder.transformer(torch.ones(2, 5, 64, requires_grad=True), torch.ones(2))
    with running(holder):
        assert all(map(torch.equal, steps(holder.transformer), steps(Toy())))
    offloaded.detach()


def test_a_layer_that_is_called_by_itself() -> None:
    bare, holder = toys()
    offloaded = ahead(holder)
    with running(holder):
        steps(holder.transformer)
    with torch.no_grad():
        assert torch.equal(holder.transformer.blocks[0].mod(torch.ones(1, 64)), bare.blocks[0].mod(torch.ones(1, 64)))
    assert stats(offloaded).live_calls == 1
    offloaded.detach()


def test_blocks_that_we_compile() -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    offload = OffloadConfig("layerwise", device="cpu", precompute=True)
    with samovar.attach(pipe, offload=offload, compile="eager") as attached:
        assert torch.equal(FLUX.run(pipe, 2), FLUX.run(bare, 2))
        assert attached.offloaded is not None
        layers = attached.offloaded.time_layers["transformer"].layers
        assert layers
        assert not any("transformer_blocks" in path for path in layers)
        assert "compiled" in str(attached.explain())


def test_an_exception_while_layers_visit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    expected = FLUX.run(bare, STEPS)
    offloaded = ahead(pipe)
    FLUX.run(pipe, 2)
    held = offloaded.stats().held_bytes
    calls = iter(range(1000))
    linear = torch.nn.functional.linear

    rows = modulations(pipe.transformer)[0].weight.shape[0]

    def fail(*args: Any) -> torch.Tensor:
        if args[1].shape[0] == rows and next(calls) == 2:  # The next layer is on its way by then.
            raise torch.OutOfMemoryError
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", fail)
    with pytest.raises(torch.OutOfMemoryError):
        FLUX.run(pipe, STEPS)
    monkeypatch.undo()
    count_small_layers(monkeypatch)
    assert offloaded.stats().held_bytes <= held
    assert torch.equal(FLUX.run(pipe, STEPS), expected)
    offloaded.detach()


# ------------------------------------------------------------------------------------------------ on and off


@pytest.mark.parametrize("when", ["at once", "after a run", "in a run"])
def test_detached_in_every_state(when: str) -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    expected = FLUX.run(bare, STEPS)
    offloaded = ahead(pipe)
    if when == "after a run":
        FLUX.run(pipe, 2)
    elif when == "in a run":
        done = FLUX.run(pipe, STEPS, callback_on_step_end=lambda *_: (offloaded.detach(), {})[1])
        assert torch.equal(done, expected)
    offloaded.detach()
    assert torch.equal(FLUX.run(pipe, STEPS), expected)
    assert same_state(pipe.transformer, bare.transformer)
    assert not any(key.startswith("_samovar") for part in pipe.transformer.modules() for key in vars(part))
    again = ahead(pipe, "model")
    assert torch.equal(FLUX.run(pipe, STEPS), expected)
    assert stats(again).found_forwards > 0
    again.detach()


def test_replanned() -> None:
    bare, pipe = FLUX.build(0), FLUX.build(0)
    expected = FLUX.run(bare, STEPS)
    offloaded = ahead(pipe)
    assert torch.equal(FLUX.run(pipe, STEPS), expected)
    whole = offloaded.plan.component("transformer").num_bytes
    for changes in (
        {"precompute": False},
        {"precompute": True},
        {"mode": "model"},
        {"mode": "auto", "gpu_memory": 10**8},
    ):
        plan = offloaded.replan(**changes)
        assert plan.component("transformer").num_bytes == whole
        assert bool(plan.component("transformer").ahead_bytes) == (changes.get("precompute") is not False)
        assert torch.equal(FLUX.run(pipe, STEPS), expected), changes
    assert offloaded.plan.component("transformer").placement == "resident"
    found = stats(offloaded).found_forwards
    assert found > STEPS
    offloaded.detach()
    assert same_state(pipe.transformer, bare.transformer)


def test_stats_and_explain_tell_of_it() -> None:
    pipe = FLUX.build(0)
    attached = samovar.attach(pipe, offload=OffloadConfig("layerwise", device="cpu", precompute=True))
    FLUX.run(pipe, STEPS)
    seen = attached.stats().offload
    assert seen is not None
    ahead_of = seen.ahead["transformer"]
    assert ahead_of.layers == 12
    assert "12 layers" in str(seen)
    assert "forwards found theirs" in str(seen)
    text = str(attached.explain())
    assert "12 layers" in text
    samovar.detach(pipe)


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(mode: str, home: str) -> None:
    """Copies overlap, outputs leave the device without a wait, and in the end all weights are where they were."""
    bare, pipe = FLUX.build(0).to("cuda"), FLUX.build(0).to(home)
    expected = [FLUX.run(bare, STEPS, seed=seed).cpu() for seed in range(3)]
    offloaded = apply_offload(pipe, OffloadConfig(mode, precompute=True, activations=0))  # type: ignore[arg-type]
    for seed, picture in enumerate(expected):
        assert torch.equal(FLUX.run(pipe, STEPS, seed=seed).cpu(), picture)
    seen = stats(offloaded)
    assert seen.live_calls == 0
    assert seen.found_forwards > 2 * STEPS
    offloaded.detach()
    assert {parameter.device.type for parameter in pipe.transformer.parameters()} == {home}
    assert torch.equal(FLUX.run(pipe.to("cuda"), STEPS).cpu(), expected[0])
