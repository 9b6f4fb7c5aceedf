"""The sizes of Llama this example knows, from one that a laptop trains to one that needs a node of GPUs."""

from __future__ import annotations

from typing import Any, Literal, get_args

from transformers import LlamaConfig

from examples.llama.data import BYTE_VOCAB_SIZE

Size = Literal["tiny", "small", "llama-3.2-1b", "llama-3.1-8b"]


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

_BYTES: dict[str, Any] = {
    "vocab_size": BYTE_VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    # Dropout draws random numbers in every step: a resume that forgets them shows in the next loss.
    "attention_dropout": 0.1,
}

_SIZES: dict[str, dict[str, Any]] = {
    "tiny": _BYTES
    | {
        "hidden_size": 128,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": _BYTES
    | {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "llama-3.2-1b": _LLAMA3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
        "rope_parameters": _llama3_rope(32.0),
    },
    "llama-3.1-8b": _LLAMA3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "rope_parameters": _llama3_rope(8.0),
    },
}

SIZES: tuple[Size, ...] = get_args(Size)


def llama_config(size: Size, attention_dropout: float | None = None) -> LlamaConfig:
    """The configuration of a named size; the Llama 3 ones carry the published hyper-parameters.

    Args:
        size: one of `SIZES`.
        attention_dropout: probability, in place of the one of the size.
    """
    values = dict(_SIZES[size])
    if attention_dropout is not None:
        values["attention_dropout"] = attention_dropout
    return LlamaConfig(use_cache=False, **values)
