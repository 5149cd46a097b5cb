"""What the tiny pipelines read prompts with: tokenizers made in place, and encoders of few channels."""

from __future__ import annotations

import json
import string
import tempfile
from pathlib import Path
from typing import Any

_CLIP_WORDS = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
_CLIP_START, _CLIP_END = len(_CLIP_WORDS), len(_CLIP_WORDS) + 1

# QwenImage cuts off the 34 tokens that its system prompt is: each word must be one token, as in the real vocabulary.
_QWEN_WORDS = [
    "system", "user", "assistant", "Describe", "Ġthe", "Ġimage", "Ġby", "Ġdetailing", "Ġcolor", "Ġshape", "Ġsize",
    "Ġtexture", "Ġquantity", "Ġtext", "Ġspatial", "Ġrelationships", "Ġof", "Ġobjects", "Ġand", "Ġbackground",
]  # fmt: skip
_VISION_MARKS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
_QWEN_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_VISION_MARKS.values()]
_QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def clip_config(**changes: Any) -> Any:
    from transformers import CLIPTextConfig

    config = {
        "vocab_size": len(_CLIP_WORDS) + 2, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "projection_dim": 8,
        "bos_token_id": _CLIP_START, "eos_token_id": _CLIP_END, "pad_token_id": _CLIP_END,
    }  # fmt: skip
    return CLIPTextConfig(**config | changes)


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    vocabulary = {word: index for index, word in enumerate([*_CLIP_WORDS, "<|startoftext|>", "<|endoftext|>"])}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps(vocabulary))
        (Path(folder) / "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=16)


def t5_config() -> dict[str, Any]:
    """For T5 and UMT5."""
    return {"vocab_size": 54, "d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}


def t5_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{c}", -1.0) for c in string.ascii_lowercase)]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((c, -2.0) for c in string.ascii_lowercase)][:54], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0, model_max_length=16)


def qwen_tokenizer(max_length: int | None = None) -> Any:
    """Bytes, the words of the templates, and the marks of a chat."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    merges = {(word[:end], word[end]): word[: end + 1] for word in _QWEN_WORDS for end in range(1, len(word))}
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merges.values(), *_QWEN_MARKS]
    vocabulary = {word: index for index, word in enumerate(words)}
    named = {"image_token": "<|image_pad|>", "grid_bos_token": "<|vision_start|>", "grid_eos_token": "<|vision_end|>"}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=list(merges), extra_special_tokens=named)
    tokenizer.add_tokens(_QWEN_MARKS, special_tokens=True)
    tokenizer.chat_template = _QWEN_CHAT
    if max_length is not None:
        tokenizer.model_max_length = max_length
    return tokenizer


def vision_marks(tokenizer: Any) -> dict[str, int]:
    """The settings of a model that reads images: which tokens stand for them."""
    return {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in _VISION_MARKS.items()}


def qwen_config(tokenizer: Any, layers: int) -> dict[str, Any]:
    """For Qwen2.5 and Qwen3. The wide start makes prompts differ in hidden states that no norm has seen yet."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 256,
        "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip


def qwen3_encoder(tokenizer: Any, layers: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**qwen_config(tokenizer, layers)))


def qwen25_encoder(tokenizer: Any, layers: int = 1) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    vision = {
        "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 12,
        "fullatt_block_indexes": [0], "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
    }  # fmt: skip
    text = qwen_config(tokenizer, layers) | {"rope_parameters": rope}
    marks = vision_marks(tokenizer)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **marks))


def byte_tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()
