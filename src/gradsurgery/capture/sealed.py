"""The sealed capture: a graph that calls a module's kept forward as it is, and so can lose nothing of it.

Control flow, ``training``, checkpointing and autocast blocks all stay live, since nothing is traced. A place at a
module boundary needs no more than this, which is why it can be reached in any model.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Dict, Tuple  # noqa: UP035

import torch

from .code import compile_function

KEPT = "_gs_forward"
"""The name under which a generated class keeps the forward that it stands in front of."""

COUNT_CHANGES, REFUSE_CHANGES = "_gs_count_changes", "_gs_refuse_changes"
"""Methods around the kept forward where what it receives was operated on: it must not be changed in place."""

ARM, ADD_HEADS = "_gs_arm", "_gs_add_heads"
"""Methods around the kept forward of a root that has heads."""

HEADS_TYPE = Tuple[torch.Tensor, Dict[str, torch.Tensor]]  # noqa: UP006 - the form that TorchScript reads


def seal(
    forward: Callable[..., Any],
    inputs: Sequence[str],
    outputs: Sequence[str],
    whole: bool = False,
    heads: bool = False,
) -> torch.fx.Graph:
    """The graph of a forward that passes what it receives and what it returns through methods of the module.

    The graph mirrors the signature of ``forward`` where fx can write it. fx cannot splat, so a forward with ``*args``,
    ``**kwargs`` or keyword-only parameters is mirrored whole: what was given and what was not stay different, which
    decorated forwards look at. For the same reason the parameters are those of the code that is called, not those that
    ``inspect.signature`` reports for the function inside of its decorators.

    Args:
        forward: the function to keep, ``self`` first.
        inputs: methods that what is received passes through, in order.
        outputs: methods that the value passes through, in order.
        whole: mirror any signature whole, for inputs of which one is chosen.
        heads: take values for heads during the forward, and return what they make of them beside its value.
    """
    names = () if whole else _plain_parameters(forward)
    if names and (not inputs or len(names) == 2):
        return _mirror(names, forward, inputs, outputs, heads)
    return _splat(inputs, outputs, heads)


def _plain_parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a function, or none where one of them is ``*args``, ``**kwargs`` or keyword-only."""
    code = getattr(forward, "__code__", None)
    if code is None or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return ()
    names = code.co_varnames[: code.co_argcount]
    return () if "self" in names[1:] else names  # fx calls the first one self


def positional(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that may be given by position, ``self`` left out."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in signature(forward).parameters.values() if p.kind in kinds)[1:]


def signature(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function; ``(*args, **kwargs)`` where it has none, as many builtins."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)


def is_mirrored(graph: torch.fx.Graph) -> bool:
    """Whether the parameters of a sealed graph are those of the kept forward, one by one."""
    return not any(node.op == "placeholder" and str(node.target).startswith("*") for node in graph.nodes)


def _mirror(
    names: Sequence[str], forward: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str], heads: bool
) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    annotations = getattr(forward, "__annotations__", {})
    module = graph.placeholder("self")  # fx adds a parameter of that name where the first is called something else
    required = len(names) - len(forward.__defaults__ or ())
    received = [
        # The default is a stand-in: define() gives the function the very objects of the original.
        graph.placeholder(name, annotations.get(name), inspect.Signature.empty if k < required else None)
        for k, name in enumerate(names[1:], 1)
    ]
    if heads:
        graph.call_method(ARM, (module,))
    given = received
    for method in inputs:
        received = [graph.call_method(method, (module, *received))]
    before = graph.call_method(COUNT_CHANGES, (module, *received, *given)) if inputs else None
    value = graph.call_method(KEPT, (module, *received))
    if inputs:
        graph.call_method(REFUSE_CHANGES, (module, *received, *given, before))
    for method in outputs:
        value = graph.call_method(method, (module, value))
    if heads:
        value = graph.call_method(ADD_HEADS, (module, value))
    graph.output(value, HEADS_TYPE if heads else annotations.get("return"))
    return graph


def _splat(inputs: Sequence[str], outputs: Sequence[str], heads: bool) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    module = graph.placeholder("self")
    received: Any = (graph.placeholder("*args"), graph.placeholder("**kwargs"))
    if heads:
        graph.call_method(ARM, (module,))
    given = received
    for method in inputs:
        received = graph.call_method(method, (module, received))
    before = graph.call_method(COUNT_CHANGES, (module, received, given)) if inputs else None
    value = graph.call_function(call_kept, (module, received))
    if inputs:
        graph.call_method(REFUSE_CHANGES, (module, received, given, before))
    for method in outputs:
        value = graph.call_method(method, (module, value))
    if heads:
        value = graph.call_method(ADD_HEADS, (module, value))
    graph.output(value)
    return graph


def call_kept(module: torch.nn.Module, received: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Call the kept forward with arguments that arrived as ``*args, **kwargs``."""
    args, kwargs = received
    return getattr(module, KEPT)(*args, **kwargs)


def define(graph: torch.fx.Graph, like: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a sealed graph into a function that has the name, defaults, annotations and signature of ``like``."""
    try:
        function = _function(graph)
    except Exception:
        # Some annotations cannot be written in code (a name known to the checker only); only TorchScript reads them.
        for node in graph.nodes:
            node.type = None
        function = _function(graph)
    if is_mirrored(graph):
        function.__defaults__ = like.__defaults__
    function.__annotations__ = dict(getattr(like, "__annotations__", {}))
    function.__doc__ = like.__doc__
    function.__module__ = getattr(like, "__module__", function.__module__)
    function.__qualname__ = getattr(like, "__qualname__", "forward")
    function.__signature__ = signature(like)
    return function


def _function(graph: torch.fx.Graph) -> Any:
    code = graph.python_code("self")
    return compile_function(code.src, "forward", code.globals)
