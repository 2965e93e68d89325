"""The package inside transformers models made from small random configs, held against hand-written hooks."""

import copy
import inspect
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks._reference import hooked, same_output, step  # noqa: E402
from benchmarks.transformers_blocks import CASES, CHECKPOINTING, LAMBD, Case, faults, generated, set_checkpointing  # noqa: E402

import gradsurgery as gs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers announces deprecations of its own
BY_NAME = {case.name: case for case in CASES}


def _id(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("mode", list(CHECKPOINTING))
@pytest.mark.parametrize("case", CASES, ids=_id)
def test_a_middle_block(case: Case, mode: str) -> None:
    assert faults(case, mode) == []


@pytest.mark.parametrize("mode", list(CHECKPOINTING))
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("BertForSequenceClassification", "bert.encoder.layer.2.attention.self"),
        ("LlamaForCausalLM", "model.layers.2.self_attn"),
        ("LlamaForCausalLM", "model.layers.1.mlp.act_fn"),
        ("T5ForConditionalGeneration", "decoder.block.1.layer.1"),
        ("MixtralForCausalLM", "model.layers.1.mlp"),
        ("MambaForCausalLM", "backbone.layers.2.mixer"),
        ("Wav2Vec2ForCTC", "wav2vec2.feature_extractor"),
        ("CLIPModel", "text_model"),
    ],
)
def test_places_inside_and_around_blocks(name: str, place: str, mode: str) -> None:
    """Tuples with None in them, a module that gives a ModelOutput, activations kept in a module."""
    assert faults(BY_NAME[name], mode, place) == []


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_the_root_itself(name: str) -> None:
    """The output keeps its class; ``generate`` and ``Trainer`` read the signature of the root's forward."""
    case = BY_NAME[name]
    assert faults(case, "off", "") == []
    model = gs.insert_grl(case.build().eval(), "")
    assert type(case.call()(model)[0]) is type(case.call()(case.build().eval())[0])


def test_checkpointing_switched_on_after_the_insertion() -> None:
    case = BY_NAME["LlamaForCausalLM"]
    subject, reference = case.build(), hooked(case.build(), case.block)
    gs.insert_grl(subject, case.block, lambd=LAMBD)
    for mode in CHECKPOINTING:
        got, right = (
            step(set_checkpointing(model, mode), case.call(), training=True) for model in (subject, reference)
        )
        assert same_output(got.output, right.output)
        assert got.gradient_faults(right) == []


@pytest.mark.parametrize("mode", ["on", "reentrant"])
def test_an_operated_block_is_still_checkpointed(mode: str) -> None:
    """The forward of each class of layers is wrapped, and only the outermost wrapper checkpoints."""
    model = set_checkpointing(BY_NAME["LlamaForCausalLM"].build(), mode).train()
    gs.insert_grl(model, "model.layers.2")
    calls = []
    model.model.layers[2].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    step(model, BY_NAME["LlamaForCausalLM"].call(), training=True)
    assert len(calls) == 2


def test_undo_and_saving(tmp_path: Path) -> None:
    """``save_pretrained`` of an operated model is a plain checkpoint, and ``remove`` gives back every class."""
    case = BY_NAME["BertForSequenceClassification"]
    model = case.build().eval()
    classes = [type(module) for module in model.modules()]
    signature = inspect.signature(model.forward)
    expected = step(copy.deepcopy(model), case.call(), training=False)
    gs.insert_grl(model, case.block)
    gs.insert_grl(model, "")
    model.save_pretrained(tmp_path)
    loaded = type(case.build()).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert loaded.config.architectures == [case.name]
    gs.remove(model)
    assert [type(module) for module in model.modules()] == classes
    assert inspect.signature(model.forward) == signature
    for one in (model, loaded):
        got = step(one, case.call(), training=False)
        assert same_output(got.output, expected.output)
        assert got.gradient_faults(expected) == []


def test_generation_with_the_cache_through_an_operated_attention() -> None:
    case = BY_NAME["Qwen3ForCausalLM"]
    model = case.build()
    expected = generated(copy.deepcopy(model), case)
    for layer in range(4):
        gs.insert_grl(model, f"model.layers.{layer}.self_attn")
    assert same_output(generated(model, case), expected)
    assert all(isinstance(value, torch.Tensor | tuple) for value in expected)
