"""GGUF files of a model, by the names of diffusers, with a real quantiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def write_gguf(file: Path, model: torch.nn.Module, kind: str = "Q8_0", architecture: str = "flux") -> Path:
    """The weights of a model in a file: matrices of blocks quantised as far as their rows allow, all else as it is."""
    import gguf

    quant: Any = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[quant]
    writer = gguf.GGUFWriter(file, architecture)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if values.ndim == 2 and "blocks" in name and values.shape[-1] % block == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
