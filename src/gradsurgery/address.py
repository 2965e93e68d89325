"""The grammar of addresses: how a place in a model is written down, and what a written address says.

An address is ``PATH[:OP[@CALL]][ELEMENT]...``, or two without elements and an arrow between. Nothing here looks at a
model: see :mod:`gradsurgery.resolve`.

========================  =====================================================================
``layer3``                the output of a module, whoever calls it
``layer3.0:add``          the op ``add`` in the forward of ``layer3.0``
``layer3.0:relu@1``       the second call of ``relu`` there, counted from 0; ``relu@*`` is all of them
``:flatten``              an op in the root's own forward
``lstm[0]``               one element of a tuple, list or dict; also ``head['out']`` and ``x[0]['a']``
``blocks.*.attn``         globs: ``*`` within one name, ``**`` over any number of names
``layer3 -> layer4``      one edge: what the second receives from the first, in the forward that calls both
========================  =====================================================================
"""

import ast
import functools
import re
from dataclasses import dataclass, field
from typing import Literal

from .errors import AddressError

Element = tuple[int | str, ...]

ALL_CALLS = -1

_ELEMENT = re.compile(r"""\[\s*(-?\d+|'[^']*'|"[^"]*")\s*\]$""")
_OP = re.compile(r"(?P<name>[\w.*?-]+)(@(?P<call>\d+|\*))?$")
_GRAMMAR = "PATH, PATH:OP, PATH:OP@CALL or PATH:OP@*, each also with [0] or ['key'] for one element of the value"


@dataclass(frozen=True)
class Where:
    """A place inside one module, as plain data: part of the key of a generated class, and of its pickle.

    ``call`` counts from 0; ``None`` means that the op has one call only, :data:`ALL_CALLS` every call. Of an edge,
    ``op`` and ``call`` are where it leads to, and ``source`` is where it comes from.
    """

    kind: Literal["output", "input", "op", "edge", "head"]
    element: Element = ()
    op: str = ""
    call: int | None = None
    source: tuple[str, int | None] = ("", None)
    by_path: tuple[bool, bool] = field(default=(False, False), compare=False)  # how the ends of an edge were written

    def text(self, path: str) -> str:
        """The address of this place in the module that ``path`` names."""
        op = _called(self.op, self.call)
        if self.kind == "edge":
            ends = zip((self.source, (self.op, self.call)), self.by_path, strict=True)
            return " -> ".join(_end(path, name, call, by_path) for (name, call), by_path in ends)
        return path + (f":{op}" if self.kind == "op" else "") + "".join(f"[{key!r}]" for key in self.element)


def _end(path: str, name: str, call: int | None, by_path: bool) -> str:
    if by_path:
        return f"{path}.{name}" if path else name
    return f"{path}:{_called(name, call)}"


def _called(op: str, call: int | None) -> str:
    return op if call is None else f"{op}@*" if call == ALL_CALLS else f"{op}@{call}"


@dataclass(frozen=True)
class Address:
    """A parsed address: a module path, which may be a glob, and the place inside each module that it names."""

    path: str
    where: Where

    @property
    def is_glob(self) -> bool:
        """Whether the module path stands for any number of modules, none included."""
        return is_glob(self.path)

    def __str__(self) -> str:
        return self.where.text(self.path)


def parse(text: str, side: Literal["output", "input"] = "output") -> Address:
    """Read an address.

    >>> str(parse("layer3.0:relu@1"))
    'layer3.0:relu@1'

    Args:
        text: the address as a user writes it.
        side: which side of a module a bare module path means.

    Raises:
        AddressError: where ``text`` is not an address, or asks for the input side of an op.
    """
    rest, element = _split_element(text.strip())
    if "->" in rest:  # not in a key, which may be any text
        return _parse_edge(text, side)
    path, colon, op = rest.partition(":")
    if any(part == "" for part in path.split(".")) and path:
        raise AddressError(f"{text!r} is no address: a module path has an empty name in it. An address is {_GRAMMAR}.")
    if "[" in rest or "]" in rest:
        raise AddressError(f"{text!r} is no address: its brackets hold no number or quoted key. It is {_GRAMMAR}.")
    if not colon:
        return Address(path, Where(side, element))
    match = _OP.match(op)
    if match is None:
        raise AddressError(f"{text!r} is no address: {op!r} names no op. An address is {_GRAMMAR}.")
    if side == "input":
        raise AddressError(
            f"side='input' was asked for the op in {text!r}, but an op has no input side: "
            "name the op or module that makes the value, or give a module path."
        )
    call = match["call"]
    index = None if call is None else ALL_CALLS if call == "*" else int(call)
    return Address(path, Where("op", element, match["name"], index))


def _parse_edge(text: str, side: str) -> Address:
    """The ends of an edge are two ops, or children, of one forward: that of the module which stands above both."""
    ends = [parse(end) for end in text.split("->")]
    if len(ends) != 2 or side == "input" or any(end.where.element or is_glob(end.path + end.where.op) for end in ends):
        raise AddressError(
            f"{text!r} is no edge. An edge has two ends, such as 'layer3 -> layer4' or 'layer3.0:bn2 -> layer3.0:add', "
            "without globs, elements or a side. Give a list for several edges."
        )
    owners = [end.path for end in ends if end.where.kind == "op"]
    owner = owners[0] if owners else _shared([end.path.split(".")[:-1] for end in ends])
    prefix = f"{owner}." if owner else ""
    names = []
    for end in ends:
        is_op = end.where.kind == "op"
        if (end.path != owner) if is_op else not (end.path.startswith(prefix) and end.path != owner):
            raise AddressError(
                f"{text!r} is no edge: {str(end)!r} is not called in the forward of {owner or 'the root'!r}, where the "
                "other end is. Name two ops, or two children, of one forward."
            )
        names.append((end.where.op if is_op else end.path.removeprefix(prefix), end.where.call))
    by_path = (ends[0].where.kind != "op", ends[1].where.kind != "op")
    return Address(owner, Where("edge", (), *names[1], source=names[0], by_path=by_path))


def _shared(paths: list[list[str]]) -> str:
    """What two module paths have in common."""
    pairs = list(zip(*paths, strict=False))
    apart = next((k for k, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return ".".join(paths[0][:apart])


def is_glob(pattern: str) -> bool:
    """Whether a path or an op name holds a wildcard."""
    return "*" in pattern or "?" in pattern


def matches(pattern: str, path: str) -> bool:
    """Whether a glob stands for a module path, name by name.

    >>> matches("**.bn1", "layer1.0.bn1"), matches("layer1.*", "layer1.0.bn1")
    (True, False)
    """
    return _expression(pattern).fullmatch(f"{path}." if path else "") is not None


@functools.lru_cache(maxsize=256)  # one expression for every module of a model
def _expression(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression over names that each end in a dot."""
    wild = {"*": "[^.]*", "?": "[^.]"}
    names = pattern.split(".") if pattern else []
    parts = ["".join(wild.get(c) or re.escape(c) for c in name) + r"\." for name in names]
    return re.compile("".join(r"(?:[^.]*\.)*" if n == "**" else part for n, part in zip(names, parts, strict=True)))


def _split_element(text: str) -> tuple[str, Element]:
    keys: list[int | str] = []
    while match := _ELEMENT.search(text):
        keys.insert(0, ast.literal_eval(match[1]))
        text = text[: match.start()]
    return text, tuple(keys)
