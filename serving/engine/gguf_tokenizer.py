"""The Hugging Face tokenizer files that a GGUF file's vocabulary describes.

Two families are known, each written out as the models' own authors publish it:

    gpt2 + pre "smollm"   byte-level BPE; digits stand alone; no token is added to a prompt
    llama (Gemma)         SentencePiece BPE with byte fallback; "▁" stands for a space; <bos> first

Gemma's file lists no merges. Its vocabulary is in merge order (its scores are not), so the merges are
every split of every token into two known tokens, tokens in order, the longest left part first.
"""

from __future__ import annotations

from typing import Any

from serving.engine.gguf_file import GgufError

_CONTROL = 3
_USER_DEFINED = 4
_SPACE = "\u2581"


def tokenizer_json(metadata: dict[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer.json` for this metadata.

    Raises:
        GgufError: a tokenizer of another family.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model == "gpt2" and pre == "smollm":
        return _byte_level(metadata)
    if model == "llama" and metadata["general.architecture"] == "gemma3":
        return _sentencepiece(metadata)
    raise GgufError(f"its tokenizer {model!r} (pre-tokenizer {pre!r}) cannot be converted; SmolLM2's and Gemma's can")


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The content of `tokenizer_config.json`: special tokens by name, context length, chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        # The generic class takes tokenizer.json as it is; Gemma's own would drop the <bos> step.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _byte_level(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return _document(
        metadata,
        tokens,
        model={
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        decoder=byte_level,
    )


def _sentencepiece(metadata: dict[str, Any]) -> dict[str, Any]:
    # The file spells runs of spaces as spaces; the normalizer below turns text into "▁" before it looks.
    tokens = [
        _SPACE * len(token) if " " in token and not token.strip(" ") else token
        for token in metadata["tokenizer.ggml.tokens"]
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restore_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return _document(
        metadata,
        tokens,
        model={
            "type": "BPE",
            "vocab": vocab,
            "merges": _merges(tokens, vocab),
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            "fuse_unk": True,
            "byte_fallback": True,
        },
        normalizer=replace_spaces,
        pre_tokenizer=split,
        decoder={"type": "Sequence", "decoders": [restore_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        post_processor=_leading_token(tokens, metadata["tokenizer.ggml.bos_token_id"]),
    )


def _merges(tokens: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    return merges


def _leading_token(tokens: list[str], token_id: int) -> dict[str, Any]:
    token = tokens[token_id]
    lead = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": index}} for index, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [lead, first],
        "pair": [lead, first, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _document(metadata: dict[str, Any], tokens: list[str], *, model: dict[str, Any], **steps: Any) -> dict[str, Any]:
    kinds = metadata["tokenizer.ggml.token_type"]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    blank = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **blank, "added_tokens": added, **steps, "model": model}
