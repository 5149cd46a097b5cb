"""Checks what may be in a model's folder: of every file that would be opened its name, where it leads, its content.

Samovar only reads safetensors: other weight formats can run code. Python files that come with a model run only with
`trust_remote_code=True`.
"""

from __future__ import annotations

import inspect
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.errors import ModelError
from ..core.files import MODULAR_INDEX, brief, index_file, parse_json, read_json
from ..core.tensor_parts import take_apart
from .modular import is_modular, modular_class

WEIGHTS = re.compile(r"(?:diffusion_pytorch_model|model)(?:\.([A-Za-z]\w*))?(?:-\d+-of-\d+)?\.safetensors")
"""Names of weight files; the group is the variant, such as fp16."""
_SHARDS = re.compile(r".*\.safetensors\.index(\.\w+)?\.json")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_FORMATS = (".onnx", ".msgpack", ".h5", ".ot", ".gguf", ".flashpack")
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04.{26,200}/data\.pkl", re.DOTALL)
"""How pickles and files of torch.save begin."""
_REACHING = {("|", "attr"), *(("{%", tag) for tag in ("import", "include", "extends", "from"))}
"""What reaches out of a template, each with what stands before it."""
_TRUST = "Read it, and if you trust it, pass trust_remote_code=True."


def check_folder(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The index of a pipeline's folder, if the pipeline can be loaded without running code from the folder."""
    for file in (index_file(folder), folder / "samovar.json"):
        if file.is_symlink():
            _check_place(file, folder)
    index = read_index(folder)
    for name, entry in components(folder, index).items():
        if not trust_remote_code:
            library_of(folder, name, *entry)
        # Several ControlNets are in controlnet, controlnet_1 ... Where there is no folder of a component, diffusers
        # reads the files beside the index.
        parts = [part for part in (folder / name, *folder.glob(f"{name}_*")) if part.is_dir()]
        for part in parts or [folder]:
            check_files(part, folder, entry[1], trust_remote_code=trust_remote_code)
    own = index.get("_class_name")
    if not trust_remote_code and isinstance(own, list):
        file = folder / f"{own[0] if own else ''}.py"
        raise ModelError(f"{index_file(folder)} asks for code that comes with the model: {file}. {_TRUST}")
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a pipeline's folder. That of a modular one also says where each component is: it must be here."""
    file = index_file(folder)
    index = read_json(file)
    if file.name != MODULAR_INDEX:
        return index
    for name, entry in list(index.items()):
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict):
            index[name] = _component_here(file, name, entry[2])
        elif isinstance(entry, list):  # A setting of the pipeline, which diffusers reads.
            del index[name]
    return index


def _component_here(file: Path, name: str, where: dict[str, Any]) -> Any:
    source, hint = where.get("pretrained_model_name_or_path", where.get("repo")), where.get("type_hint")
    if source is None and isinstance(hint, list):  # diffusers looks up its class all the same.
        named = components(file.parent, {name: hint})
        for library, cls in named.values():
            library_of(file.parent, name, library, cls)
        return [None, None]
    if source is not None and (where.get("subfolder") != name or not (file.parent / name).is_dir()):
        raise ModelError(
            f"{file}: {name!r} is in {brief(where.get('subfolder') or '')} of {brief(source)}, and only what is in the "
            f"model's folder is loaded. Download it to {file.parent / name}, and say so in the file."
        )
    if not isinstance(hint, list) or None in hint:  # diffusers would take any class that the files name.
        raise ModelError(f"{file}: the type_hint of {name!r} is {brief(hint)}; expected a library and a class of it.")
    return hint


def components(folder: Path, index: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The library and the class of each component that an index lists; those that were left out are null there."""
    found: dict[str, tuple[str, str]] = {}
    for name, entry in index.items():
        if name.startswith("_") or not _is_component(entry):
            continue  # About the pipeline, or an argument of it.
        if not name.isidentifier() or len(entry) != 2:
            raise ModelError(
                f"{index_file(folder)}: {brief(name)} is {brief(entry)}; expected a name and a pair, such as "
                '"transformer": ["diffusers", "FluxTransformer2DModel"].'
            )
        library, cls = entry
        if isinstance(library, str) and isinstance(cls, str):
            found[name] = (library, cls)
        elif entry != [None, None]:
            raise ModelError(f"{index_file(folder)}: {name!r} is {brief(entry)}; expected a library and a class of it.")
    return found


def _is_component(entry: Any) -> bool:
    """Whether this may name a component. A list of numbers, such as layers of a text encoder, is an argument."""
    return isinstance(entry, list) and not (entry and all(isinstance(each, (int, float, list)) for each in entry))


def pipeline_class(folder: Path, index: dict[str, Any]) -> Any:
    """The class of diffusers that an index names, which every component that it needs is listed for."""
    import diffusers

    name = index.get("_class_name")
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    if (
        not inspect.isclass(cls)
        or not (issubclass(cls, diffusers.DiffusionPipeline) or is_modular(cls))
        or cls is diffusers.DiffusionPipeline
    ):
        raise ModelError(
            f"{index_file(folder)} names the class {brief(name)}, which diffusers {diffusers.__version__} does not "
            "have. Upgrade diffusers, or check the file."
        )
    for parameter in inspect.signature(cls).parameters.values():
        is_needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        entry = index.get(parameter.name)
        if is_needed and not _is_component(entry):
            raise ModelError(
                f"{index_file(folder)}: {parameter.name!r} is {brief(entry)}; expected a library "
                f"and a class of it, because {name} needs this component."
            )
    return modular_class(cls, folder, index.get("_blocks_class_name")) if is_modular(cls) else cls


def library_of(folder: Path, name: str, library: str, class_name: str) -> ModuleType:
    """The library of a component: diffusers, one of its packages for a pipeline, or transformers."""
    import diffusers
    import transformers

    if library in ("diffusers", "transformers"):
        found: ModuleType = diffusers if library == "diffusers" else transformers
        return found
    package = getattr(diffusers.pipelines, library, None) if library.isidentifier() else None
    if isinstance(package, ModuleType) and package.__name__ == f"diffusers.pipelines.{library}":
        return package
    own = folder / name / f"{library}.py"
    what = f"code that comes with the model: {own}" if own.is_file() else f"code of another library: {brief(library)}"
    raise ModelError(
        f"{index_file(folder)} asks for {what}. {name!r} is a {brief(f'{library}.{class_name}')}, which is not run; "
        f"only components of diffusers and transformers are read. {_TRUST}"
    )


def check_loaded(pipeline: Any, folder: Path) -> Any:
    """The pipeline, if its folder had all of its weights: diffusers leaves out those that it does not find."""
    for name, part in pipeline.components.items():
        # What is around quantised weights may say that it is on the meta device, as quanto's does.
        weights: Any = getattr(part, "named_parameters", dict)()
        missing = [path for path, weight in weights if any(plain.is_meta for plain in take_apart([weight]).plain)]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"{folder / name} lacks the weights {missing[0]!r}{more}. Download or save it again.")
    return pipeline


# ------------------------------------------------------------------------------------------------ files


def check_files(part: Path, folder: Path, class_name: str, *, trust_remote_code: bool = False) -> None:
    """Refuse the files of a component, in `part` of a model's `folder`, that can run code when they are read."""
    files = list(_files(part, folder))
    weights = {file.name: match[1] for file in files if file.parent == part and (match := WEIGHTS.fullmatch(file.name))}
    has_plain = None in weights.values()
    for file in files:
        if not (has_plain and weights.get(file.name)):  # A variant is not opened where there is the plain file.
            _check_content(file, class_name, trust_remote_code)
    foreign = [file for file in files if file.suffix in (*_PICKLED, *_OTHER_FORMATS) and file.parent == part]
    if foreign and not weights:
        what = "a pickle, which can run code when it is read" if foreign[0].suffix in _PICKLED else "not safetensors"
        raise ModelError(
            f"{foreign[0]} is {what}, and there are no .safetensors beside it. Convert the model, for example with "
            "save_pretrained of a pipeline that you trust."
        )


def _check_content(file: Path, class_name: str, trust_remote_code: bool) -> None:
    if file.suffix == ".safetensors":
        read_header(file)
    elif _PICKLE.match(_beginning(file)) and file.suffix not in _PICKLED:
        raise ModelError(f"{file} is a pickle under another name, which can run code when it is read. Remove it.")
    elif _SHARDS.fullmatch(file.name):
        _check_shards(file)
    elif file.suffix == ".json":
        _check_json(file, class_name, trust_remote_code)
    elif file.suffix == ".jinja" and not trust_remote_code:
        _check_template(file.read_text(encoding="utf-8", errors="replace"), file)


def _files(part: Path, folder: Path) -> Iterator[Path]:
    _check_place(part, folder)
    for place, folders, files in os.walk(part):
        for name in sorted(folders):
            if (Path(place) / name).is_symlink():
                raise ModelError(f"{Path(place) / name} is a link to a folder. Copy the folder in its place.")
        if part == folder:
            folders.clear()  # The folders of other components.
        for name in sorted(files):
            file = Path(place) / name
            _check_place(file, folder)
            yield file


def _check_place(path: Path, folder: Path) -> None:
    """Refuse what leads out of a model's folder. In the cache of the hub, files are links to blobs beside it."""
    root = Path(os.path.realpath(folder))
    roots = [root]
    if root.parent.name == "snapshots":
        roots += [root.parents[1] / "blobs", root.parents[2] / "blobs"]
    target = Path(os.path.realpath(path))  # Of a loop of links, the link itself.
    if not any(target.is_relative_to(each) for each in roots):
        raise ModelError(f"{path} leads out of the model's folder, to {target}. Put a copy of it in its place.")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Download or copy it again.") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelError(f"{path} is a pipe or a device, not a file. Remove it.")


def _beginning(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(256)


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor in a file of safetensors. Its whole header is checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as weights:
            slices = {key: weights.get_slice(key) for key in weights.keys()}  # noqa: SIM118 (no mapping)
            return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        beginning = _beginning(file)
        what = "a complete safetensors file"
        if _PICKLE.match(beginning):
            what += ", but a pickle, which can run code when it is read"
        elif beginning.startswith(b"version https://git-lfs"):
            what += ", but a pointer of Git LFS: run `git lfs pull`"
        raise ModelError(f"{file} is not {what}: {error}. Download or save it again.") from error


def _is_beside(name: Any) -> bool:
    """Whether this names a file of safetensors in the same folder."""
    return isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name) is not None


def _check_shards(file: Path) -> None:
    """Refuse an index of shards that names anything but safetensors beside it."""
    shards = read_json(file).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{file} has no weight_map: it is not the index of a model's weights. Save the model again.")
    for shard in shards.values():
        if not _is_beside(shard):
            raise ModelError(
                f"{file} names {brief(shard)}; expected files beside it that end in .safetensors. Other formats can "
                "run code when they are read. Save the model again."
            )


def _check_json(file: Path, class_name: str, trust_remote_code: bool) -> None:
    content = parse_json(file)
    if not isinstance(content, dict) or trust_remote_code:
        return
    if file.name == "adapter_config.json":
        raise ModelError(f"{file} lets other weights be loaded in place of these. Merge the adapter, or remove it.")
    weights = content.get("transformers_weights")
    if weights is not None and not _is_beside(weights):
        raise ModelError(f"{file} names the weights {brief(weights)}; expected a .safetensors file beside it.")
    own = re.findall(r"[\w.-]+", str(content.get("auto_map", "")))
    is_here = any("--" in name or (file.parent / f"{name.partition('.')[0]}.py").is_file() for name in own)
    if own and (is_here or class_name.startswith("Auto") or class_name.endswith("Processor")):
        raise ModelError(f"{file} asks for code that comes with the model: {brief(content['auto_map'])}. {_TRUST}")
    for template in _templates(content.get("chat_template")):
        _check_template(template, file)


def _templates(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _templates(each)


def _check_template(text: str, file: Path) -> None:
    """Refuse a template that reaches for more than the messages that it is given. transformers runs templates in a
    sandbox; this keeps those away that would try to leave it."""
    import jinja2

    before = ""
    try:
        tokens = [(kind, value) for _, kind, value in jinja2.Environment(autoescape=True).lex(text)]
    except jinja2.TemplateError as error:
        raise ModelError(f"The template in {file} cannot be read: {error}. Correct it or remove it.") from error
    for kind, value in tokens:
        name = value.strip("\"'")
        is_private = kind in ("name", "string") and re.fullmatch(r"__\w*", name)
        if is_private or (kind == "name" and (before, name) in _REACHING):
            raise ModelError(f"The template in {file} uses {name!r}, by which it could run code. {_TRUST}")
        if kind != "whitespace":
            before = value.strip("+-")
