"""Files as patients of the command line: what each is told to be, and that none runs code unless it is trusted."""

import collections
import contextlib
import importlib
import io
import json
import os
import pickle
import sys
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurgery as gs
from gradsurgery.cli.files import load_file
from gradsurgery.cli.program_file import refuse_code


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor, more: dict[str, Tensor] | None = None) -> dict[str, Any]:
        y = self.drop(self.linear(self.norm(x))) * self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])
        with torch.no_grad():
            scale = y.abs().mean()
        y = y.view(x.shape[0], 2, 2) / scale
        return {"y": y, "pair": (y.sum(), [y])}


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def exported(model: nn.Module | None = None, *inputs: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model or Net(), inputs or (X,), **options), buffer)
    return buffer.getvalue()


def changed(content: bytes, entry: str, change: Callable[[bytes], bytes]) -> bytes:
    """The same archive with one entry changed, or added."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        root = names[0].partition("/")[0]
        for name in names:
            data = old.read(name)
            new.writestr(name, change(data) if name == f"{root}/{entry}" else data)
        if f"{root}/{entry}" not in names:
            new.writestr(f"{root}/{entry}", change(b""))
    return out.getvalue()


class Mkdir:
    """What unpickles as a directory that should not be."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("pwned",)


def edited(edit: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        value = json.loads(data)
        edit(value)
        return json.dumps(value).encode()

    return change


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_pickled_weight(data: Any) -> None:
    next(iter(data["config"].values()))["use_pickle"] = True


def with_opaque_constant(data: Any) -> None:
    data["config"]["bad"] = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}


def with_expression(data: Any) -> None:
    sizes = next(iter(data["graph_module"]["graph"]["tensor_values"].values()))["sizes"]
    sizes[0] = {"as_expr": {"expr_str": "__import__('os').mkdir('pwned')", "hint": {"as_int": 3}}}


def with_guard(data: Any) -> None:
    data["guards_code"] = ["__import__('os').mkdir('pwned') is None"]


def with_import(data: Any) -> None:
    signature = next(c for c in data["graph_module"]["module_call_graph"] if c["signature"])["signature"]
    tree = {
        "type": "collections.defaultdict",
        "context": {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []},
        "children_spec": [],
    }
    signature["in_spec"] = json.dumps([1, tree])


def with_target(data: Any) -> None:
    data["graph_module"]["graph"]["nodes"][0]["target"] = "torch.hub.load"


def with_argument_names(data: Any) -> None:
    signature = next(c for c in data["graph_module"]["module_call_graph"] if c["signature"])["signature"]
    signature["forward_arg_names"] = ["x=__import__('os').mkdir('pwned')"]


ATTACKS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a weight": ("data/weights/model_weights_config.json", edited(with_pickled_weight), "as a pickle"),
    "an opaque object": ("data/constants/model_constants_config.json", edited(with_opaque_constant), "as a pickle"),
    "its entry": ("data/constants/opaque_obj_0", lambda _: pickle.dumps(Mkdir()), "the entry 'data/constants/opaque"),
    "the inputs": ("data/sample_inputs/model.pt", lambda _: saved(((Mkdir(),), {})), "an example of the inputs"),
    "a size": ("models/model.json", edited(with_expression), "'expr_str': "),
    "a guard": ("models/model.json", edited(with_guard), "'guards_code': "),
    "a tree": ("models/model.json", edited(with_import), "'in_spec': "),
    "an operator": ("models/model.json", edited(with_target), "'target': 'torch.hub.load'"),
    "the signature": ("models/model.json", edited(with_argument_names), "'forward_arg_names': "),
    "a library": ("data/aotinductor/model/model.so", lambda _: b"\x7fELF", "the entry 'data/aotinductor"),
    "an older format": ("serialized_exported_program.json", lambda _: b"{}", "the entry 'serialized_exported"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_that_would_run_code_is_refused(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry, change, said = ATTACKS[attack]
    Path("bad.pt2").write_bytes(changed(exported(), entry, change))
    with pytest.raises(gs.SurgeryError, match=f"holds .*{said}.*--trust"):
        load_file("bad.pt2", trust=False)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("attack", ["the inputs", "a size", "a guard"])
def test_torch_itself_runs_it(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the refusals above are of something: with --trust the same files do what they came for."""
    monkeypatch.chdir(tmp_path)
    entry, change, _said = ATTACKS[attack]
    Path("bad.pt2").write_bytes(changed(exported(), entry, change))
    with contextlib.suppress(gs.SurgeryError):  # what was made is not what torch expected
        load_file("bad.pt2", trust=True)[0](X)
    assert Path("pwned").exists()


def test_the_older_format_is_not_fallen_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export.load goes on to unpickle where the archive raises, here for a version that it does not know."""
    monkeypatch.chdir(tmp_path)
    content = changed(exported(), "archive_version", lambda _: b"99")
    Path("bad.pt2").write_bytes(content)
    with pytest.raises(gs.SurgeryError, match=r"cannot be read with torch .* version 99"):
        load_file("bad.pt2", trust=False)


class Named(nn.Module):
    def forward(self, x: Tensor, *, pair: tuple[Tensor, Tensor], by_name: dict[str, Tensor]) -> list[Tensor]:
        if by_name["a"].shape[1] > 2:
            x = x + pair[0]
        return [x.reshape(x.shape[0] * 2, -1), torch.einsum("ij,kj->ik", x, pair[1])]


batch = torch.export.Dim("batch", min=2)
NAMED = {"pair": (X, X), "by_name": {"a": X}}
PROGRAMS: dict[str, Callable[[], bytes]] = {
    "training": exported,
    "evaluation": lambda: exported(Net().eval()),
    "any batch": lambda: exported(Net().eval(), X, dynamic_shapes={"x": {0: batch}}),
    "automatic sizes": lambda: exported(Net().eval(), X, dynamic_shapes={"x": (torch.export.Dim.AUTO,) * 2}),
    "named inputs": lambda: exported(Named(), X, kwargs=NAMED),
    "operated": lambda: exported(gs.insert_transform(gs.insert_grl(Net(), "norm"), "linear", torch.round)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_plain_operators_is_read(name: str, tmp_path: Path) -> None:
    content = PROGRAMS[name]()
    (tmp_path / "net.pt2").write_bytes(content)
    model, inputs = load_file(str(tmp_path / "net.pt2"), trust=False)
    args, kwargs = inputs
    torch.manual_seed(0)
    found = model(*args, **kwargs)
    torch.manual_seed(0)
    assert str(found) == str(torch.export.load(io.BytesIO(content)).module()(*args, **kwargs))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "().__class__",
        "s0.__class__",
        "open('x')",
        "exit()",
        "[s0 for s0 in (1,)]",
        "(lambda: 0)()",
        "f'{s0}'",
        "Symbol('a b')",
        "Symbol(open)",
        "L['x'].backward()",
        "s0 if s1 else s2",
        "s0 := 1",
        "s0; s1",
        "",
        "eval('1')",
        "Max.size.__call__",
        "Max(*s0)",
        "\nimport os",
    ],
)
def test_what_is_more_than_arithmetic_is_not_harmless(text: str) -> None:
    from gradsurgery.cli.program_file import _is_harmless

    assert not _is_harmless("expr_str", text)
    assert _is_harmless("guards_code", "L['x'].size()[0] * 2 <= Max(4, s0) + 1")
    assert _is_harmless("expr_str", "Max(1, Symbol('s77', positive=True, integer=True)//2)")


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def scripted() -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), buffer)
    return buffer.getvalue()


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return buffer.getvalue()


def newer() -> bytes:
    """A TorchScript file whose format has a number that this torch does not know."""
    content = scripted()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entry = next(name for name in archive.namelist() if name.endswith("/version"))
    return changed(content, entry.partition("/")[2], lambda _: b"9999\n")


def flipped(content: bytes) -> bytes:
    """One bit of a weight is another: nobody but the checksum notices."""
    at = content.index(b"PK\x01\x02") // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "text": (lambda: b"hello world, this is text", "begins with b'hello wo' and is no format"),
    "state dict": (lambda: saved(Net().state_dict()), "a dict of 8 entries .*weights without a forward"),
    "checkpoint": (lambda: saved({"epoch": 3, "model": Net().state_dict()}), "'epoch', 'model'.*Name the architecture"),
    "a tensor": (lambda: saved(X), "holds a Tensor, and no model"),
    "pickled model": (lambda: saved(nn.Linear(2, 2)), "is a pickle of Python objects.*--trust"),
    "bare pickle": (lambda: pickle.dumps(Mkdir()), "is a pickle of Python objects.*--trust"),
    "old pickle": (lambda: pickle.dumps(collections.OrderedDict(a=1), 2), "is a pickle of Python objects.*--trust"),
    "safetensors": (
        lambda: b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": 1}      ',
        "safetensors file, which holds a state dict",
    ),
    "other zip": (
        lambda: zipped("word/document.xml", "[Content_Types].xml"),
        "a zip of something else .'document.xml'",
    ),
    "truncated": (lambda: scripted()[:-200], "truncated or damaged"),
    "half": (lambda: scripted()[: len(scripted()) // 2], "truncated or damaged"),
    "flipped": (lambda: flipped(scripted()), "damaged"),
    "truncated program": (lambda: exported()[:-50], "is truncated"),
    "newer": (newer, "cannot be read with torch .*version 9999.*newer"),
    "newer program": (
        lambda: changed(
            exported(), "models/model.json", edited(lambda m: m.update(schema_version={"major": 99, "minor": 1}))
        ),
        "cannot be read with torch .*newer",
    ),
    "program that is no JSON": (lambda: changed(exported(), "models/model.json", lambda _: b"{"), "cannot be read"),
}


@pytest.mark.usefixtures("in_tmp")
@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_model_is_told_in_one_message(kind: str) -> None:
    make, said = FILES[kind]
    Path("net.pt").write_bytes(make())
    with pytest.raises(gs.SurgeryError, match=said) as caught:
        load_file("net.pt", trust=False)
    assert "\n" not in str(caught.value)
    assert not Path("pwned").exists()


@pytest.mark.usefixtures("in_tmp")
def test_trust_reads_a_pickle() -> None:
    for zipped in (True, False):
        torch.save(nn.Sequential(nn.Linear(2, 2)), "net.pt", _use_new_zipfile_serialization=zipped)
        assert isinstance(load_file("net.pt", trust=True)[0], nn.Sequential)
    Path("net.pkl").write_bytes(pickle.dumps(nn.Linear(2, 2)))
    assert isinstance(load_file("net.pkl", trust=True)[0], nn.Linear)
    Path("net.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(gs.SurgeryError, match="holds a list, and no model"):
        load_file("net.pkl", trust=True)
    Path("net.pkl").write_bytes(pickle.dumps(Mkdir()))
    with pytest.raises(gs.SurgeryError, match="holds a NoneType"):
        load_file("net.pkl", trust=True)
    assert Path("pwned").exists()  # that is what trust means


@pytest.mark.usefixtures("in_tmp")
def test_a_pickle_finds_its_class_in_the_current_directory_or_says_that_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    mine = types.ModuleType("mine")
    exec("from torch import nn\nclass Net(nn.Linear): pass\n", mine.__dict__)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mine", mine)
        torch.save(mine.Net(2, 2), "net.pt")
    with pytest.raises(gs.SurgeryError, match="names a class or function that is not found here: No module named"):
        load_file("net.pt", trust=True)
    Path("mine.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    importlib.invalidate_caches()
    assert load_file("net.pt", trust=True)[0].in_features == 2
    monkeypatch.setitem(sys.modules, "mine", types.ModuleType("mine"))
    with pytest.raises(gs.SurgeryError, match="not found here: .*'Net'"):
        load_file("net.pt", trust=True)


@pytest.mark.usefixtures("in_tmp")
def test_a_script_is_read_and_what_is_no_file_is_said() -> None:
    Path("net.pt").write_bytes(scripted())
    model, inputs = load_file("net.pt", trust=False)
    assert model(torch.ones(1, 4)).shape == (1, 4)
    assert inputs is None
    Path("folder.pt").mkdir()
    for name, said in (("none.pt", "No such file"), ("folder.pt", "Is a directory")):
        with pytest.raises(gs.SurgeryError, match=f"no file that can be read: {said}"):
            load_file(name, trust=False)


def test_a_torch_without_a_reader_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsurgery.cli.program_file.archive_reader", lambda content: None)
    with pytest.raises(gs.SurgeryError, match="cannot be looked into.*--trust"):
        refuse_code(b"", "net.pt2")
