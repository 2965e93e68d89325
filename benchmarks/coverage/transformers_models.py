"""Model classes of transformers from small random configs, so that each runs in a second and nothing is downloaded."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .building import Subject, Trial
from .transformers_table import AUDIO, DECODERS, ENCODER_DECODERS, ENCODERS, EXPERTS, MULTIMODAL, STATE_SPACE, VISION

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embedding_size", "embed_dim", "projection_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "d_ff", "ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    "vocab_size": 99,
    "moe_intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "layerdrop": 0.0,
}
"""What a small config has, wherever its class knows the name."""


def small(kind: Any, **given: Any) -> Any:
    """A config of this class with small sizes; ``given`` are those that the class needs otherwise."""
    known = kind().to_dict()
    # Some classes have a list, one size a stage, where most have one number.
    sizes = {name: size for name, size in SIZES.items() if isinstance(known.get(name), int | float)}
    sizes |= {"vocab_size": SIZES["vocab_size"]} if "vocab_size" in known else {}
    parts = getattr(kind, "sub_configs", {})
    for name, part in parts.items():
        if name in known and name not in given and hasattr(part, "model_type"):
            given[name] = small(part).to_dict()
        elif isinstance(given.get(name), dict) and hasattr(part, "model_type"):
            given[name] = small(part, **given[name]).to_dict()
    return kind(**{**sizes, **given})


def _inputs(kind: str) -> Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]:
    def inputs(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(5)

        def ids(length: int) -> Tensor:
            return torch.randint(3, 90, (2, length), generator=generator).to(device)

        def noise(*shape: int) -> Tensor:
            return torch.randn(2, *shape, generator=generator).to(device)

        made: dict[str, Callable[[], dict[str, Any]]] = {
            "text": lambda: {"input_ids": ids(16)},
            "pair": lambda: {"input_ids": ids(16), "decoder_input_ids": ids(8)},
            "image": lambda: {"pixel_values": noise(3, 32, 32)},
            "image64": lambda: {"pixel_values": noise(3, 64, 64)},
            "image and text": lambda: {"pixel_values": noise(3, 32, 32), "input_ids": ids(8)},
            "video": lambda: {"pixel_values": noise(4, 3, 32, 32)},
            "waveform": lambda: {"input_values": noise(1600)},
            "channel": lambda: {"input_values": noise(1, 1600)},
            "features": lambda: {"input_features": noise(8, 40), "decoder_input_ids": ids(6)},
            "frames": lambda: {"input_features": noise(40, 8)},
            "frames and text": lambda: {"input_features": noise(40, 8), "decoder_input_ids": ids(6)},
            "spectrogram": lambda: {"input_values": noise(64, 16)},
            "series": lambda: {"past_values": noise(64, 2)},
        }
        return (), made[kind]()

    return inputs


def _trials(name: str, kind: str, given: dict[str, Any]) -> Iterator[Trial]:
    def build() -> nn.Module:
        cls = getattr(transformers, name)
        config = small(cls.config_class, **given)
        config._attn_implementation = "eager"
        if getattr(config, "use_cache", None):
            config.use_cache = False
        return cls(config)

    inputs = _inputs(kind)
    yield Trial(kind, build, inputs, inputs, input_gradient=kind != "waveform")


def transformers_subjects() -> list[Subject]:
    """One model class of each architecture in the table."""
    tables = {
        "encoder": ENCODERS,
        "decoder": DECODERS,
        "encoder-decoder": ENCODER_DECODERS,
        "mixture of experts": EXPERTS,
        "state space": STATE_SPACE,
        "vision": VISION,
        "audio": AUDIO,
        "multimodal": MULTIMODAL,
    }
    return [
        Subject("transformers", name, group, functools.partial(_trials, name, kind, given))
        for group, table in tables.items()
        for name, kind, given in table
    ]
