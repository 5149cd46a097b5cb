"""Trains the CLIP and T5 tokenizers on the captions.

    python -m training.vocabulary --data data --out tokenizers

Both are tiny. The T5 pieces come from SentencePiece, whose character map does the lower-casing:
transformers rebuilds the tokenizer on loading and would drop any other normaliser.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.captions import all_captions
from training.pictures import load

SIZE = 2048
SPECIAL = ["<pad>", "</s>", "<unk>"]  # T5's, by id
PUNCTUATION = "0123456789,.'-!?:;()&\"/+#%*"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT_WORDS = (
    "a photo of, an image of, painting, drawing, picture of a big small red green blue yellow "
    "orange purple pink black white brown gray golden and with in on"
)


def folding_rules() -> dict[str, str]:
    """Capital and accented Latin letters to plain ones, typographic marks to ASCII."""
    rules = {
        "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-",
        "\u2014": "-", "\u2026": "...", "\u00a0": " ", "\t": " ", "\n": " ",
    }  # fmt: skip
    for code in [*range(0x41, 0x5B), *range(0xC0, 0x180)]:
        base = unicodedata.normalize("NFKD", chr(code)).encode("ascii", "ignore").decode().lower()
        if base and base != chr(code):
            rules[chr(code)] = base
    return rules


def message_fields(data: bytes) -> dict[int, bytes]:
    """The length-delimited fields of a protobuf message, the last of each number."""
    fields: dict[int, bytes] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = varint()
        if key & 7 == 2:
            length = varint()
            fields[key >> 3] = data[position : position + length]
            position += length
        elif key & 7 == 0:
            varint()
        else:
            position += {1: 8, 5: 4}[key & 7]
    return fields


def code_points(text: str) -> str:
    return " ".join(f"{ord(char):X}" for char in text)


def train_sentencepiece(texts: Sequence[str], size: int, folder: Path) -> tuple[list[tuple[str, float]], bytes]:
    """Pieces with their scores, and the compiled character map, trained in `folder`."""
    import sentencepiece

    rules, corpus, model = folder / "rules.tsv", folder / "corpus.txt", folder / "t5.model"
    lines = [f"{code_points(a)}\t{code_points(b)}" for a, b in sorted(folding_rules().items())]
    rules.write_text("\n".join(lines) + "\n")
    corpus.write_text("\n".join(texts) + "\n")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(model.with_suffix("")), vocab_size=size,
        hard_vocab_limit=False, model_type="unigram", normalization_rule_tsv=str(rules),
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>", eos_piece="</s>",
        unk_piece="<unk>", character_coverage=1.0, required_chars=LETTERS + PUNCTUATION,
        add_dummy_prefix=True, num_threads=1, minloglevel=2,
    )  # fmt: skip
    trained = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(trained.get_piece_size())
    pieces = [(trained.id_to_piece(i), trained.get_score(i)) for i in ids]
    normalizer = message_fields(model.read_bytes())[3]  # ModelProto.normalizer_spec
    return pieces, message_fields(normalizer)[2]  # NormalizerSpec.precompiled_charsmap


def build_t5(texts: Sequence[str], size: int, out: Path) -> None:
    """A T5 tokenizer folder."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    with tempfile.TemporaryDirectory() as scratch:
        pieces, character_map = train_sentencepiece(texts, size, Path(scratch))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.normalizer = normalizers.Precompiled(character_map)
    space: dict[str, Any] = {"replacement": "\u2581", "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**space)]
    )
    tokenizer.decoder = decoders.Metaspace(**space)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", 1)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "T5TokenizerFast", "pad_token": "<pad>", "eos_token": "</s>",
        "unk_token": "<unk>", "extra_ids": 0, "additional_special_tokens": [],
        "model_max_length": 512,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def build_clip(texts: Sequence[str], size: int, out: Path) -> None:
    """A CLIP tokenizer folder, with the classic vocab and merges files beside the new one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    shape = CLIPTokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = shape.normalizer, shape.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=max(size - len(alphabet), len(alphabet) + 2), initial_alphabet=alphabet,
        special_tokens=["<|startoftext|>", "<|endoftext|>"], end_of_word_suffix="</w>",
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(model["vocab"])
    for char in alphabet:  # every byte may end a word, or it would read as <|endoftext|>
        vocab.setdefault(char + "</w>", len(vocab))
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77).save_pretrained(out)
    (out / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False) + "\n")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (out / "merges.txt").write_text("\n".join(lines) + "\n")


def check(out: Path, size: int) -> None:
    """Load both as a pipeline would, and read awkward prompts."""
    from transformers import CLIPTokenizer, T5TokenizerFast

    clip = CLIPTokenizer.from_pretrained(out / "clip")
    t5 = T5TokenizerFast.from_pretrained(out / "t5")
    for name, tokenizer in (("clip", clip), ("t5", t5)):
        if len(tokenizer) > size:
            raise ValueError(f"the {name} tokenizer has {len(tokenizer)} pieces, over {size}")
    if t5("A RED Cat").input_ids != t5("a red cat").input_ids:
        raise ValueError("the T5 tokenizer does not fold case: its character map was lost")
    for text in ("", "Zürich hedgehog! 日本", "x" * 10_000):
        t5(text, truncation=True, max_length=64)
        if clip(text).input_ids.count(clip.eos_token_id) != 1:
            raise ValueError(f"the CLIP tokenizer reads {text[:20]!r} with a stray end of text")


def build(texts: Sequence[str], out: Path, size: int = SIZE) -> None:
    """Both tokenizers, checked: OUT/clip and OUT/t5."""
    build_t5(texts, size, out / "t5")
    build_clip(texts, size, out / "clip")
    check(out, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="the data folder")
    parser.add_argument("--out", type=Path, default=Path("tokenizers"), help="the folder to write")
    parser.add_argument("--size", type=int, default=SIZE, help="pieces in each vocabulary")
    args = parser.parse_args()
    texts = [text for texts in all_captions(load(args.data).rows) for text in texts]
    build([*texts, *[PROMPT_WORDS] * 20], args.out, args.size)
    print(f"tokenizers of {args.size} pieces in {args.out}")


if __name__ == "__main__":
    main()
