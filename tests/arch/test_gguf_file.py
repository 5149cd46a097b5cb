"""What is read of a GGUF file, and which files are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelines import tiny_flux_pipeline
from pipelines.gguf_files import write_gguf
from samovar.arch.gguf_file import GgufFile, read_gguf, stored_in
from samovar.arch.modules import tensor_bytes
from samovar.arch.quantised import as_stored
from samovar.arch.skeleton import Parts, read_skeleton
from samovar.core.errors import ModelError
from samovar.engine.models import load_pipeline
from samovar.engine.quantize import Quantization

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    pipe = tiny_flux_pipeline()
    pipe.save_pretrained(path)
    write_gguf(path / "q8.gguf", pipe.transformer)
    return path


def parts_of(folder: Path) -> Parts:
    return read_skeleton(str(folder))[1]


def test_sizes_are_those_of_the_loaded_model(folder: Path) -> None:
    file = folder / "q8.gguf"
    assert read_gguf(file).kind == "gguf F32, Q8_0"
    parts = stored_in(read_gguf(file), "transformer", parts_of(folder))
    pipe = load_pipeline(folder, torch.float32, quantization=Quantization.read(str(file), torch.device("cpu")))
    exact = tensor_bytes([parts["transformer"].module])  # type: ignore[list-item]
    with as_stored(parts):
        assert tensor_bytes([parts["transformer"].module]) == tensor_bytes([pipe.transformer]) < exact  # type: ignore[list-item]


def test_a_file_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_flux_pipeline().transformer
    other.proj_out = torch.nn.Linear(16, 8)
    file = read_gguf(write_gguf(tmp_path / "wide.gguf", other))
    with pytest.raises(
        ModelError, match=r"not of this FluxTransformer2DModel: proj_out\.weight is 8 x 16 in it, and 4 x"
    ):
        stored_in(file, "transformer", parts_of(folder))
    del other.single_transformer_blocks[2]
    shorter = read_gguf(write_gguf(tmp_path / "short.gguf", other, architecture="sd3"))
    with pytest.raises(ModelError, match=r"FluxTransformer2DModel: diffusers cannot translate .*architecture is 'sd3'"):
        stored_in(shorter, "transformer", parts_of(folder))


def test_a_file_of_a_deeper_model_is_refused() -> None:
    """diffusers would load what it knows, and leave out the other blocks without a word."""
    _, parts = read_skeleton("QwenImageTransformer2DModel")
    model = parts["transformer"].module
    assert model is not None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored_in(a_file_of(shapes), "transformer", parts)
    stored_in(
        a_file_of(shapes | {"__index_timestep_zero__": (0,)}), "transformer", parts
    )  # In files of Qwen-Image-Edit.
    deeper = {name.replace("blocks.0.", "blocks.60."): shape for name, shape in shapes.items() if "blocks.0." in name}
    assert deeper
    more = len(deeper) - 1
    with pytest.raises(
        ModelError, match=rf"it has transformer_blocks\.60\.\S+ \(and {more} more\), which the model does"
    ):
        stored_in(a_file_of(shapes | deeper), "transformer", parts)


def a_file_of(shapes: dict[str, tuple[int, ...]]) -> GgufFile:
    return GgufFile(Path("some.gguf"), "some", shapes, {}, ("F32",))


def test_a_type_that_diffusers_cannot_load_is_refused_by_name(folder: Path) -> None:
    file = replace(read_gguf(folder / "q8.gguf"), types=("F32", "IQ2_XXS", "Q8_0"))
    with pytest.raises(ModelError, match=r"holds weights as IQ2_XXS, which diffusers cannot load.*loads .*Q4_K"):
        stored_in(file, "transformer", parts_of(folder))


def test_what_is_no_file_of_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no")
    whole = (folder / "q8.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:2000])
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    for name in ("text.gguf", "cut.gguf", "half.gguf"):
        with pytest.raises(ModelError, match=f"The GGUF file .*{name}' cannot be read: .*cut short: download it again"):
            read_gguf(tmp_path / name)
    with pytest.raises(ModelError, match=r"empty\.gguf' holds no weights"):
        read_gguf(write_gguf(tmp_path / "empty.gguf", torch.nn.Module()))
    with pytest.raises(ModelError, match="was given for 'unet'; this model has"):
        stored_in(read_gguf(folder / "q8.gguf"), "unet", parts_of(folder))
    with pytest.raises(
        ModelError, match=r"cannot load a CLIPTextModel from a single file\. .* such as text_encoder=int8"
    ):
        stored_in(read_gguf(folder / "q8.gguf"), "text_encoder", parts_of(folder))


def test_names_of_the_original_are_translated() -> None:
    """Files of FLUX have its authors' names, and query, key and value in one matrix."""
    _, parts = read_skeleton("FluxTransformer2DModel")
    model = parts["transformer"].module
    assert model is not None
    shapes = original_flux({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    # Q4_0: 32 weights in 18 bytes.
    packed = {n: (s[0], s[1] // 32 * 18) for n, s in shapes.items() if len(s) == 2 and "blocks" in n}
    file = GgufFile(Path("flux.gguf"), "flux", shapes, packed, ("Q4_0", "F32"))
    stored = stored_in(file, "transformer", parts)
    with as_stored(stored):
        weight = model.get_submodule("single_transformer_blocks.5.attn.to_k")._buffers["weight"]
        assert weight is not None
        assert tuple(weight.shape) == (3072, 3072 // 32 * 18)
        assert tensor_bytes([model]) == pytest.approx(11.9e9 * 18 / 32, rel=0.02)


_NAMES = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "context_embedder": "txt_in", "x_embedder": "img_in", "norm_out.linear": "final_layer.adaLN_modulation.1",
    "norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin", "norm.linear": "modulation.lin",
    "attn.to_out.0": "img_attn.proj", "attn.to_add_out": "txt_attn.proj", "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2", "ff_context.net.0.proj": "txt_mlp.0", "ff_context.net.2": "txt_mlp.2",
}  # fmt: skip
_NORMS = {"norm_q": ("img_attn.", "query"), "norm_k": ("img_attn.", "key"),
          "norm_added_q": ("txt_attn.", "query"), "norm_added_k": ("txt_attn.", "key")}  # fmt: skip


def original_flux(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes by the names of FLUX's authors."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        path, _, kind = name.rpartition(".")
        list_, number, inner = path.split(".", 2) if "blocks." in path else ("", "", path)
        block = {
            "transformer_blocks": f"double_blocks.{number}.",
            "single_transformer_blocks": f"single_blocks.{number}.",
        }
        prefix, is_single = block.get(list_, ""), list_.startswith("single")
        layer = inner.removeprefix("attn.")
        if layer in _NORMS:
            side, which = _NORMS[layer]
            found[f"{prefix}{'' if is_single else side}norm.{which}_norm.scale"] = shape
        elif layer in ("to_q", "to_k", "to_v", "proj_mlp", "add_q_proj", "add_k_proj", "add_v_proj"):
            joint = "linear1" if is_single else "txt_attn.qkv" if layer.startswith("add") else "img_attn.qkv"
            before = found.get(f"{prefix}{joint}.{kind}", (0,))
            found[f"{prefix}{joint}.{kind}"] = (before[0] + shape[0], *shape[1:])
        elif inner == "proj_out":
            found[f"{prefix}linear2.{kind}" if prefix else f"final_layer.linear.{kind}"] = shape
        else:
            found[f"{prefix}{_NAMES[inner]}.{kind}"] = shape
    return found
