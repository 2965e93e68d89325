"""Twelve transformers classes from small random configs, a reversal at a middle block, against a hand-written hook.

    python -m benchmarks.transformers_blocks

Each with gradient checkpointing off, on and reentrant. One line per class and mode; nothing is downloaded.
"""

import copy
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import gradsurgery as gs

from ._reference import Call, enliven, hooked, same_output, seed_all, step

CHECKPOINTING: dict[str, dict[str, bool] | None] = {
    "off": None,
    "on": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}
LAMBD = 0.5

_TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
_BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
_END = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One class of transformers: how to make it, what to feed it, and the block in its middle."""

    name: str
    config: Callable[[], Any]
    inputs: Callable[[torch.Generator], dict[str, Tensor]]
    block: str
    input_gradient: bool = True  # Wav2Vec2 sets ``requires_grad`` on its input by itself, and takes only one without

    @property
    def generates(self) -> bool:
        return bool(getattr(transformers, self.name).can_generate())

    def build(self) -> nn.Module:
        """The model with random weights, dropout left as the config has it."""
        seed_all(0)
        config = self.config()
        config._attn_implementation = "eager"
        return enliven(getattr(transformers, self.name)(config))

    def call(self) -> Call:
        """A forward on one seeded batch with every hidden state asked for; floating inputs want a gradient."""

        def call(model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
            inputs = self.inputs(torch.Generator().manual_seed(5))
            wanted = [name for name, value in inputs.items() if self.input_gradient and value.is_floating_point()]
            leaves = {name: inputs[name].requires_grad_() for name in wanted}
            given = {name: value.clone() for name, value in inputs.items()}
            if self.generates:
                given["use_cache"] = False  # type: ignore[assignment]
            return model(**given, output_hidden_states=True), leaves

        return call


def _ids(generator: torch.Generator, length: int = 7) -> Tensor:
    return torch.randint(3, 99, (2, length), generator=generator)


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _ids(generator)}


def _pair(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _ids(generator), "decoder_input_ids": _ids(generator, 5)}


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}


CASES = [
    Case("BertForSequenceClassification", lambda: transformers.BertConfig(**_TEXT), _text, "bert.encoder.layer.2"),
    Case(
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**_TEXT, **_END, num_key_value_heads=2, attention_dropout=0.1),
        _text,
        "model.layers.2",
    ),
    Case(
        "GPT2LMHeadModel",
        lambda: transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=4, n_head=4, **_END),
        _text,
        "transformer.h.2",
    ),
    Case(
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=4,
            num_decoder_layers=4,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _pair,
        "encoder.block.2",
    ),
    Case(
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(
            **{k: v for k, v in _TEXT.items() if k != "vocab_size"},
            image_size=16,
            patch_size=4,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        ),
        _image,
        "vit.layers.2",
    ),
    Case(
        "CLIPModel",
        lambda: transformers.CLIPConfig(
            text_config=_TEXT | {"projection_dim": 16, "eos_token_id": 98, "max_position_embeddings": 16},
            vision_config={k: v for k, v in _TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4},
            projection_dim=16,
        ),
        lambda generator: _text(generator) | _image(generator),
        "vision_model.encoder.layers.2",
    ),
    Case(
        "WhisperForConditionalGeneration",
        lambda: transformers.WhisperConfig(
            **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=20,
            decoder_start_token_id=1,
            begin_suppress_tokens=None,
            suppress_tokens=None,
            **_END,
        ),
        lambda generator: {
            "input_features": torch.randn(2, 8, 40, generator=generator),
            "decoder_input_ids": _ids(generator, 5),
        },
        "model.decoder.layers.2",
    ),
    Case(
        "Wav2Vec2ForCTC",
        lambda: transformers.Wav2Vec2Config(
            **_TEXT,
            conv_dim=(16, 16),
            conv_kernel=(10, 3),
            conv_stride=(5, 2),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            apply_spec_augment=False,
            layerdrop=0.0,
        ),
        lambda generator: {"input_values": torch.randn(2, 400, generator=generator)},
        "wav2vec2.encoder.layers.2",
        input_gradient=False,
    ),
    Case(
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(
            **_TEXT,
            **_END,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_jitter_noise=0.1,
        ),
        _text,
        "model.layers.2",
    ),
    Case(
        "MambaForCausalLM",
        lambda: transformers.MambaConfig(vocab_size=99, hidden_size=32, state_size=4, num_hidden_layers=4, **_END),
        _text,
        "backbone.layers.2",
    ),
    Case(
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(**_BART, decoder_start_token_id=1, **_END),
        _pair,
        "model.encoder.layers.2",
    ),
    Case(
        "Qwen3ForCausalLM",
        lambda: transformers.Qwen3Config(**_TEXT, **_END, head_dim=8, num_key_value_heads=2),
        _text,
        "model.layers.2",
    ),
]


def set_checkpointing(model: nn.Module, mode: str) -> nn.Module:
    """``model`` with gradient checkpointing in one of the modes of ``CHECKPOINTING``."""
    options = CHECKPOINTING[mode]
    if options is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def signatures(model: nn.Module, block: str) -> list[inspect.Signature]:
    """What Trainer, ``generate`` and readers of either see of the forwards."""
    place = model.get_submodule(block)
    forwards = (model.forward, place.forward, type(model).forward, type(place).forward)
    return [inspect.signature(forward) for forward in forwards]


def generated(model: nn.Module, case: Case) -> list[Any]:
    """Greedy and sampled continuations with the cache on, seeded."""
    results = []
    inputs = case.inputs(torch.Generator().manual_seed(5))
    model.eval()
    for sampled in (False, True):
        seed_all(3)
        options = {"do_sample": sampled, "max_new_tokens": 6, "output_scores": True, "return_dict_in_generate": True}
        with torch.no_grad():
            output = model.generate(**inputs, **options)
        results += [output.sequences, output.scores]
    return results


def faults(case: Case, mode: str, block: str | None = None) -> list[str]:
    """The promises that a reversal at the block breaks, with checkpointing in this mode."""
    block = case.block if block is None else block
    pristine = set_checkpointing(case.build(), mode)
    found = []
    plain, subject, reference = (copy.deepcopy(pristine) for _ in range(3))
    hooked(reference, block)
    before = signatures(subject, block)
    gs.insert_grl(subject, block, lambd=LAMBD)
    if signatures(subject, block) != before:
        found.append("a signature changed")
    for training in (True, False):
        name = "train" if training else "eval"
        right, expected = step(reference, case.call(), training), step(plain, case.call(), training)
        got = step(subject, case.call(), training)
        if not same_output(got.output, expected.output):
            found.append(f"{name}: forward differs")
        if not right.gradient_faults(expected):
            found.append(f"{name}: vacuous")
        if wrong := got.gradient_faults(right):
            found.append(f"{name}: {len(wrong)} gradients differ, {wrong[:3]}")
    if case.generates and not same_output(generated(subject, case), generated(plain, case)):
        found.append("generate differs")
    return found


def main() -> int:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    exact = 0
    for case in CASES:
        results = {mode: faults(case, mode) for mode in CHECKPOINTING}
        exact += not any(results.values())
        print(
            f"{case.name:34}",
            *(f"{mode} {found or 'exact'}" for mode, found in results.items()),
            sep="  ",
        )
    print(f"{exact} of {len(CASES)} classes exact, checkpointing {', '.join(CHECKPOINTING)}")
    return 0 if exact == len(CASES) else 1


if __name__ == "__main__":
    sys.exit(main())
