"""How places are named: the grammar, and every other form that ``at`` takes."""

import re

import pytest
import timm
import torch
import torchvision
from core_helpers import Net, factors, seeded, step
from torch import nn

import gradsurgery as gs
from gradsurgery.address import ALL_CALLS, Address, Where, matches, parse

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("text", "path", "where"),
    [
        ("", "", Where("output")),
        ("layer3", "layer3", Where("output")),
        ("  layer3.0  ", "layer3.0", Where("output")),
        ("lstm[0]", "lstm", Where("output", (0,))),
        ("lstm[-1]", "lstm", Where("output", (-1,))),
        ("head['out']", "head", Where("output", ("out",))),
        ('head["out"]', "head", Where("output", ("out",))),
        ("x[0]['a'][2]", "x", Where("output", (0, "a", 2))),
        ("[1]", "", Where("output", (1,))),
        ("a:add", "a", Where("op", (), "add")),
        (":flatten", "", Where("op", (), "flatten")),
        ("a.0:relu@1", "a.0", Where("op", (), "relu", 1)),
        ("a:relu@*", "a", Where("op", (), "relu", ALL_CALLS)),
        ("a:split@0[1]", "a", Where("op", (1,), "split", 0)),
        ("blocks.*.attn", "blocks.*.attn", Where("output")),
        ("**.bn1", "**.bn1", Where("output")),
        ("head['a.b']", "head", Where("output", ("a.b",))),
        ("head['a:b']", "head", Where("output", ("a:b",))),
        ("head['a->b']", "head", Where("output", ("a->b",))),
    ],
)
def test_grammar(text: str, path: str, where: Where) -> None:
    asked = parse(text)
    assert asked == Address(path, where)
    assert parse(str(asked)) == asked  # what is printed can be read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a..b", "empty name"),
        (".a", "empty name"),
        ("a.", "empty name"),
        ("a[b]", "brackets"),
        ("a[0", "brackets"),
        ("a]0[", "brackets"),
        ("a[0].b", "brackets"),
        ("a:", "names no op"),
        ("a:b@", "names no op"),
        ("a:b@x", "names no op"),
        ("a:b@-1", "names no op"),
        ("a:b c", "names no op"),
        ("a -> b -> c", "edge"),
    ],
)
def test_no_address(text: str, words: str) -> None:
    with pytest.raises(gs.AddressError, match=words) as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_an_op_has_no_input_side() -> None:
    with pytest.raises(gs.AddressError, match="no input side"):
        parse("a:add", "input")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("**", ["", "a", "a.b.c"], []),
        ("*", ["a", "0"], ["", "a.b"]),
        ("a.*", ["a.0", "a.bn"], ["a", "a.0.1", "b.0"]),
        ("**.bn1", ["bn1", "l.bn1", "l.0.bn1"], ["bn10", "bn1.x"]),
        ("l?", ["l1", "l2"], ["l", "l10"]),
        ("l*.*.c", ["l1.0.c", "layer.x.c"], ["l1.c", "l1.0.1.c"]),
        ("a.**.c", ["a.c", "a.b.c", "a.b.b.c"], ["c", "a.b"]),
        ("**.a.**", ["a", "x.a.y.z"], ["x"]),
    ],
)
def test_globs(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in yes if not matches(pattern, path)] == []
    assert [path for path in no if matches(pattern, path)] == []


def paths(model: nn.Module) -> list[str]:
    return [operation.address for operation in gs.operations(model)]


NET = seeded()
FORMS = [
    ("path", "stem", ["stem"]),
    ("root", "", [""]),
    ("glob", "blocks.*", ["blocks.0", "blocks.1"]),
    ("deep glob", "**.norm", ["blocks.0.norm", "blocks.1.norm"]),
    ("type", nn.LayerNorm, ["blocks.0.norm", "blocks.1.norm"]),
    ("base type", nn.modules.linear.Linear, ["stem", "blocks.0.fc", "blocks.1.fc", "head"]),
    ("predicate", lambda name, module: name.endswith("fc"), ["blocks.0.fc", "blocks.1.fc"]),
    ("predicate on the module", lambda name, module: getattr(module, "out_features", 0) == 2, ["head"]),
    ("pattern", re.compile(r"blocks\.\d"), ["blocks.0", "blocks.1"]),
    (
        "pattern matches whole paths",
        re.compile(r"blo.*"),
        [f"blocks.{k}{s}" for k in (0, 1) for s in ("", ".fc", ".norm", ".act")],
    ),
    ("list", ["head", "stem"], ["stem", "head"]),
    ("nested list", [["stem", ("head",)], [nn.LayerNorm]], ["stem", "blocks.0.norm", "blocks.1.norm", "head"]),
    ("each place once", ["stem", "st*", re.compile("stem"), "stem"], ["stem"]),
]


@pytest.mark.parametrize(("at", "there"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
def test_forms(at: object, there: list[str]) -> None:
    model = seeded()
    gs.insert_grl(model, at, 0.5, expect=len(there) if at is not FORMS[9][1] else None)
    listed = paths(model)
    if isinstance(at, re.Pattern) and at.pattern == "blo.*":
        assert set(listed) in ({*there}, {*there, "blocks"} - {"blocks.1"})  # blocks and blocks.1 are one place
    else:
        assert listed == there
    step(model, X)
    assert all(operation.runs for operation in gs.operations(model))
    gs.remove(model)
    assert paths(model) == []


def test_module_object() -> None:
    model = seeded()
    gs.insert_grl(model, [model.blocks[0], model.head])
    assert paths(model) == ["blocks.0", "head"]
    with pytest.raises(gs.AddressError, match="no part of this model"):
        gs.insert_grl(model, seeded().head)


def test_a_pattern_is_matched_against_whole_paths() -> None:
    with pytest.raises(gs.AddressError, match="whole paths"):
        gs.insert_grl(seeded(), re.compile("block"))


def test_a_type_does_not_match_what_never_runs() -> None:
    class WithLists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
            self.attention = nn.MultiheadAttention(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.attention(x, x, x)[0]

    model = WithLists()
    assert [site.address for site in gs.sites(model)] == ["", "layers.0", "layers.1", "attention"]
    gs.insert_grl(model, "**")
    assert "layers" not in paths(model)
    assert "attention.out_proj" not in paths(model)
    step(model, X)
    assert all(operation.runs for operation in gs.operations(model))


ELEMENTS = [
    ("lstm[0]", {"lstm": -0.5}, {"lstm": 1.0}),
    ("lstm[1][0]", {"lstm": 1.0}, {"lstm": -0.5}),
    ("lstm[-1][-2]", {"lstm": 1.0}, {"lstm": -0.5}),
    ("lstm[1]", {"lstm": 1.0}, {"lstm": -0.5}),
    ("lstm", {"lstm": -0.5}, {"lstm": -0.5}),
]


class Recurrent(nn.Module):
    """The loss sees the sequence, or the last hidden state."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        self.which = which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, _) = self.lstm(x)
        return y if self.which == "sequence" else h


@pytest.mark.parametrize(("at", "sequence", "hidden"), ELEMENTS)
def test_elements(at: str, sequence: dict[str, float], hidden: dict[str, float]) -> None:
    for which, right in (("sequence", sequence), ("hidden", hidden)):
        plain, model = (seeded(lambda which=which: Recurrent(which)) for _ in range(2))
        gs.insert_grl(model, at, 0.5)
        assert factors(plain, model, torch.randn(2, 5, 3)) == right
        assert paths(model) == [at]


@pytest.mark.parametrize(
    ("at", "words"), [("lstm[5]", r"\[0\], \[1\]"), ("lstm['h']", r"\[0\], \[1\]"), ("lstm[0][0]", "a tensor")]
)
def test_elements_that_are_not_there(at: str, words: str) -> None:
    model = seeded(lambda: Recurrent("sequence"))
    gs.insert_grl(model, at)
    with pytest.raises(gs.OperatorError, match=words):
        model(torch.randn(2, 5, 3))


def test_expect() -> None:
    model = seeded()
    with pytest.raises(gs.AddressError, match=r"exactly 3 places; it names 2: 'blocks.0.norm', 'blocks.1.norm'"):
        gs.insert_grl(model, nn.LayerNorm, expect=3)
    with pytest.raises(gs.AddressError, match="exactly 0 places"):
        gs.insert_grl(model, "stem", expect=0)
    assert paths(model) == []
    assert paths(gs.insert_grl(model, nn.LayerNorm, expect=2)) == ["blocks.0.norm", "blocks.1.norm"]


def test_a_number_in_a_path_is_a_name() -> None:
    model = seeded()
    gs.insert_grl(model, "blocks.0.fc")
    assert paths(model) == ["blocks.0.fc"]
    with pytest.raises(gs.AddressError):
        gs.insert_grl(model, "blocks.-1")


# Models, an input, and how often a listed place may stay idle in one forward.
LISTED = {
    "small": (Net, (5, 3)),
    "resnet18": (lambda: timm.create_model("resnet18"), (1, 3, 64, 64)),
    "vit_tiny": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2), (1, 3, 32, 32)),
    "torchvision resnet18": (torchvision.models.resnet18, (1, 3, 64, 64)),
}


@pytest.mark.parametrize("name", LISTED)
def test_sites_print_the_strings_that_work(name: str) -> None:
    make, shape = LISTED[name]
    model = seeded(make).eval()
    x = torch.randn(shape)
    listed = gs.sites(model)
    assert len({site.address for site in listed}) == len(listed)
    assert {site.kind for site in listed} == {"module"}
    ran = set()
    with torch.no_grad():
        for site in listed:
            gs.insert_scale_gradient(model, site.address, 0.5, expect=1)
        y = model(x)
        ran = {operation.address for operation in gs.operations(model) if operation.runs}
        assert len(gs.operations(model)) == len(listed)
        for site in listed:
            # A Sequential and its last child are one place, and the first removal takes both operators away.
            there = {operation.address for operation in gs.operations(model)}
            if site.address in there:
                gs.remove(model, site.address)
        gone = {operation.address for operation in gs.operations(model)}
        assert gone == set()
        assert gs.operations(model) == []
        assert torch.equal(model(x), y)
    assert len(ran) > 0.8 * len(listed)
    for site in listed:
        assert repr(site.address) in str(listed)
        assert str(site).startswith(repr(site.address))
        assert site.op == type(model.get_submodule(site.address)).__name__


def test_sites_of_a_pattern() -> None:
    model = seeded()
    assert [site.address for site in gs.sites(model, "blocks.*")] == ["blocks.0", "blocks.1"]
    assert list(gs.sites(model, "nothing")) == []
    assert gs.sites(model, "stem")[0].source.rpartition(":")[0].endswith("linear.py")


def test_sites_are_the_same_after_surgery() -> None:
    model = seeded()
    before = gs.sites(model)
    gs.insert_grl(model, "**")
    gs.insert_transform(model, "blocks.0", nn.Linear(4, 4))
    assert gs.sites(model) == before
