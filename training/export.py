"""Turns trained weights into a pipeline folder that diffusers loads.

    python -m training.export --weights out/emoji/weights --tokenizers tokenizers --out model

Writes a standard FluxPipeline folder in 16 bit, small files only, with the model's defaults in
`samovar.json` and the notices of the pictures it learnt from.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from training import checkpoint, models
from training.settings import ModelConfig, Settings

NOTICES = Path(__file__).parent / "notices"
LARGEST_FILE = 16 * 2**20
LARGEST_FOLDER = 32 * 2**20
DEFAULTS = {
    "num_inference_steps": 28, "true_cfg_scale": 2.0, "negative_prompt": "",
    "max_sequence_length": 64,
}  # fmt: skip
SCHEDULER = {
    "num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": True, "base_shift": 0.5,
    "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096,
}  # fmt: skip


def build_modules(weights_folder: Path, tokenizers: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pipeline's parts in their 16-bit type, and the weights' description."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    weights, about = checkpoint.read_weights(weights_folder)
    settings = Settings.from_json(str(about["settings"]))
    clip, t5 = models.load_tokenizers(tokenizers)
    modules: dict[str, Any] = models.build_flow(settings.model, clip, t5)
    modules["vae"] = models.build_vae(settings.model)
    modules["vae"].register_to_config(scaling_factor=about["scaling"], shift_factor=about["shift"])
    for name, module in modules.items():
        models.set_weights(module, models.part_weights(weights, name))
        module.to(getattr(torch, str(about["dtype"]))).eval()
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    return {**modules, "scheduler": scheduler, "tokenizer": clip, "tokenizer_2": t5}, about


def edit_json(path: Path, **changes: Any) -> None:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content, indent=2) + "\n")


def settle_names(out: Path, tokenizers: Path) -> None:
    """Make the folder read the same in every transformers version."""
    for encoder in ("text_encoder", "text_encoder_2"):  # loads in the type its config names
        edit_json(out / encoder / "config.json", dtype="float32")
    edit_json(out / "model_index.json", tokenizer_2=["transformers", "T5TokenizerFast"])
    edit_json(out / "tokenizer_2" / "tokenizer_config.json", tokenizer_class="T5TokenizerFast")
    for name in ("vocab.json", "merges.txt"):  # CLIP's classic files
        shutil.copyfile(tokenizers / "clip" / name, out / "tokenizer" / name)


def write_notices(out: Path, about: dict[str, Any]) -> None:
    """Who drew what the model learnt from, and under which terms."""
    folder = out / "notices"
    folder.mkdir(exist_ok=True)
    lines = ["This model was trained on pictures and words of others:", ""]
    for key, source in about["sources"].items():
        lines.append(
            f"- {key}: {source['author']}, {source['licence']}, from the package "
            f"{source['package']} {source['version']}; see notices/{source['notice']}"
        )
        shutil.copyfile(NOTICES / source["notice"], folder / source["notice"])
    (out / "NOTICE").write_text("\n".join(lines) + "\n")


def check_sizes(out: Path) -> int:
    """The folder's bytes, all readable; too large a file or folder is refused."""
    sizes = {path: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    for path in sizes:
        path.chmod(0o644)  # safetensors writes files that only their owner may read
    largest = max(sizes, key=lambda path: sizes[path])
    if sizes[largest] >= LARGEST_FILE or sum(sizes.values()) > LARGEST_FOLDER:
        raise ValueError(
            f"{out} has {sum(sizes.values())} bytes, its largest file {largest.name} "
            f"{sizes[largest]}: at most {LARGEST_FOLDER} in all and below {LARGEST_FILE} a file "
            "may be shipped; make the model smaller"
        )
    return sum(sizes.values())


def export(weights: Path, tokenizers: Path, out: Path) -> int:
    """Write the pipeline folder and return its size in bytes."""
    from diffusers import FluxPipeline

    parts, about = build_modules(weights, tokenizers)
    if out.exists():
        if not (out / "model_index.json").is_file():
            raise FileExistsError(f"{out} exists and is no pipeline folder: give another --out")
        shutil.rmtree(out)
    FluxPipeline(**parts).save_pretrained(out, max_shard_size="14MB")
    settle_names(out, tokenizers)
    model: ModelConfig = Settings.from_json(str(about["settings"])).model
    defaults = {"height": model.picture, "width": model.picture, **DEFAULTS}
    (out / "samovar.json").write_text(json.dumps(defaults, indent=2) + "\n")
    write_notices(out, about)
    return check_sizes(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, default=Path("out/emoji/weights"))
    parser.add_argument("--tokenizers", type=Path, default=Path("tokenizers"))
    parser.add_argument("--out", type=Path, default=Path("out/model"))
    args = parser.parse_args()
    size = export(args.weights, args.tokenizers, args.out)
    print(f"{args.out}: {size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
