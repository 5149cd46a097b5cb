"""Builds a model without its weights, on the meta device: full size, no memory.

From a folder in diffusers format, or from the name of a class that diffusers exports.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from ..core.errors import ModelError, nearest
from ..core.files import brief, index_file, read_json, reading
from ..core.interop import kept_in_float32
from ..core.quantisers import quantization_kind
from .blocks import find_anatomy
from .components import ModuleDiscovery, Role, is_denoiser_itself, role_of
from .folder import check_files, check_folder, components, library_of, pipeline_class, read_index
from .modular import usual_parts
from .modules import module_class, unwrapped
from .stored import Stored, read_headers, stored_dtype, stored_for


@dataclass(frozen=True)
class Part:
    """One component of a model."""

    role: Role
    cls: type
    module: Module | None
    """None if it cannot be built without a checkpoint."""
    kind: str | None = None
    """How it is quantised, in a few words; None if it is not."""
    stored: Stored = field(default_factory=dict)
    """If it is quantised: what is stored in place of its weights."""


Parts = dict[str, Part]
"""The components of a model by name."""

_MODEL_SUFFIXES = ("Model", "Pipeline", "Transformer", "Decoder")


def read_skeleton(source: str) -> tuple[str, Parts]:
    """The class name and the components of a model folder, or of a class of diffusers."""
    with reading(brief(source)):  # Not every text is a path.
        path = Path(source).expanduser()
        is_pipeline, is_model = index_file(path).is_file(), (path / "config.json").is_file()
    if is_pipeline:
        return _read_pipeline_folder(path)
    if is_model:
        return _read_model_folder(path)
    if source.endswith(".gguf"):
        raise ModelError(
            f"{brief(source)} is a GGUF file, which holds one component. Give the model's folder or name, and the file "
            "as quantization."
        )
    if path.exists() or "/" in source:
        problem = "neither model_index.json nor config.json is in it" if path.exists() else "there is no such folder"
        raise ModelError(
            f"{source!r} is not a model: {problem}. Give a folder in diffusers format or a class name. Download a "
            "model of the hub first: hf download NAME --local-dir FOLDER"
        )
    return _read_class(source)


def _lone_part(cls: type, module: Module) -> Parts:
    """A model without a pipeline. Its class shows its role, or else the fact that it is built of blocks."""
    role = role_of("transformer" if find_anatomy(module).stacks else "", cls)
    name = {"denoiser": "transformer", "vae": "vae"}.get(role, "model")
    return {name: Part(role, cls, module)}


def loaded_parts(pipeline: Any) -> Parts:
    """The components of a pipeline, or of a single model, that is loaded."""
    if is_denoiser_itself(pipeline):
        return _lone_part(type(unwrapped(pipeline)), pipeline)
    return {
        name: Part(role, type(unwrapped(module)), module)
        for role, (names, modules) in ModuleDiscovery.discover(pipeline).roles().items()
        for name, module in zip(names, modules, strict=True)
    }


def _read_class(name: str) -> tuple[str, Parts]:
    cls = _diffusers_class(name)
    if issubclass(cls, Module):
        return name, _lone_part(cls, _build_default(cls))
    parts: Parts = {}
    for part, part_cls in _declared_parts(cls):
        module = None
        if part_cls.__module__.startswith("diffusers.models.transformers"):
            with contextlib.suppress(ModelError):
                module = _build_default(part_cls)
        parts[part] = Part(role_of(part, part_cls), part_cls, module)
    return name, parts


def _build_default(cls: type[Module]) -> Module:
    try:
        with _on_meta(torch.bfloat16):
            return cls()
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{cls.__name__} has no usable default configuration ({error}). Give the folder of a model of that class "
            "instead."
        ) from error


def _diffusers_class(name: str) -> type:
    """A model or pipeline class of diffusers by its name."""
    import diffusers
    import diffusers.models.transformers as transformers

    for library in (diffusers, transformers):
        cls: Any = getattr(library, name, None)
        kinds = (diffusers.DiffusionPipeline, Module)
        if inspect.isclass(cls) and (issubclass(cls, kinds) or usual_parts(cls)):
            return cls
    known = {n for n in [*dir(diffusers), *dir(transformers)] if n[:1].isupper() and n.endswith(_MODEL_SUFFIXES)}
    known -= {name, "ModularPipeline"}  # Never suggest what is refused.
    raise ModelError(
        f"{name!r} is neither a folder nor a model or pipeline class of diffusers {diffusers.__version__}. "
        f"{nearest(name, known)}"
    )


def _declared_parts(pipeline_cls: type) -> Iterator[tuple[str, type[Module]]]:
    """The module classes that a pipeline's constructor asks for, or a modular one's blocks."""
    try:
        signature = inspect.signature(pipeline_cls, eval_str=True)
    except NameError:  # An annotation that only a type checker can resolve.
        signature = inspect.signature(pipeline_cls)
    hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    for name, hint in (*usual_parts(pipeline_cls).items(), *hints.items()):
        if cls := module_class((hint, *typing.get_args(hint))):
            yield name, cls


def _read_pipeline_folder(folder: Path) -> tuple[str, Parts]:
    index = check_folder(folder)
    entries = components(folder, index)
    if not entries:
        raise ModelError(
            f"{index_file(folder)} lists no components; expected entries such as "
            '"transformer": ["diffusers", "FluxTransformer2DModel"]. Save the pipeline again with '
            "save_pretrained."
        )
    parts: Parts = {}
    for name, entry in entries.items():
        cls = _library_class(folder, name, *entry)
        if issubclass(cls, Module):
            parts[name] = _part_from_folder(role_of(name, cls), cls, folder / name)
    return str(pipeline_class(folder, index).__name__), parts


def build_pipeline(source: str, parts: Parts) -> Any:
    """The pipeline of a folder with these components; None if the source is no folder of a pipeline. ModelError if the
    pipeline cannot be built."""
    folder = Path(source).expanduser()
    if not index_file(folder).is_file():
        return None
    index = read_index(folder)
    values: dict[str, Any] = {key: value for key, value in index.items() if not key.startswith("_")}
    for key, entry in values.items():
        if key in parts:
            values[key] = parts[key].module
        elif isinstance(entry, list):
            values[key] = None if entry[0] is None else _read_helper(folder, key, *entry)
    with reading(str(folder)):
        return pipeline_class(folder, index)(**values)


def _read_helper(folder: Path, name: str, library: str, class_name: str) -> Any:
    """A component without weights: a tokenizer, a scheduler."""
    cls: Any = _library_class(folder, name, library, class_name)
    with reading(f"The {class_name} in {folder / name}"):
        return cls.from_pretrained(folder / name)


def _read_model_folder(folder: Path) -> tuple[str, Parts]:
    name = read_json(folder / "config.json").get("_class_name")
    if not isinstance(name, str):
        raise ModelError(f"{folder / 'config.json'} has no _class_name, so it does not describe a diffusers model.")
    cls = _diffusers_class(name)
    check_files(folder, folder, name)
    part = _part_from_folder("denoiser", cls, folder)
    assert part.module is not None
    return name, {key: replace(part, role=lone.role) for key, lone in _lone_part(cls, part.module).items()}


def _library_class(folder: Path, name: str, library: str, class_name: str) -> type:
    package: Any = library_of(folder, name, library, class_name)
    cls = getattr(package, class_name, None)
    if not inspect.isclass(cls) or not hasattr(cls, "from_pretrained"):
        version = getattr(package, "__version__", "")
        raise ModelError(
            f"{index_file(folder)}: {name!r} is a {brief(f'{library}.{class_name}')}, which {library} {version} does "
            f"not have. Upgrade {library}, or check the name."
        )
    return cls


def _part_from_folder(role: Role, cls: Any, folder: Path) -> Part:
    from transformers import PreTrainedModel

    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{config_file} is missing: the folder of a {cls.__name__} must hold it.")
    settings, headers = read_json(config_file), read_headers(folder)
    with reading(f"The {cls.__name__} in {folder}"), _on_meta(stored_dtype(headers)):
        if issubclass(cls, PreTrainedModel):
            module = cls(cls.config_class.from_pretrained(folder))
        else:
            module = cls.from_config(settings)
        kind = quantization_kind(settings.get("quantization_config"))
        cast(module, stored_dtype(headers, None if kind is None else module))
        return Part(role, cls, module, kind, {} if kind is None else stored_for(headers, module))


def cast(model: Module, dtype: torch.dtype) -> None:
    """Have a model without weights be as if it were loaded in a dtype: what its authors keep in float32 stays so, and
    what is in no file is as it was made."""
    kept = kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_floating_point() or name in module._non_persistent_buffers_set:
                    continue
                tensor.data = tensor.data.to(torch.float32 if kept.intersection((*path.split("."), name)) else dtype)


@contextlib.contextmanager
def _on_meta(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)
