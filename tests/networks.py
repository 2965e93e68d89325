"""Random networks as source text: branches, reuse, shared modules, in-place ops, nested outputs.

One text is rendered twice, as the network and as the network with ``op(...)`` written in at one place, so the second is
right by construction. No variable is read after another name for the same memory was written to.
"""

import dataclasses
import itertools
import linecache
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 4
_serial = itertools.count()


@dataclasses.dataclass
class Record:
    a: Tensor
    count: int
    b: Tensor


class Nested(nn.Module):
    """Two tensors and a number in the container named."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return nest(self.kind, self.left(x), self.right(x))


def nest(kind: str, a: Tensor, b: Tensor) -> Any:
    """``a`` and ``b`` in a container of this kind."""
    if kind == "tuple":
        return a, 3, b
    return {"a": a, "count": 3, "b": b} if kind == "dict" else Record(a, 3, b)


PICK = {"tuple": ("{}[0]", "{}[2]"), "dict": ("{}['a']", "{}['b']"), "record": ("{}.a", "{}.b")}
NEST = {"tuple": "({}, 3, {})", "dict": "{{'a': {}, 'count': 3, 'b': {}}}", "record": "Record({}, 3, {})", "one": "{}"}

MODULES: dict[str, Callable[[], nn.Module]] = {
    "lin": lambda: nn.Linear(WIDTH, WIDTH),
    "again": lambda: nn.Linear(WIDTH, WIDTH),
    "squash": nn.Tanh,
    "over": lambda: nn.ReLU(inplace=True),
    "same": nn.Identity,
    "drop": lambda: nn.Dropout(0.5),
    "seq": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "tuple": lambda: Nested("tuple"),
    "dict": lambda: Nested("dict"),
    "record": lambda: Nested("record"),
}


@dataclasses.dataclass
class Memory:
    """What several variables may share."""

    fresh: bool  # nobody needs its present value for a backward, so it may be written to


@dataclasses.dataclass
class Line:
    """One statement of a forward: it sets ``target``; ``op`` is its name in an address, ``module`` what it calls."""

    target: str
    text: str
    op: str | None = None
    module: str | None = None
    argument: str = ""


@dataclasses.dataclass
class Body:
    """A forward of one argument ``x``, and what it returns: a tensor or a nested output."""

    lines: list[Line]
    kind: str
    returned: tuple[str, str]

    def render(self, mark: Callable[[int, Line], str | None]) -> str:
        """The text, with ``op`` written in where ``mark`` says: at the "output" or the "input" of a line."""
        rows = ["def forward(self, x):"]
        for index, line in enumerate(self.lines):
            where, text = mark(index, line), line.text
            if where == "input":
                text = text.replace(f"({line.argument})", f"(op({line.argument}))")
            rows += [f"    {row}" for row in text.splitlines()]
            if where == "output":
                rows.append(f"    {line.target} = op({line.target})")
        return "\n".join([*rows, f"    return {NEST[self.kind].format(*self.returned)}", ""])

    def reads(self, index: int) -> bool:
        """Whether anything reads what this line sets."""
        later = [line.text for line in self.lines[index + 1 :]]
        returned = self.returned[:1] if self.kind == "one" else self.returned
        return any(self.lines[index].target in text for text in [*later, *returned])

    def address(self, index: int, owner: str, bare: bool) -> str:
        """The address of the op in this line; without a call index where ``bare`` and it is the only one."""
        name = self.lines[index].op
        calls = [i for i, line in enumerate(self.lines) if line.op == name]
        return f"{owner}:{name}" if bare and len(calls) == 1 else f"{owner}:{name}@{calls.index(index)}"


class Writer:
    """Draws the statements of one body, keeping account of who shares memory with whom."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], modules: dict[str, str]) -> None:
        self.draw, self.modules = draw, modules  # name to kind of output
        self.memory: dict[str, Memory] = {"x": Memory(fresh=False)}
        self.lines: list[Line] = []

    def body(self, steps: int) -> Body:
        for _ in range(steps):
            getattr(self, self.draw(st.sampled_from(["call", "call", "unary", "binary", "write", "write", "split"])))()
        names = sorted(name for name in self.memory if name != "x")[-3:] or ["x"]
        kind = self.draw(st.sampled_from(list(NEST)))
        return Body(self.lines, kind, (names[-1], names[self.draw(st.integers(0, len(names) - 1))]))

    def pick(self, fresh: bool = False) -> str | None:
        names = sorted(name for name, memory in self.memory.items() if name != "x" and (memory.fresh or not fresh))
        names = names[-4:][::-1] or ([] if fresh else ["x"])  # the latest first, so that what is computed counts
        return self.draw(st.sampled_from(names)) if names else None

    def new(self, memory: Memory) -> str:
        name = f"v{len(self.lines):02}{len(self.memory):02}"
        self.memory[name] = memory
        return name

    def add(self, target: str, text: str, **about: Any) -> None:
        self.lines.append(Line(target, f"{target} = {text}", **about))

    def written(self, name: str, fresh: bool) -> Memory:
        """Forget every name of the memory behind ``name``: it has been written to."""
        memory = self.memory[name]
        for other in [other for other, there in self.memory.items() if there is memory]:
            del self.memory[other]
        return Memory(fresh)

    def call(self) -> None:
        name = self.draw(st.sampled_from(sorted(self.modules)))
        kind, argument = self.modules[name], self.pick(fresh=name == "over")
        if argument is None:
            return
        if name == "over":
            memory = self.written(argument, fresh=False)
        elif name in ("same", "drop"):  # in eval a dropout gives its input
            memory = self.memory[argument]
        else:
            self.memory[argument].fresh, memory = False, Memory(fresh=name in ("lin", "again"))
        about = {"op": name, "module": name, "argument": argument}
        if kind == "one":
            self.add(self.new(memory), f"self.{name}({argument})", **about)
            return
        holder = f"n{len(self.lines):02}"
        self.add(holder, f"self.{name}({argument})", **about)
        for form in PICK[kind]:
            self.add(self.new(Memory(fresh=False)), form.format(holder))

    def unary(self) -> None:
        argument = self.pick()
        op, text = self.draw(
            st.sampled_from(
                [("relu", "torch.relu({})"), ("sin", "torch.sin({})"), ("gelu", "F.gelu({})"), ("tanh", "{}.tanh()")]
            )
        )
        self.memory[str(argument)].fresh = False
        self.add(self.new(Memory(fresh=op in ("sin", "gelu"))), text.format(argument), op=op)

    def binary(self) -> None:
        one, other = self.pick(), self.pick()
        op, text = self.draw(st.sampled_from([("add", "{} + {}"), ("mul", "{} * {}"), ("sub", "torch.sub({}, {})")]))
        if op == "mul":
            self.memory[str(one)].fresh = self.memory[str(other)].fresh = False
        self.add(self.new(Memory(fresh=True)), text.format(one, other), op=op)

    def write(self) -> None:
        over, other = self.pick(fresh=True), self.pick()
        if over is None or self.memory[str(other)] is self.memory[over]:
            return
        op, text = self.draw(
            st.sampled_from(
                [
                    ("relu_", "{}.relu_()"),
                    ("add_", "{}.add_({})"),
                    ("mul_", "{}.mul_(0.5)"),
                    ("add", "{}\n{target} += {}"),
                ]
            )
        )
        target = self.new(self.written(over, fresh=op != "relu_"))
        self.add(target, text.format(over, other, target=target), op=op)

    def split(self) -> None:
        whole = self.pick()
        self.memory[str(whole)].fresh = False
        halves = f"n{len(self.lines):02}"
        self.add(halves, f"{whole}.chunk(2, -1)", op="chunk")
        self.add(self.new(Memory(fresh=True)), f"torch.cat([{halves}[1], {halves}[0]], -1)", op="cat")


@dataclasses.dataclass
class Network:
    """The text of a root and of its submodule ``inner``, and whether the two share the module ``lin``."""

    root: Body
    inner: Body
    shared: bool

    def build(self, mark: Callable[[str, int, Line], str | None], op: Callable[[Any], Any] | None = None) -> nn.Module:
        """The network with seeded weights, ``op`` written in where ``mark`` says."""
        torch.manual_seed(0)
        models = []
        for owner, body in (("inner", self.inner), ("", self.root)):
            scope: dict[str, Any] = {"torch": torch, "F": F, "Record": Record, "op": op}
            source = body.render(lambda index, line, owner=owner: mark(owner, index, line))
            file = f"<drawn network {next(_serial)}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            exec(compile(source, file, "exec"), scope)
            model = type("Drawn", (nn.Module,), {"forward": scope["forward"], "__module__": __name__})()
            for name, make in MODULES.items():
                model.add_module(name, make())
            models.append(model)
        inner, root = models
        root.add_module("inner", inner)
        if self.shared:
            inner.lin = root.lin
        return root

    def __repr__(self) -> str:
        return f"shared={self.shared}\ninner: {self.inner.render(lambda *_: None)}\n{self.root.render(lambda *_: None)}"


@st.composite
def networks(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Network:
    """A root of up to nine steps that may call a submodule of up to five."""
    kinds = {name: name if name in PICK else "one" for name in MODULES}
    inner = Writer(draw, kinds).body(draw(st.integers(1, 5)))
    root = Writer(draw, {**kinds, "inner": inner.kind}).body(draw(st.integers(3, 9)))
    return Network(root, inner, draw(st.booleans()))
