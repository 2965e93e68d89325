"""What is inside a ``.pt2`` file, before torch reads it: whether reading would run code that the file brings along.

``torch.export.load`` unpickles (weights that are tensor subclasses, opaque objects, an input that is no plain tensor),
loads shared libraries, evaluates symbolic sizes, imports modules that a tree of inputs names, and executes guards.
Nearly every file needs none of that, or nothing but arithmetic. So a file is read by a list of what is known to be
harmless, through the reader that torch itself uses, and whatever is not on the list is refused by name.
"""

import ast
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import torch

from .._torch import archive_reader
from ..errors import SurgeryError

__all__ = ["refuse_code"]

_ENTRIES = re.compile(
    r"(\.data/.*|archive_format|archive_version|byteorder|models/\w+\.json|extra/.*"
    r"|data/(weights/(weight_\d+|\w+_weights_config\.json)|constants/(tensor_\d+|\w+_constants_config\.json)"
    r"|sample_inputs/\w+\.pt))"
)
_PLAIN = re.compile(r"[\w.,:<>/ -]*")
_FREE = {"stack_trace", "torch_fn", "nn_module_stack", "source_fn_stack", "torch_version"}
"""What torch keeps as text, or compares, and never evaluates."""

_TARGET = re.compile(
    r"torch\.ops\.(aten|prims|torchvision|quantized_decomposed|gradsurgery)\.\w+\.\w+"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond|while_loop)"
    r"|_operator\.(getitem|add|mul|sub|truediv|ge|le|gt|lt|eq|ne|floordiv|mod|and_|or_|not_|pow|neg|abs|lshift|rshift)"
    r"|math\.(ceil|floor|trunc)|torch\.sym_\w+"
)
_TREES = {"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict", None}

_NAMES = re.compile(
    r"L|Symbol|Integer|Rational|Float|Add|Mul|Pow|Max|Min|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Abs|oo|int_oo|true|false"
    r"|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan|Identity|FloorDiv|ModularIndexing"
    r"|Where|PythonMod|Mod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|LShift|RShift|PowByNatural|FloatPow|FloatTrueDiv"
    r"|IntTrueDiv|TruncToFloat|TruncToInt|RoundToInt|RoundDecimal|ToFloat|[suz]\w*\d+"
)
_METHODS = {"size", "stride", "storage_offset"}
_ARITHMETIC = (
    *(ast.Expression, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Load, ast.Tuple),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


def refuse_code(content: bytes, name: str) -> None:
    """Refuse an export archive that would run more than torch's own operators when it is read and called.

    Raises:
        SurgeryError: with what in the archive is not known to be harmless.
    """
    reader = archive_reader(io.BytesIO(content))
    if reader is None:
        raise SurgeryError(f"{name!r} cannot be looked into with this torch before it is read. {TRUST}")
    with reader as archive:
        entries = archive.get_file_names()
        for entry in entries:
            if not _ENTRIES.fullmatch(entry):
                raise _refused(name, f"the entry {entry!r}")
        for entry in entries:
            if entry.endswith("_config.json"):
                _check_config(json.loads(archive.read_string(entry)), name)
            elif entry.startswith("models/"):
                for key, text in _strings(json.loads(archive.read_string(entry))):
                    if not _is_harmless(key, text):
                        raise _refused(name, f"{key!r}: {text[:80]!r} in {entry!r}")
            elif entry.startswith("data/sample_inputs/"):
                try:
                    torch.load(io.BytesIO(archive.read_bytes(entry)), weights_only=True)
                except Exception as error:
                    raise _refused(name, f"an example of the inputs that is a pickle, {entry!r}") from error


TRUST = "--trust reads it nevertheless: give it only for a file that you, or someone you trust, has made."


def _refused(name: str, what: str) -> SurgeryError:
    return SurgeryError(
        f"{name!r} is a torch.export archive, and holds {what}, which torch would unpickle, import or execute, or "
        f"which is not known to be harmless. {TRUST}"
    )


def _check_config(config: Any, name: str) -> None:
    for entry, payload in config["config"].items():
        if payload["use_pickle"] or not re.fullmatch(r"(weight|tensor)_\d+", payload["path_name"]):
            raise _refused(name, f"{entry!r} as a pickle")


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a JSON value, the keys of dicts among them, with the key that it stands under."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield "a key", name
            yield from _strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, str):
        yield key, value


def _is_harmless(key: str, text: str) -> bool:
    if key in _FREE:
        return True
    if key in ("expr_str", "guards_code"):
        return _is_arithmetic(text)
    if key in ("target", "as_operator"):
        return _TARGET.fullmatch(text) is not None
    if key in ("in_spec", "out_spec"):
        return _is_plain_tree(json.loads(text))
    if key == "forward_arg_names":
        return text.isidentifier()
    return _PLAIN.fullmatch(text) is not None


def _is_arithmetic(text: str) -> bool:
    """Whether an expression computes with numbers, sizes and symbols, and calls nothing else."""
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError):
        return False
    return all(map(_is_arithmetic_node, nodes))


def _is_arithmetic_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return _NAMES.fullmatch(node.id) is not None
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str | bytes) or (isinstance(node.value, str) and node.value.isidentifier())
    if isinstance(node, ast.Attribute):
        return node.attr in _METHODS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name | ast.Attribute)
    if isinstance(node, ast.keyword):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool)
    return isinstance(node, _ARITHMETIC)


def _is_plain_tree(spec: Any) -> bool:
    """Whether a tree of inputs or outputs is one of tuples, lists and dicts, whose keys are names."""
    if isinstance(spec, list):
        return all(_is_plain_tree(part) for part in spec if not isinstance(part, int))
    if not isinstance(spec, dict) or spec.get("type") not in _TREES:
        return False
    context = json.loads(spec["context"]) if spec.get("context") is not None else None
    keys = context if isinstance(context, list) else [] if context is None else [context]
    return all(isinstance(key, str) and _PLAIN.fullmatch(key) for key in keys) and all(
        map(_is_plain_tree, spec.get("children_spec", ()))
    )
