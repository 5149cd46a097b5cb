"""Discovery of a pipeline's modules: declared, dotted, shared, missing, and the scan of what declares nothing."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from samovar.arch import ModuleDiscovery, SupportsModuleOffload, find_denoisers
from samovar.arch.components import role_of
from samovar.core.errors import DeclarationError, ModelError
from samovar.trace import survey_pipeline


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(2, 2)


class Declared(torch.nn.Module):
    """A pipeline that is itself a module, as in vllm-omni."""

    _dit_modules: ClassVar[list[str]] = ["language_model.model"]
    _encoder_modules: ClassVar[list[str]] = ["vit_model"]
    _vae_modules: ClassVar[list[str]] = ["vae", "audio_vae"]
    _resident_modules: ClassVar[list[str]] = ["time_embedder", "vae2llm"]

    def __init__(self) -> None:
        super().__init__()
        self.language_model = torch.nn.ModuleDict({"model": layer(), "head": layer()})
        self.vit_model, self.vae, self.audio_vae = layer(), layer(), layer()
        self.time_embedder, self.vae2llm = layer(), layer()
        self.transformer = layer()


def test_a_declaration_is_taken_at_its_word() -> None:
    pipe = Declared()
    assert isinstance(pipe, SupportsModuleOffload)
    found = ModuleDiscovery.discover(pipe)
    assert (found.dit_names, found.dits) == (["language_model.model"], [pipe.language_model["model"]])
    assert (found.encoder_names, found.encoders) == (["vit_model"], [pipe.vit_model])
    assert (found.vae_names, found.vaes) == (["vae", "audio_vae"], [pipe.vae, pipe.audio_vae])
    assert found.resident_names == ["time_embedder", "vae2llm"]
    assert found.resident_modules == [pipe.time_embedder, pipe.vae2llm]


def test_a_declared_name_that_is_missing_or_no_module_is_named_and_left_out() -> None:
    class Wrong(Declared):
        _dit_modules: ClassVar[list[str]] = ["language_model.modle", "language_model.model"]
        _encoder_modules: ClassVar[list[str]] = ["tokenizer", "vit_model"]

    pipe = Wrong()
    pipe.tokenizer = "no module"
    with pytest.warns(UserWarning, match="It is ignored") as caught:
        found = ModuleDiscovery.discover(pipe)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "Wrong._dit_modules names 'language_model.modle', which does not exist" in messages[0]
    assert "Wrong._encoder_modules names 'tokenizer', which is 'no module', not a torch.nn.Module" in messages[1]
    assert found.dit_names == ["language_model.model"]
    assert found.encoder_names == ["vit_model"]


def test_a_shared_module_counts_once() -> None:
    class Shared(Declared):
        _dit_modules: ClassVar[list[str]] = ["transformer", "dit"]
        _encoder_modules: ClassVar[list[str]] = ["vit_model", "dit"]

        def __init__(self) -> None:
            super().__init__()
            self.dit = self.transformer

    found = ModuleDiscovery.discover(Shared())
    assert found.dit_names == ["transformer"]
    assert found.encoder_names == ["vit_model"]


def names_of(pipeline: Any) -> dict[str, list[str]]:
    return {role: names for role, (names, _) in ModuleDiscovery.discover(pipeline).roles().items() if names}


WELL_KNOWN = {
    "denoiser": ["transformer", "transformer_2", "dit", "sr_dit", "language_model", "transformer_blocks", "model"],
    "encoder": ["text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "mllm", "vision_model"],
    "vae": ["vae", "audio_vae"],
}


@pytest.mark.parametrize("role", WELL_KNOWN)
@pytest.mark.filterwarnings("error")
def test_well_known_names_are_found(role: str) -> None:
    for name in WELL_KNOWN[role]:
        assert names_of(SimpleNamespace(**{name: layer()})) == {role: [name]}
        assert names_of(torch.nn.ModuleDict({name: layer()})) == {role: [name]}


ROLES = {
    ("prior", "diffusers.FluxTransformer2DModel"): "denoiser",
    ("unet", "diffusers.UNet2DModel"): "denoiser",
    ("unet", "diffusers.AudioLDM2UNet2DConditionModel"): "denoiser",
    ("first_stage", "diffusers.AutoencoderKL"): "vae",
    ("model", "diffusers.AutoencoderKL"): "vae",
    ("movq", "torch.nn.Linear"): "vae",
    ("conditioner", "transformers.CLIPTextModel"): "encoder",
    ("language_model", "transformers.GPT2LMHeadModel"): "encoder",
    ("condition_encoder", "torch.nn.Linear"): "encoder",
    ("controlnet", "diffusers.ControlNetModel"): "resident",
    ("transformer", "diffusers.FluxControlNetModel"): "resident",
    ("motion_adapter", "diffusers.MotionAdapter"): "resident",
    ("language_model", "torch.nn.Linear"): "denoiser",
}


@pytest.mark.parametrize(("name", "cls"), ROLES)
def test_the_class_decides_before_the_name(name: str, cls: str) -> None:
    assert role_of(name, pkgutil.resolve_name(cls)) == ROLES[name, cls]


def test_components_are_read_from_diffusers_own_list_in_the_order_in_which_they_run() -> None:
    parts = {name: layer() for name in ("vocoder", "speech_encoder", "movq", "transformer")}
    others = {"scheduler": object(), "unet": None, 3: layer(), None: layer()}
    pipe = SimpleNamespace(components=others | parts, model_cpu_offload_seq="movq->speech_encoder->vocoder")
    found = ModuleDiscovery.discover(pipe)
    assert found.vaes == [parts["movq"]]
    assert names_of(pipe) == {
        "denoiser": ["transformer"], "encoder": ["speech_encoder"], "vae": ["movq"], "resident": ["vocoder"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("transformer", r"Wrong._dit_modules is 'transformer'; expected a list .*, such as \['transformer'\]"),
        (5, r"Wrong._dit_modules is 5; expected a list"),
        ([None], r"Wrong._dit_modules is \[None\]; expected a list"),
    ],
)
def test_a_declaration_that_is_no_list_of_names_is_refused(value: Any, message: str) -> None:
    class Wrong(Declared):
        _dit_modules = value

    with pytest.raises(DeclarationError, match=message):
        ModuleDiscovery.discover(Wrong())


def test_half_a_declaration_is_reported_and_not_used() -> None:
    class Half:
        _dit_modules: ClassVar[list[str]] = ["net"]

        def __init__(self) -> None:
            self.net, self.vae = layer(), layer()

    with pytest.warns(UserWarning, match="Half declares some of its modules but not _encoder_modules, _vae_modules"):
        assert names_of(Half()) == {"vae": ["vae"]}


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_the_scan_passes_over_what_raises(error: type[Exception]) -> None:
    class Raising:
        vae = layer()

        @property
        def components(self) -> Any:
            raise error("not set up")

        transformer = model_cpu_offload_seq = components

    assert names_of(Raising()) == {"vae": ["vae"]}


def test_in_the_scan_a_module_inside_another_counts_once() -> None:
    inner = layer()
    assert names_of(SimpleNamespace(transformer=inner, model=torch.nn.Sequential(inner))) == {
        "denoiser": ["transformer"]
    }
    outer = torch.nn.Sequential(inner)
    assert names_of(SimpleNamespace(mllm=outer, vision_model=inner)) == {"encoder": ["mllm"]}
    tied = layer()
    twins = SimpleNamespace(text_encoder=torch.nn.Sequential(tied), text_encoder_2=torch.nn.Sequential(tied))
    assert names_of(twins) == {"encoder": ["text_encoder", "text_encoder_2"]}, "a common part makes no twin"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Trunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Wrapper(torch.nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


@pytest.mark.parametrize("name", ["trunk", "transformer", "model", "dit", "language_model", "transformer_blocks"])
def test_a_module_that_is_called_once_a_step_is_the_denoiser_whatever_it_calls_its_trunk(name: str) -> None:
    model = Wrapper(**{name: Trunk()}, embed=layer())
    assert find_denoisers(model) == {"Wrapper": model}
    compiled = torch.compile(model)
    assert find_denoisers(compiled) == {"Wrapper": compiled}
    (part,) = survey_pipeline(model).components
    assert (part.class_name, part.num_parameters) == ("Wrapper", 3 * 6)
    twins = Wrapper(transformer=Trunk(), transformer_2=Trunk())
    assert find_denoisers(twins) == {"Wrapper": twins}


@pytest.mark.parametrize("name", ["vae", "text_encoder", "scheduler"])
def test_a_pipeline_that_is_a_module_is_searched(name: str) -> None:
    class Scheduler:
        def set_timesteps(self, count: int) -> None: ...

    part = Scheduler() if name == "scheduler" else layer()
    pipe = Wrapper(transformer=Trunk(), **{name: part})
    assert find_denoisers(pipe) == {"transformer": pipe.transformer}
    assert find_denoisers(torch.nn.ModuleDict({"transformer": pipe.transformer})) == {"transformer": pipe.transformer}


def test_a_pipeline_that_declares_its_modules_is_taken_at_its_word_for_denoisers_too() -> None:
    pipe = Declared()
    assert find_denoisers(pipe) == {"language_model.model": pipe.language_model["model"]}
    with pytest.raises(ModelError, match="No denoiser was found in Wrapper"):
        find_denoisers(Wrapper(vae=layer()))
