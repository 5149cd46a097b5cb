"""Nothing that can run code is read from a model's folder, whatever it is called and wherever it leads.

Each folder is refused by what looks at it (`survey`) and by what loads it alike.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipelines import tiny_flux_pipeline
from samovar import survey
from samovar.arch.folder import check_folder, components, read_index
from samovar.core.errors import ModelError
from samovar.engine.models import load_pipeline

FLUX, CLIP = "transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


class Canary:
    """What a pickle can do: run a command when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> object:
        return os.system, (f"touch {self._file}",)


def refused(folder: Path, message: str) -> None:
    for look in (lambda: survey(str(folder)), lambda: load_pipeline(folder, torch.float32)):
        with pytest.raises(ModelError, match=message):
            look()
    assert not (folder.parent / "canary").exists()


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def name_in_index(file: Path, shard: Any, metadata: Any = None) -> None:
    """Replace a weight file by an index that names another for all of its weights."""
    names = list(load_file(file))
    index = {"metadata": metadata or {"total_size": 1}, "weight_map": dict.fromkeys(names, shard)}
    (file.parent / f"{file.name}.index.json").write_text(json.dumps(index))
    file.rename(file.with_name("decoy.safetensors"))


@pytest.mark.parametrize("weights", [FLUX, CLIP])
def test_an_index_names_nothing_but_safetensors_beside_it(folder: Path, weights: str) -> None:
    file = folder / weights
    torch.save(load_file(file), file.with_name("w-00001-of-00001.bin"))
    name_in_index(file, "w-00001-of-00001.bin")
    refused(folder, r"names 'w-00001-of-00001\.bin'; expected files beside it that end in \.safetensors")


@pytest.mark.parametrize("shard", ["../../outside.safetensors", "{}/outside.safetensors", "..\\outside.safetensors", 5])
def test_an_index_names_no_file_elsewhere(folder: Path, shard: Any) -> None:
    shutil.copy(folder / CLIP, folder.parent / "outside.safetensors")
    name_in_index(folder / CLIP, shard.format(folder.parent) if isinstance(shard, str) else shard)
    refused(folder, r"index\.json names .*; expected files beside it")


def test_shards_that_are_safetensors_are_read(folder: Path) -> None:
    expected = load_pipeline(folder, torch.float32).transformer.state_dict()
    name_in_index(folder / FLUX, "decoy.safetensors")
    (folder / FLUX).unlink(missing_ok=True)
    found = load_pipeline(folder, torch.float32).transformer.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert survey(str(folder)).class_name == "FluxPipeline"


def test_weights_of_an_encoder_that_are_missing_are_named(folder: Path) -> None:
    """transformers would fill them with random numbers."""
    from safetensors.torch import save_file

    file = folder / CLIP
    weights = load_file(file)
    gone = next(name for name in weights if name.endswith("v_proj.weight"))
    del weights[gone]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights '.*v_proj\.weight'\. Download"):
        load_pipeline(folder, torch.float32)


def test_weights_that_are_missing_are_named(folder: Path) -> None:
    from safetensors.torch import save_file

    weights = load_file(folder / FLUX)
    del weights["proj_out.weight"], weights["proj_out.bias"]
    save_file(weights, folder / FLUX)
    with pytest.raises(ModelError, match=r"transformer lacks the weights 'proj_out\.(weight|bias)' and 1 more"):
        load_pipeline(folder, torch.float32)


def pickled(folder: Path) -> None:
    (folder / FLUX).write_bytes(pickle.dumps(Canary(folder.parent / "canary")))


def torch_saved(folder: Path) -> None:
    torch.save({"canary": Canary(folder.parent / "canary")}, folder / FLUX)


def pickled_vocabulary(folder: Path) -> None:
    (folder / "tokenizer_2" / "spiece.model").write_bytes(pickle.dumps(Canary(folder.parent / "canary")))


def bare_pickle(folder: Path) -> None:
    (folder / CLIP).rename(folder / "text_encoder" / "decoy.safetensors")
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(folder.parent / "canary")))


def lfs_pointer(folder: Path) -> None:
    (folder / FLUX).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")


def flax(folder: Path) -> None:
    (folder / CLIP).rename(folder / "text_encoder" / "flax_model.msgpack")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pickled, r"is not a complete safetensors file, but a pickle, which can run code"),
        (torch_saved, r"is not a complete safetensors file, but a pickle"),
        (pickled_vocabulary, r"spiece\.model is a pickle under another name"),
        (bare_pickle, r"pytorch_model\.bin is a pickle, which can run code when it is read, and there are no"),
        (lfs_pointer, r"is not a complete safetensors file, but a pointer of Git LFS: run `git lfs pull`"),
        (flax, r"flax_model\.msgpack is not safetensors, and there are no \.safetensors beside it"),
    ],
)
def test_content_counts_and_not_the_name(folder: Path, make: Callable[[Path], None], message: str) -> None:
    make(folder)
    refused(folder, message)


def stored(shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize("length", [None, 2**63])
@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        json.dumps({"a": stored([4], 0, 16), "b": stored([4], 8, 24)}).encode(),
        json.dumps({"a": stored([2**40, 2**40], 0, 16)}).encode(),
    ],
    ids=["empty", "nothing", "deep", "overlapping", "too large"],
)
def test_headers_that_lie_are_refused(folder: Path, header: bytes, length: int | None) -> None:
    """Weights that are said to be longer than the file, to share bytes, or to be of another size than their shape's."""
    size = (len(header) if length is None else length).to_bytes(8, "little") if header else b""
    (folder / FLUX).write_bytes(size + header + bytes(24))
    for look in (lambda: survey(str(folder)), lambda: load_pipeline(folder, torch.float32)):
        with pytest.raises(ModelError, match=r"diffusion_pytorch_model\.safetensors"):
            look()


def test_the_other_folders_of_a_component_are_checked(folder: Path) -> None:
    """Several ControlNets are saved as controlnet, controlnet_1 ..., and only the first is in the index."""
    shutil.copytree(folder / "transformer", folder / "transformer_1")
    (folder / "transformer_1" / Path(FLUX).name).write_bytes(b"")
    refused(folder, r"transformer_1.* is not a complete safetensors file")


def test_pickles_beside_safetensors_are_left_alone(folder: Path) -> None:
    """Many models of the hub have both."""
    canary = folder.parent / "canary"
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    assert survey(str(folder)).class_name == "FluxPipeline"
    assert type(load_pipeline(folder, torch.float32)).__name__ == "FluxPipeline"
    assert not canary.exists()


# ------------------------------------------------------------------------------------------------ links


@pytest.mark.parametrize("where", [FLUX, "tokenizer/tokenizer_config.json", "model_index.json"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, where: str) -> None:
    shutil.move(folder / where, folder.parent / "outside")
    (folder / where).symlink_to(folder.parent / "outside")
    refused(folder, r"leads out of the model's folder, to .*outside\. Put a copy of it in its place")


def test_linked_folders_are_refused(folder: Path) -> None:
    shutil.move(folder / "vae", folder.parent / "vae")
    (folder / "vae").symlink_to(folder.parent / "vae")
    refused(folder, r"vae leads out of the model's folder")
    (folder / "vae").unlink()
    shutil.move(folder.parent / "vae", folder / "vae")
    (folder / "hidden").mkdir()
    (folder / "tokenizer" / "additional_chat_templates").symlink_to(folder / "hidden")
    refused(folder, r"additional_chat_templates is a link to a folder")


def test_links_within_the_folder_and_to_the_folder_work(folder: Path) -> None:
    (folder / FLUX).rename(folder / "weights.safetensors")
    (folder / FLUX).symlink_to(folder / "weights.safetensors")
    (folder.parent / "link").symlink_to(folder)
    assert survey(str(folder.parent / "link")).class_name == "FluxPipeline"
    assert type(load_pipeline(folder.parent / "link", torch.float32)).__name__ == "FluxPipeline"


@pytest.mark.parametrize("blobs", ["models--a--b/blobs", "blobs/ab"])
def test_the_cache_of_the_hub_works(folder: Path, tmp_path: Path, blobs: str) -> None:
    """There, files are links to blobs of the same model, or to those that all models share."""
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "0123"
    (tmp_path / "hub" / blobs).mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = tmp_path / "hub" / blobs / str(number)
        shutil.move(file, blob)
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    assert survey(str(snapshot)).class_name == "FluxPipeline"
    assert type(load_pipeline(snapshot, torch.float32)).__name__ == "FluxPipeline"


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer" / "special_tokens_map.json.fifo")
    refused(folder, r"is a pipe or a device, not a file")


def test_a_link_to_nothing_is_named(folder: Path) -> None:
    (folder / FLUX).unlink()
    (folder / FLUX).symlink_to(folder / "gone")
    refused(folder, r"cannot be read: No such file or directory")
    (folder / FLUX).unlink()
    (folder / FLUX).symlink_to(folder / FLUX)
    refused(folder, r"cannot be read: Too many levels of symbolic links")


# ------------------------------------------------------------------------------------------------ code


@pytest.mark.parametrize("kind", ["auto class", "file", "hub", "processor"])
def test_code_by_auto_map_is_refused(folder: Path, kind: str) -> None:
    canary = folder.parent / "canary"
    change(folder / "tokenizer" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    if kind == "hub":
        change(folder / "tokenizer" / "tokenizer_config.json", auto_map={"AutoTokenizer": "owner/name--evil.T"})
    elif kind == "file":
        (folder / "tokenizer" / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    else:
        name = "AutoTokenizer" if kind == "auto class" else "Qwen2VLProcessor"
        change(folder / "model_index.json", tokenizer=["transformers", name])
    refused(folder, r"tokenizer_config\.json asks for code that comes with the model: .*evil.*trust_remote_code=True")


def test_a_mere_mention_of_auto_classes_is_not_code(folder: Path) -> None:
    change(folder / "text_encoder" / "config.json", auto_map={"AutoModel": "gone.Model"})
    assert survey(str(folder)).class_name == "FluxPipeline"
    assert type(load_pipeline(folder, torch.float32)).__name__ == "FluxPipeline"


@pytest.mark.parametrize("library", ["evilmod", "subprocess", "os.path", "diffusers.utils", ""])
def test_no_other_library_is_imported(folder: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "evilmod.py").write_text(f"open({str(folder.parent / 'canary')!r}, 'w')\nclass Popen: pass\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    change(folder / "model_index.json", scheduler=[library, "Popen"])
    refused(folder, r"asks for code of another library: .*trust_remote_code=True")


TEMPLATES = (
    "{{ messages['__class__'] }}",
    "{{ messages | attr('x') }}",
    "{% include 'other' %}",
    "{%- import 'other' as x -%}",
    "{{ (messages] }}",
    "{{ ''.__class__.__mro__ }}",
)
PLACES = ("tokenizer_config.json", "list", "chat_template.jinja", "additional_chat_templates")


@pytest.mark.parametrize(
    ("template", "place"), [*((each, PLACES[0]) for each in TEMPLATES), *((TEMPLATES[0], each) for each in PLACES[1:])]
)
def test_templates_that_reach_further_are_refused(folder: Path, template: str, place: str) -> None:
    tokenizer = folder / "tokenizer"
    if place == "tokenizer_config.json":
        change(tokenizer / place, chat_template=template)
    elif place == "list":
        change(tokenizer / "tokenizer_config.json", chat_template=[{"name": "default", "template": template}])
    else:
        file = tokenizer / place if place.endswith("jinja") else tokenizer / place / "tool.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(template)
    refused(folder, r"The template in .* (uses '.*', by which it could run code|cannot be read)")


def test_ordinary_templates_are_read(folder: Path) -> None:
    template = (
        "{%- for message in messages %}{%- set _ = message %}{% generation %}{{ '<|__im__start|>' + message.role }}"
        "{% endgeneration %}{{ message['content'] | trim }}{%- if not loop.last %}{% break %}{% endif %}{% endfor %}"
    )
    change(folder / "tokenizer" / "tokenizer_config.json", chat_template=template)
    assert load_pipeline(folder, torch.float32).tokenizer.chat_template == template


def test_an_adapter_brings_no_other_weights(folder: Path) -> None:
    adapter = {"base_model_name_or_path": str(folder.parent), "peft_type": "LORA"}
    (folder / "text_encoder" / "adapter_config.json").write_text(json.dumps(adapter))
    refused(folder, r"adapter_config\.json lets other weights be loaded in place of these")


@pytest.mark.parametrize("name", ["adapter_model.bin", "../x.safetensors", 3])
def test_a_configuration_names_no_other_weights(folder: Path, name: Any) -> None:
    change(folder / "text_encoder" / "config.json", transformers_weights=name)
    refused(folder, r"config\.json names the weights .*; expected a \.safetensors file beside it")


# ------------------------------------------------------------------------------------------------ indexes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "os"}, r"names the class 'os', which diffusers .* does not have"),
        ({"_class_name": "logging"}, r"names the class 'logging', which diffusers .* does not have"),
        ({"_class_name": "DiffusionPipeline"}, r"names the class 'DiffusionPipeline'"),
        ({"_class_name": "FluxTransformer2DModel"}, r"names the class 'FluxTransformer2DModel'"),
        ({"_class_name": ["own", "Own"]}, r"asks for code that comes with the model: .*own\.py"),
        ({"_class_name": []}, r"asks for code that comes with the model"),
        ({"_class_name": None}, r"names the class None"),
        ({"_class_name": float("nan")}, r"names the class nan"),
        ({"transformer": 5}, r"'transformer' is 5; expected a library and a class of it, because FluxPipeline needs"),
        ({"transformer": None}, r"'transformer' is None; expected a library"),
        ({"transformer": ["diffusers"]}, r"'transformer' is \['diffusers'\]; expected a name and a pair"),
        ({"transformer": [2, 5]}, r"'transformer' is \[2, 5\]; expected a library and a class of it"),
        ({"transformer": ["diffusers", 5]}, r"'transformer' is \['diffusers', 5\]; expected a library and a class"),
        ({"transformer": ["diffusers", "logging"]}, r"cannot be loaded|which diffusers .* does not have"),
        ({"../../x": ["diffusers", "AutoencoderKL"]}, r"'../../x' is .*; expected a name and a pair"),
    ],
)
def test_an_index_that_is_wrong_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    change(folder / "model_index.json", **changes)
    refused(folder, message)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model_index.json", "[" * 100_000),
        ("transformer/config.json", '{"a":' * 100_000),
        ("text_encoder/config.json", "\xff"),
        ("scheduler/scheduler_config.json", ""),
        ("tokenizer/tokenizer_config.json", "[" * 100_000),
        ("tokenizer/tokenizer.json", "\xff"),
    ],
)
def test_no_file_of_json_is_too_deep_or_broken_for_an_answer(folder: Path, file: str, content: str) -> None:
    (folder / file).write_bytes(content.encode("latin-1"))
    refused(folder, r"json is not valid JSON")


def test_a_list_of_numbers_is_a_setting_of_the_pipeline(folder: Path) -> None:
    """Such as the layers of a text encoder that Krea 2 reads."""
    before = components(folder, read_index(folder))
    change(folder / "model_index.json", text_encoder_select_layers=[2, 5, 8], pairs=[[1, 2], [3, 4]])
    assert components(folder, check_folder(folder)) == before
