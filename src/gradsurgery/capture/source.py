"""One Python function: its source found, parsed, and compiled again after an edit.

Only the code changes. Globals, closure cells, defaults, annotations and attributes are the very objects of the
original, so zero-argument ``super()``, patched globals and everything else that the function reaches stay live.
"""

import __future__

import ast
import dis
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import CaptureError
from .code import register_source

Function = types.FunctionType


@dataclass(frozen=True, eq=False)
class Parsed:
    """The source of a function. ``tree`` is shared: copy it before an edit."""

    function: Function
    tree: ast.FunctionDef
    text: str
    file: str
    shift: int  # from a line of the tree to the line of the file

    def where(self, node: ast.AST) -> str:
        return f"{self.file}:{getattr(node, 'lineno', 1) + self.shift}"

    def segment(self, node: ast.AST) -> str:
        """The expression as it was written, on one line."""
        return " ".join((ast.get_source_segment(self.text, node) or ast.unparse(node)).split())


@functools.lru_cache(maxsize=4096)
def parse(function: Function) -> Parsed:
    """Find and parse the source of a function.

    Raises:
        CaptureError: where there is no source, or where it is not the source of the code that runs.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise _no_source(name, function, f"its source is not available ({error})") from error
    # An indented function becomes the body of an ``if``: dedenting could change strings that span lines.
    nested = lines[0][:1].isspace()
    text = ("if 1:\n" if nested else "") + "".join(lines)
    statement = _parse(text)
    statement = statement.body[0] if nested and isinstance(statement, ast.If) else statement
    if not isinstance(statement, ast.FunctionDef):
        kind = "a coroutine" if isinstance(statement, ast.AsyncFunctionDef) else "no `def` statement (a lambda, say)"
        raise _no_source(name, function, f"it is {kind}")
    statement.decorator_list = []  # the wrappers are rebuilt around the new function: see rebuild()
    _mangle(statement, function)
    parsed = Parsed(function, statement, text, function.__code__.co_filename, first - 1 - nested)
    # pytest rewrites asserts as it imports a test, so there the code is never quite the source.
    if "@pytest_ar" not in function.__globals__ and not any(
        _same(function.__code__, _compile(parsed, statement, "<check>", imported=names))
        for names in ((), function.__code__.co_names)
    ):
        raise _no_source(name, function, "the source found there is not the code that runs (edited since the import?)")
    return parsed


def recompile(parsed: Parsed, tree: ast.FunctionDef, provided: dict[str, Any]) -> Function:
    """The function that an edited tree describes; the names in ``provided`` are free variables of its own."""
    original = parsed.function
    tree = ast.fix_missing_locations(tree)
    text = ast.unparse(tree) + "\n"
    file = register_source(text, original.__qualname__)
    code = _compile(parsed, _statement(text), file, tuple(provided))
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in provided.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    function = Function(code, original.__globals__, tree.name, original.__defaults__, closure)
    function.__kwdefaults__ = original.__kwdefaults__
    return dress(function, original, original.__qualname__.rpartition(".")[0], tree.name)


def dress(function: Function, original: Function, scope: str, name: str) -> Function:
    """Give a function what is written on the original: annotations, documentation, and the marks of TorchScript."""
    function.__annotations__ = original.__annotations__
    function.__dict__.update(original.__dict__)
    function.__doc__ = original.__doc__
    function.__module__ = original.__module__
    function.__name__ = name
    function.__qualname__ = f"{scope}.{name}" if scope else name
    return function


def unwrap(function: Any) -> tuple[list[Function], Function]:
    """The wrappers that decorators have put around a function, outermost first, and the function itself.

    Raises:
        CaptureError: where a wrapper does not hold its function in a closure cell, so that it cannot be rebuilt.
    """
    wrappers: list[Function] = []
    while isinstance(function, Function) and "__wrapped__" in function.__dict__:
        inner = function.__dict__["__wrapped__"]
        if not any(_holds(cell, inner) for cell in function.__closure__ or ()):
            raise _no_source(
                f"{function.__module__}.{function.__qualname__}", function, "its decorator keeps it out of reach"
            )
        wrappers.append(function)
        function = inner
    if not isinstance(function, Function):
        name = getattr(function, "__qualname__", repr(function))
        raise CaptureError(
            f"asked for an op inside {name}; there is no Python function there but a {type(function).__name__}. "
            "Operate at the module boundary instead: on its output."
        )
    return wrappers, function


def rebuild(wrappers: list[Function], old: Function, new: Function) -> Function:
    """The same wrappers around another function: the closure cell that held the old one holds the new one."""
    for wrapper in reversed(wrappers):
        closure = tuple(types.CellType(new) if _holds(cell, old) else cell for cell in wrapper.__closure__ or ())
        made = Function(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, closure)
        made.__kwdefaults__ = wrapper.__kwdefaults__
        dress(made, wrapper, wrapper.__qualname__.rpartition(".")[0], new.__name__)
        # Not only ``__wrapped__``: compilers leave the function under names of their own.
        made.__dict__.update({key: new for key, value in wrapper.__dict__.items() if value is old})
        old, new = wrapper, made
    return new


def passes_on(wrapper: Callable[..., Any], module_too: bool) -> bool:
    """Whether a wrapper hands on what its function did not take before: a counter, and in a helper the module.

    One that makes another dict of its keywords may not: transformers drops those that a kernel does not know.
    """
    parameters = inspect.signature(wrapper, follow_wrapped=False).parameters.values()
    taken = {parameter.kind: parameter.name for parameter in parameters}
    rest = taken.get(inspect.Parameter.VAR_KEYWORD)
    rebound = {step.argval for step in dis.get_instructions(wrapper) if step.opname.startswith("STORE_")}
    if module_too and inspect.Parameter.VAR_POSITIONAL not in taken:
        return False
    return rest is not None and rest not in rebound


def _no_source(name: str, function: Function, reason: str) -> CaptureError:
    code = function.__code__
    return CaptureError(
        f"asked for an op inside {name} ({code.co_filename}:{code.co_firstlineno}); {reason}. "
        "Operate at a module boundary instead: on the output of this module, or of a child."
    )


def _statement(text: str) -> Any:
    return ast.parse(text).body[0]


def _parse(text: str) -> Any:
    try:
        # TorchScript reads types from comments, which parsing would otherwise drop.
        return ast.parse(text, type_comments=True).body[0]
    except SyntaxError:
        pass
    try:
        return _statement(text)
    except SyntaxError:
        return None  # a lambda in the middle of an expression


def _compile(
    parsed: Parsed,
    tree: ast.FunctionDef,
    file: str,
    provided: tuple[str, ...] = (),
    imported: tuple[str, ...] = (),
) -> types.CodeType:
    """The code of a function, with its free variables as the parameters of a factory around it."""
    original = parsed.function.__code__
    names = dict.fromkeys((*original.co_freevars, *provided))
    factory = ast.parse(f"def _gs_factory({', '.join(names)}): pass").body[0]
    factory.body = [tree]  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([*(ast.Import([ast.alias(name)]) for name in imported), factory], []))
    flags = original.co_flags & _FUTURE_FLAGS
    outer = _code_in(compile(module, file, "exec", flags, dont_inherit=True), "_gs_factory")
    return _code_in(outer, tree.name)


_FUTURE_FLAGS = __future__.annotations.compiler_flag


def _code_in(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two codes do the same.

    Not byte for byte: a call of an attribute of an imported module is compiled in one of two ways, by where the
    ``import`` stands, which a function compiled on its own cannot know.
    """
    if (a.co_varnames, a.co_freevars, a.co_cellvars) != (b.co_varnames, b.co_freevars, b.co_cellvars):
        return False
    nested = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in (a, b)]
    return _instructions(a) == _instructions(b) and all(map(_same, *nested))


def _instructions(code: types.CodeType) -> list[tuple[str, str]]:
    steps = []
    for step in dis.get_instructions(code):
        if step.opname in ("PUSH_NULL", "EXTENDED_ARG", "PRECALL", "NOP"):
            continue
        name = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL_FUNCTION"}.get(step.opname, step.opname)
        written = "" if "JUMP" in name or name in _MOVED else re.sub(r"( \+ )?NULL(\|self)?( \+ )?", "", step.argrepr)
        if isinstance(step.argval, frozenset):  # printed in any order
            written = repr(sorted(map(repr, step.argval)))
        # Offsets move with the lengths of instructions, and nested functions are compared on their own.
        steps.append((name, "" if isinstance(step.argval, types.CodeType) or "<locals>" in written else written))
    return steps


_MOVED = ("FOR_ITER", "SEND", "SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")


def _holds(cell: Any, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _mangle(tree: ast.FunctionDef, function: Function) -> None:
    """Write private names (``self.__x``) as the class body would have compiled them."""
    scope = function.__qualname__.rpartition(".")[0]
    cls = scope.rpartition(".")[2].lstrip("_")
    if not cls or cls == "<locals>":
        return
    for node, field in _identifiers(tree):
        name = getattr(node, field)
        if name and name.startswith("__") and not name.endswith("__") and "." not in name:
            setattr(node, field, f"_{cls}{name}")


def _identifiers(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    fields = {ast.Attribute: "attr", ast.Name: "id", ast.arg: "arg", ast.keyword: "arg", ast.FunctionDef: "name"}
    for node in ast.walk(tree):
        if type(node) in fields and node is not tree:
            yield node, fields[type(node)]
