"""Has a modular pipeline be called like any other: its class is put behind one whose call says what it takes and makes.

The call of diffusers' own class takes any argument, ignores those that it does not know, and returns everything that
its blocks have made. The blocks say what they need, and which of them run for which inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..core.errors import ModelError
from ..core.files import brief
from .modules import module_class

_GUIDERS = {"guidance_scale": "guider", "guidance_scale_2": "guider_2"}
"""Arguments of other pipelines that are settings of a component here."""
_OF_ANY_CALL = frozenset(("prompt", "generator", "output_type", "height", "width", "max_area", "_auto_resize"))
"""What the caller may not have given itself."""
_OWN_BLOCKS = "modular_config.json"


class ModularCall:
    """Put before the class of a modular pipeline."""

    kinds: ClassVar[Mapping[str, Any]] = {}
    """The classes of components that are loaded."""

    def set_progress_bar_config(self, **settings: Any) -> None:
        """The same for the loops within blocks, too, which diffusers leaves out."""
        for block in _all_blocks(self._blocks):  # type: ignore[attr-defined]
            if hasattr(block, "loop_step"):
                block.set_progress_bar_config(**settings)


def is_modular(cls: Any) -> bool:
    """Whether this is a class of modular pipelines."""
    library = sys.modules.get("diffusers.modular_pipelines.modular_pipeline")  # Of the other classes, none needs it.
    return library is not None and inspect.isclass(cls) and issubclass(cls, library.ModularPipeline)


def usual_parts(cls: Any) -> Mapping[str, Any]:
    """The classes of the components that a class of modular pipelines loads with its usual blocks."""
    import diffusers

    name = cls.default_blocks_name if is_modular(cls) else None
    return {} if name is None else _kinds(getattr(diffusers, name)())


def called_as(pipeline: Any) -> Any:
    """A pipeline's class, as it is without our hooks; of a modular one, the class that says how it is called."""
    cls: Any = pipeline.__class__
    is_bare = is_modular(cls) and not issubclass(cls, ModularCall)
    return _described(cls, pipeline.blocks, pipeline) if is_bare else cls


def adapt(pipeline: Any) -> Callable[[], None]:
    """Give a loaded pipeline such a call, if it is modular. Returns what takes it away again."""
    before, called = pipeline.__class__, called_as(pipeline)
    if called is before:
        return lambda: None
    pipeline.__class__ = called
    return lambda: setattr(pipeline, "__class__", before)


def modular_class(cls: Any, folder: Path, blocks_name: Any) -> Any:
    """The class of the modular pipeline in a folder. It is built of components or loaded, as others are."""
    import diffusers

    blocks: Any = getattr(diffusers, blocks_name, None) if isinstance(blocks_name, str) else None
    own = folder / _OWN_BLOCKS
    if own.is_file() or not getattr(blocks, "block_classes", None):
        what = f"comes with blocks of its own ({own})" if own.is_file() else f"was made of {brief(blocks_name)}"
        raise ModelError(
            f"{folder} {what}, and only blocks that diffusers {diffusers.__version__} has by name are read from a "
            "folder: others would be left out. Build the pipeline in Python, and give it to Omni."
        )
    if not hasattr(blocks, "get_execution_blocks"):
        raise ModelError(f"Modular pipelines need diffusers 0.42, and {diffusers.__version__} is here. Upgrade it.")
    described = _described(cls, blocks())

    def build(self: Any, **components: Any) -> None:
        cls.__init__(self, pretrained_model_name_or_path=str(folder), local_files_only=True)
        known = {name: part for name, part in components.items() if part is not None and name in self.components}
        self.register_components(**known)
        self.__class__ = _described(cls, self.blocks, self)

    def load(made: Any, source: Any, /, **settings: Any) -> Any:
        empty = cls(pretrained_model_name_or_path=str(folder), local_files_only=True)
        return made(**_loaded(empty, folder, settings))

    return _class_before(described, (described,), {"__init__": build, "from_pretrained": classmethod(load)})


def _loaded(empty: Any, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The components of a folder. diffusers' own `load_components` leaves out one that cannot be loaded."""
    found: dict[str, Any] = {}
    quantised = getattr(settings.get("quantization_config"), "quant_mapping", {})
    for name in empty.pretrained_component_names:
        spec = empty.get_component_spec(name)
        if settings.get(name) is not None:
            found[name] = settings[name]
        elif spec.pretrained_model_name_or_path is not None and (folder / name).is_dir():
            given: dict[str, Any] = {"local_files_only": True, "variant": None}
            if module_class([spec.type_hint]):
                given |= {"dtype": settings.get("torch_dtype"), "use_safetensors": True}
                variant = settings.get("variant")
                given["variant"] = variant if any((folder / name).glob(f"*.{variant}[.-]*")) else None
            if name in quantised:
                given["quantization_config"] = quantised[name]
            found[name] = spec.load(pretrained_model_name_or_path=str(folder), subfolder=name, revision=None, **given)
    return found


# ------------------------------------------------------------------------------------------------ the call


def _described(cls: Any, blocks: Any, pipeline: Any = None) -> Any:
    """A class before `cls` whose call has a signature: that of its blocks with the components of a pipeline."""
    inputs = {each.name: each for each in blocks.inputs if each.name is not None}
    needs, usual = _needs(blocks), _kinds(_running(blocks, {}))

    def is_taken(name: str) -> bool:
        """Whether no component is lacking that this input alone makes necessary."""
        more = _kinds(_running(blocks, {name: True})).keys() - usual if pipeline is not None else ()
        return name in needs or all(getattr(pipeline, part, None) is not None for part in more)

    taken = [_parameter(each, name in needs, pipeline) for name, each in inputs.items() if is_taken(name)]
    guiders: dict[str, Any] = {
        name: getattr(pipeline, part, None) for name, part in _GUIDERS.items() if name not in inputs
    }
    scales = {name: guider.guidance_scale for name, guider in guiders.items() if hasattr(guider, "guidance_scale")}
    kind = inspect.Parameter.KEYWORD_ONLY
    taken += [inspect.Parameter(name, kind, default=scale, annotation=float) for name, scale in scales.items()]
    call = _call(cls, taken, [each.name for each in blocks.outputs], {name: _GUIDERS[name] for name in scales})
    return _class_before(cls, (ModularCall, cls), {"kinds": _kinds(blocks), "__call__": call})


def _parameter(each: Any, is_needed: bool, pipeline: Any) -> inspect.Parameter:
    """The parameter for an input. Some blocks leave its default to their pipeline."""
    default = getattr(pipeline, f"default_{each.name}", None) if each.default is None else each.default
    empty = inspect.Parameter.empty
    hint = empty if each.type_hint is None else each.type_hint
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(each.name, kind, default=empty if is_needed else default, annotation=hint)


def _call(cls: Any, taken: list[inspect.Parameter], made: list[str], scales: Mapping[str, str]) -> Any:
    from diffusers.utils import BaseOutput

    fields = [(name, Any, None) for name in dict.fromkeys(made)]
    output = dataclasses.make_dataclass(f"{cls.__name__}Output", fields, bases=(BaseOutput,))
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.Signature([itself, *taken], return_annotation=output)

    def call(self: Any, **given: Any) -> Any:
        if "state" in given or "output" in given:  # Its owner, who knows what it is.
            return cls.__call__(self, **given)
        signature.bind(self, **given)
        _check_read(self._blocks, {name: value for name, value in given.items() if name not in scales})
        chosen = {part: given.pop(name) for name, part in scales.items() if given.get(name) is not None}
        with _guided(self, chosen):
            state = cls.__call__(self, **given)
        return output(**{name: state.get(name) for name, _, _ in fields})

    call.__name__, call.__annotations__, call.__doc__ = "__call__", {"return": output}, cls.__call__.__doc__
    vars(call)["__signature__"] = signature
    return call


@contextlib.contextmanager
def _guided(pipeline: Any, scales: Mapping[str, float]) -> Iterator[None]:
    """Another guidance for one call. The error of a block that fails is raised, and not printed by all around it."""
    log = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    before, was_disabled = {name: getattr(pipeline, name) for name in scales}, log.disabled
    try:
        log.disabled = True
        for name, scale in scales.items():
            setattr(pipeline, name, before[name].new(guidance_scale=scale))
        yield
    finally:
        log.disabled = was_disabled
        for name, guider in before.items():
            setattr(pipeline, name, guider)


def _class_before(cls: Any, bases: tuple[Any, ...], body: dict[str, Any]) -> Any:
    identity = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, bases, identity | body)


# ------------------------------------------------------------------------------------------------ the blocks


def _all_blocks(blocks: Any) -> Iterator[Any]:
    yield blocks
    for block in getattr(blocks, "sub_blocks", {}).values():
        yield from _all_blocks(block)


def _running(blocks: Any, given: Mapping[str, Any]) -> Any:
    """The blocks that run for a prompt and these inputs. What all blocks together call required may be made by one of
    them, so it is asked of these."""
    return blocks.get_execution_blocks(**{"prompt": "", **given}) if hasattr(blocks, "sub_blocks") else blocks


def _check_read(blocks: Any, given: Mapping[str, Any]) -> None:
    """Refuse what no block would read: diffusers ignores it."""
    running = _running(blocks, {name: value for name, value in given.items() if value is not None})
    read = {each.name for each in running.inputs}
    for name, value in given.items():
        if value is not None and name not in read | _OF_ANY_CALL:
            raise ValueError(f"{name} has no effect beside what else is given. Leave it out.")


def _needs(blocks: Any) -> tuple[str, ...]:
    """The inputs that must be given. If one makes the others superfluous, as an image does its latents, that one."""
    needed = _missing(blocks, {})
    names = [each.name for each in blocks.inputs if needed and each.name is not None]
    return next(((name,) for name in names if not _missing(blocks, {name: True})), needed)


def _missing(blocks: Any, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The inputs that are required beside those that are given."""
    known = {"prompt", *given}
    required = (each for each in _running(blocks, given).inputs if each.required and each.default is None)
    return tuple(each.name for each in required if each.name not in known)


def _kinds(blocks: Any) -> dict[str, Any]:
    """The classes of the components that blocks need, of those that are loaded."""
    wanted = blocks.expected_components
    return {each.name: each.type_hint for each in wanted if each.default_creation_method == "from_pretrained"}
