"""Tools that replace modules after the surgery: an operator that went with a module is listed as lost."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from core_helpers import assert_untouched, snapshot
from timm.layers import convert_splitbn_model, freeze_batch_norm_2d
from torch import Tensor, nn

import gradsurgery as gs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.bn = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn(self.conv(x)).mean((2, 3)))


def rows(model: nn.Module) -> list[tuple[str, str | None]]:
    return [(operation.address, operation.lost) for operation in gs.operations(model)]


def assigned(model: Any) -> nn.Module:
    model.head = nn.Identity()
    return model


TOOLS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "SyncBatchNorm": ("bn", nn.SyncBatchNorm.convert_sync_batchnorm),
    "freeze_batch_norm_2d": ("bn", freeze_batch_norm_2d),
    "convert_splitbn_model": ("bn", convert_splitbn_model),
    "an assignment": ("head", assigned),
}


@pytest.mark.parametrize("name", TOOLS)
def test_a_replaced_module_loses_its_operator_and_the_model_says_so(name: str) -> None:
    at, tool = TOOLS[name]
    model = gs.insert_grl(Net(), [at, "conv"], 0.5)
    assert rows(model) == [(address, None) for address in ("conv", at)]
    model = tool(model)
    assert rows(model) == [("conv", None), (at, "GradientReversal")]
    with pytest.raises(gs.VerificationError, match=f"the GradientReversal at '{at}' was inserted and is lost"):
        gs.verify(model, torch.randn(2, 1, 3, 3))
    lost = gs.operations(model)[1]
    assert lost.operator is None
    assert "lost: the GradientReversal went with the module" in str(gs.operations(model))
    assert "lost" in repr(lost)
    for way in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        assert rows(way(model)) == rows(model)
    gs.remove(model, at)
    assert rows(model) == [("conv", None)]
    gs.remove(model)
    assert rows(model) == []


def test_inserting_again_after_the_loss() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(gs.insert_grl(Net(), "bn", 0.5))
    gs.insert_grl(model, "bn", 0.25)
    assert rows(model) == [("bn", None)]
    gs.remove(model, "bn")
    assert rows(model) == []


def test_reset_classifier() -> None:
    model = timm.create_model("resnet18")
    gs.insert_stop_gradient(model, "fc", side="input")
    model.reset_classifier(3)
    assert rows(model) == [("fc", "StopGradient")]
    with pytest.raises(gs.AddressError):
        gs.remove(model, "layer1")
    assert gs.remove(model) is model
    assert rows(model) == []


def test_an_adapter_that_takes_the_operated_layer_inside() -> None:
    """As PEFT does: only the base layer is still reversed, the adapter beside it is not."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.lora = base, nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.lora(x)

    model: Any = gs.insert_grl(Net(), "head", 0.5)
    model.head = Lora(model.head)
    assert rows(model) == [("head.base_layer", None), ("head", "GradientReversal")]


def test_nothing_is_lost_by_removal_copies_twins_or_another_root() -> None:
    model: Any = nn.Sequential(Net(), Net())
    before = snapshot(model)
    gs.insert_grl(model, ["0.bn", "1.bn", "1"], 0.5)
    state = list(model.state_dict())
    twin = gs.insert_grl(model, "0.head", inplace=False)
    assert rows(twin) == [("0.bn", None), ("0.head", None), ("1", None), ("1.bn", None)]
    gs.remove(model[0], "bn")
    assert rows(model) == [("1", None), ("1.bn", None)]
    assert rows(nn.Sequential(model)) == [("0.1", None), ("0.1.bn", None)]
    assert rows(copy.deepcopy(model)) == rows(model)
    with gs.disabled(model):
        assert rows(model) == [("1", None), ("1.bn", None)]
    gs.remove(model)
    assert rows(model) == []
    assert_untouched(before, model)
    assert list(model.state_dict()) == state


def test_a_failed_insertion_is_not_remembered() -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(gs.SurgeryError):
        gs.insert_grl(model, ["bn", "nowhere"])
    assert_untouched(before, model)


def test_a_schedule_passes_over_what_is_lost() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(gs.insert_grl(Net(), ["bn", "conv"], 0.5))
    gs.GRLScheduler(model, 10).step()
    assert gs.operations(model)[0].operator.lambd > 0
