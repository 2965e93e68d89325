"""docs/errors.md: what it calls a symptom is what the library says, in the error under which it stands."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurgery as gs

DOCS = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
SYMPTOMS = [
    (section.split("`")[1], symptom)
    for section in DOCS.split("\n## ")[1:]
    for symptom in re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x.abs()
        if self.training:
            x = x * 2
        return x + 1


class Indices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(1)


def without_source() -> nn.Module:
    namespace: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Module):\n    def forward(self, x):\n        return x + 1", namespace)
    return namespace["Typed"]()


def model() -> nn.Sequential:
    return nn.Sequential(Block(), nn.MultiheadAttention(2, 1), nn.ReLU())


def grl(*args: Any, on: Any = None, **kwargs: Any) -> Callable[[], object]:
    return lambda: gs.insert_grl(model() if on is None else on, *args, **kwargs)


def not_run() -> None:
    block = gs.insert_grl(Block(), ":mul")
    block.eval()(torch.ones(1, 2))


CAUSES: dict[str, Callable[[], object]] = {
    "the model has no module": grl("3"),
    "no module that runs": grl("x.*"),
    "names the op": grl("0:sub"),
    "names a module that never runs": grl("1.out_proj"),
    "was to name exactly": grl("*", expect=2),
    "nothing was inserted": lambda: gs.remove(model()),
    "asked for an op inside": lambda: gs.insert_grl(without_source(), ":add"),
    "nobody reads the value": grl("0:abs"),
    "so the operator would have been passed by": not_run,
    "during the run on the example the model raised": grl("2", example=torch.ones(1, 3)),
    "There is a negative number": grl("0", -1.0),
    "There is a number that is not finite": grl("0", float("nan")),
    "There is a tensor that requires grad": grl("0", torch.ones(1, requires_grad=True)),
    "holds no floating-point or complex tensor": lambda: gs.insert_grl(Indices(), "")(torch.ones(1, 2)),
    "Give an fn that keeps the shape": lambda: gs.straight_through(torch.ones(2), lambda x: x[:1]),
    "is wrapped in nn.DataParallel": grl("0", on=nn.DataParallel(model())),
    "Give an nn.Module": grl("0", on={"a": 1}),
}


@pytest.mark.parametrize(("error", "symptom"), SYMPTOMS)
def test_symptom_is_what_is_said(error: str, symptom: str) -> None:
    with pytest.raises(gs.SurgeryError, match=re.escape(symptom)) as caught:
        CAUSES[symptom]()
    assert type(caught.value).__name__ == error
