"""The Hugging Face model and generation configs that a GGUF file's metadata describes."""

from __future__ import annotations

from typing import Any

from serving.engine.gguf_file import GgufHeader

# Gemma 3 mixes window and full attention, one layer in six full, and turns the windowed ones by another
# rotary base (Gemma 3 Technical Report, section 2). llama.cpp's file states only the full layers' base.
_GEMMA_FULL_ATTENTION_EVERY = 6
_GEMMA_WINDOW_ROPE_THETA = 10_000.0


def model_config(header: GgufHeader) -> dict[str, Any]:
    """The content of `config.json`."""
    metadata = header.metadata
    architecture = metadata["general.architecture"]

    def of(key: str) -> Any:
        return metadata[f"{architecture}.{key}"]

    num_heads = of("attention.head_count")
    shared = {
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": metadata.get(f"{architecture}.attention.key_length", of("embedding_length") // num_heads),
        "max_position_embeddings": of("context_length"),
        # Stored as float32; the model's authors wrote a short decimal.
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in header.tensors),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        # The config layout written here. Without it transformers takes any local tokenizer for a broken Mistral one.
        "transformers_version": "5.0.0",
        **_token_ids(metadata),
    }
    own = _llama(of) if architecture == "llama" else _gemma3(of)
    return shared | own


def generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The content of `generation_config.json`: token ids alone, so that no sampling default hides in it."""
    return _token_ids(metadata)


def _token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: value for name, value in ids.items() if value is not None}


def _llama(of: Any) -> dict[str, Any]:
    theta = of("rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def _gemma3(of: Any) -> dict[str, Any]:
    full, window = of("rope.freq_base"), _GEMMA_WINDOW_ROPE_THETA
    kinds = [
        "full_attention" if layer % _GEMMA_FULL_ATTENTION_EVERY == 0 else "sliding_attention"
        for layer in range(1, of("block_count") + 1)
    ]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": of("attention.key_length"),
        "sliding_window": of("attention.sliding_window"),
        "layer_types": kinds,
        "rope_theta": full,
        "rope_local_base_freq": window,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": full},
            "sliding_attention": {"rope_type": "default", "rope_theta": window},
        },
    }
