"""The components that a pipeline of diffusers wants: it is asked, and each is built tiny and random.

The transformer is the zoo's; what stands around it is made to fit its widths. `recipes` has what cannot be read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import zoo

from . import _build, text
from .parts import PARTS

TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "text_embed_dim", "caption_channels", "cap_feat_dim",
               "context_in_dim", "text_in_dim", "in_text_dim", "llm_features_dim", "text_hidden_dim", "dit_text_dim",
               "cross_attention_input_dim", "cross_attention_dim")  # fmt: skip
"""Names of a transformer's setting for the width of its text."""


_USUAL = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
"""Built though they are optional."""
_PLAIN = (int, float, bool, str, list, tuple, dict)


class CannotBuild(Exception):
    """Why a pipeline is not built here."""


@dataclass(frozen=True)
class Recipe:
    """What a pipeline's signature does not say."""

    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the zoo's configuration."""
    variant: str = ""
    """Which of the zoo's cases."""
    latents: int | None = None
    """Channels of the latents."""
    text: int | None = None
    """Width of the text encoder."""
    components: Mapping[str, Any] = field(default_factory=dict)
    """Components, each with a function of the width or the channels that makes it; None for one to leave out."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the constructor."""
    prompt: str = "a cat"
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the call; one that is None is left out, unless the pipeline takes it."""
    dtype: str = "float32"
    cause: str = ""
    """Why it cannot pass, in words; shown before what it says itself."""
    inputs: tuple[str, ...] = ()
    """Inputs that it gets beside those that it needs by its code."""


def pipeline_classes() -> dict[str, Any]:
    """Every pipeline of diffusers that has a transformer and is not deprecated."""
    import diffusers

    found = {}
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        is_pipeline = inspect.isclass(cls) and issubclass(cls, diffusers.DiffusionPipeline)
        is_current = is_pipeline and re.match(r"diffusers\.pipelines\.(?!deprecated)", cls.__module__)
        if is_current and any("transformer" in part for part in cls._get_signature_types()):
            found[name] = cls
    return found


def build(cls: Any, recipe: Recipe, seed: int = 0) -> Any:
    """A tiny pipeline of this class; CannotBuild if a component is not known here."""
    return _build(lambda: cls(**_components(cls, recipe), **recipe.settings), seed)


def _components(cls: Any, recipe: Recipe) -> dict[str, Any]:
    wanted = {name: kinds for name, kinds in cls._get_signature_types().items() if name not in recipe.settings}
    models = {name: kind for name, kinds in wanted.items() if (kind := _zoo_class(kinds)) is not None}
    if not models:
        raise CannotBuild("its transformer is none of the zoo's")
    config = _config(next(iter(models.values())), recipe)
    width = recipe.text or next((config[name] for name in TEXT_WIDTHS if isinstance(config.get(name), int)), 12)
    channels = recipe.latents or config.get("out_channels") or config.get("in_channels") or 4
    if recipe.latents is None and hasattr(cls, "_pack_latents") and "in_channels" in config:  # In 2x2 patches.
        channels = config["in_channels"] // 4
    made: dict[str, Any] = {}
    for name, kinds in wanted.items():
        if name in recipe.components:
            make = recipe.components[name]
            made[name] = make(width, channels) if callable(make) else make
        elif name in models:
            made[name] = _zoo_model(models[name], recipe)
        elif type(None) in kinds or (name in cls._optional_components and name not in _USUAL):
            made[name] = None
        elif name == "controlnet":
            made[name] = _controlnet(kinds, config)
        elif not all(getattr(kind, "__origin__", kind) in _PLAIN for kind in kinds):
            made[name] = _component(name, kinds, width, channels, wanted)
    return made


def _controlnet(kinds: Any, config: Mapping[str, Any]) -> Any:
    """One block beside a transformer of this configuration."""
    cls = next(kind for kind in kinds if hasattr(kind, "from_config"))
    takes = inspect.signature(cls.__init__).parameters
    layers = {name: 1 for name in ("num_layers", "num_single_layers") if name in takes and name in config}
    return cls(**{name: value for name, value in config.items() if name in takes} | layers)


def _zoo_class(kinds: Any) -> str | None:
    known = {case.model for case in zoo.load()}
    return next((kind.__name__ for kind in kinds if getattr(kind, "__name__", "") in known), None)


def _config(model: str, recipe: Recipe) -> dict[str, Any]:
    case = next(case for case in zoo.load() if case.model == model and case.variant == recipe.variant)
    return {**case.config, **recipe.transformer}


def _zoo_model(model: str, recipe: Recipe) -> Any:
    import diffusers

    return getattr(diffusers, model)(**_config(model, recipe))


def _component(name: str, kinds: Any, width: int, channels: int, wanted: Mapping[str, Any]) -> Any:
    """A tiny component of the first kind that is known here."""
    names = [getattr(kind, "__name__", str(kind)) for kind in kinds]
    if name.endswith("scheduler"):
        return scheduler(names)
    if "tokenizer" in name:
        partner = [getattr(kind, "__name__", "") for kind in wanted.get(name.replace("tokenizer", "text_encoder"), ())]
        return tokenizer_for(partner)
    for kind in names:
        if kind in PARTS:
            return PARTS[kind](width, channels)
    raise CannotBuild(f"no tiny {'/'.join(names)} is known here, for its {name}")


def scheduler(names: list[str]) -> Any:
    import diffusers

    for name in names:
        cls = getattr(diffusers, name, None)
        if inspect.isclass(cls):
            return cls()
    return diffusers.FlowMatchEulerDiscreteScheduler()


def tokenizer_for(encoder: list[str]) -> Any:
    if any("T5" in name and "Gemma" not in name for name in encoder):
        return text.t5_tokenizer()
    return text.clip_tokenizer() if any("CLIP" in name for name in encoder) else text.qwen_tokenizer()
