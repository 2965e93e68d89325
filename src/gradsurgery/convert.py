"""From an operated model to a file: TorchScript, ``torch.export`` or ONNX, held against the model before it is written.

The tools themselves keep the operators; these functions add what is easily forgotten: to look at the written bytes and
not at the object in memory, to compare every gradient and not the output alone, to say whether a trace was needed.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .conversion import Compared, Conversion, Reference, say
from .edit import withdraw
from .errors import SurgeryError, first_line
from .example import Arguments, Example, read_example
from .listing import places_of
from .measure import strided
from .operators.values import tensors_in
from .place import Place
from .progress import Progress
from .recorded.place import recorded_graphs, recorded_places, remove_recorded
from .stand_in import keeps_value
from .tap import HeadPlace, TapPlace
from .twin import twin
from .verify import refuse_lost
from .wrappers import bare, refuse_compiled

__all__ = ["exported", "onnx", "refuse_existing", "to_exported", "to_onnx", "to_torchscript", "torchscript"]

PathLike = str | os.PathLike[str]

SCRIPT_RUNS = 3
"""TorchScript watches two forwards and has optimised the third."""


def to_torchscript(
    model: nn.Module,
    path: PathLike | None = None,
    example: Example = None,
    *,
    for_inference: bool = False,
    force: bool = False,
) -> torch.jit.ScriptModule:
    """Script a model, or trace it where it cannot be scripted, verify that, and print what was verified.

        scripted = gs.to_torchscript(model, "resnet50.pt", example=images)

    The file loads where this package is not installed. On the example, outputs and every gradient are those of the
    model, in three runs of what was saved, since TorchScript optimises after two. Without an example nothing can be
    run, so nothing is verified, and a model that cannot be scripted is refused.

    Args:
        model: operated or not, in the mode in which it is to be used; in a wrapper, the model inside is converted.
        path: where to write it; None writes nothing.
        example: inputs: a tensor, a tuple of positional arguments, or a pair ``(args, kwargs)``.
        for_inference: convert a twin in evaluation mode, without the operators that act on the gradient alone and
            without heads that only run in training; the outputs are compared, and no gradients.
        force: whether a file that is there already is replaced.

    Returns:
        The ScriptModule, loaded from what was saved.

    Raises:
        VerificationError: where outputs or gradients differ; nothing is written then.
        SurgeryError: where neither way works, or the file exists.
    """
    conversion = torchscript(model, path, example, for_inference=for_inference, force=force)
    say(conversion)
    return conversion.converted


def to_exported(
    model: nn.Module,
    example: Example,
    path: PathLike | None = None,
    *,
    for_inference: bool = False,
    force: bool = False,
    **options: Any,
) -> torch.export.ExportedProgram:
    """Export a model with ``torch.export``, verify outputs and gradients, and print what was verified.

        program = gs.to_exported(model, images, "resnet50.pt2")
        program.module()        # trains, with the operators inside

    What is verified is what was saved and loaded again, before ``run_decompositions``, which loses every ``detach``.

    Args:
        model: as in :func:`to_torchscript`. A program keeps the mode that the model is in.
        example: as in :func:`to_torchscript`. Its shapes are those of the program, but for ``dynamic_shapes``.
        path: where to write it, ending in ``.pt2``; None writes nothing.
        for_inference: as in :func:`to_torchscript`.
        force: as in :func:`to_torchscript`.
        **options: for ``torch.export.export``, such as ``dynamic_shapes``.

    Returns:
        The program, loaded from what was saved.

    Raises:
        VerificationError: where outputs or gradients differ; nothing is written then.
        SurgeryError: where the model cannot be exported, or the file exists.
    """
    conversion = exported(model, example, path, for_inference=for_inference, force=force, **options)
    say(conversion)
    return conversion.converted


def to_onnx(
    model: nn.Module,
    example: Example,
    path: PathLike,
    *,
    force: bool = False,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Export a model to ONNX, run that with onnxruntime, compare the outputs, and print what was verified.

        gs.to_onnx(model, images, "resnet50.onnx")

    ONNX holds no gradient, so a twin in evaluation mode is converted, without the operators that act on the gradient
    alone. onnxruntime adds in another order: its outputs may be off by 16 times what one rounding of each weight
    changes in this very model, which is measured and printed.

    Args:
        model: as in :func:`to_torchscript`.
        example: as in :func:`to_torchscript`.
        path: where to write it.
        force: as in :func:`to_torchscript`.
        **options: for ``torch.onnx.export``, such as ``dynamic_shapes`` and ``opset_version``.

    Returns:
        What ``torch.onnx.export`` has returned.

    Raises:
        VerificationError: where the outputs differ; nothing is written then.
        SurgeryError: where the model cannot be exported, a package is missing, or the file exists.
    """
    conversion = onnx(model, example, path, force=force, **options)
    say(conversion)
    return conversion.converted


def torchscript(
    model: nn.Module,
    path: PathLike | None = None,
    example: Example = None,
    *,
    for_inference: bool = False,
    force: bool = False,
) -> Conversion:
    """:func:`to_torchscript`, with the report instead of the print."""
    root, arguments = _checked(model, path, force, for_inference), read_example(example)
    with _quiet() as warned, Progress("convert", 3 + SCRIPT_RUNS) as progress:
        how, made = _scripted_or_traced(root, arguments)
        decisions = sum(issubclass(one.category, torch.jit.TracerWarning) for one in warned)
        progress.step()
        buffer = io.BytesIO()
        torch.jit.save(made, buffer)
        progress.step()
        loaded = _loaded_script(buffer)
        if arguments is None:
            checks, notes = [Compared("outputs and gradients", "not checked", "no example was given")], []
        else:
            reference = Reference(root, arguments, not for_inference, progress)
            checks, notes = reference.hold(loaded, SCRIPT_RUNS), _idle(reference)
            loaded = _loaded_script(buffer)  # the runs may have changed it
    if how.startswith("traced"):
        notes.append("a trace has the branches, shapes and mode of the example, and ignores train() and eval()")
    if decisions:
        notes.append(f"{decisions} values of the example became constants of the trace")
    return _written(Conversion("torchscript", how, loaded, buffer.getvalue(), checks, notes), path, force)


def exported(
    model: nn.Module,
    example: Example,
    path: PathLike | None = None,
    *,
    for_inference: bool = False,
    force: bool = False,
    **options: Any,
) -> Conversion:
    """:func:`to_exported`, with the report instead of the print."""
    refuse_compiled(bare(model), "an export", "torch.export takes no TorchScript; to_torchscript writes it.")
    root, arguments = _checked(model, path, force, for_inference), _needed(example, "torch.export")
    if path is not None and Path(path).suffix != ".pt2":
        raise SurgeryError(f"path={os.fspath(path)!r} was asked for. torch.export loads a file that ends in '.pt2'.")
    args, kwargs = arguments
    with _quiet(), Progress("convert", 4) as progress:
        program = _made("torch.export", lambda: torch.export.export(root, args, kwargs, **options))
        progress.step()
        buffer = io.BytesIO()
        _made("torch.export.save", lambda: torch.export.save(program, buffer))
        progress.step()
        reference = Reference(root, arguments, not for_inference, progress)
        checks = reference.hold(_loaded_program(buffer).module())
        loaded = _loaded_program(buffer)
    notes = _idle(reference)
    if any(True for _ in places_of(root)):
        notes.append("run_decompositions loses the operators: train program.module() as it is")
    return _written(Conversion("exported", _mode(root), loaded, buffer.getvalue(), checks, notes), path, force)


def onnx(
    model: nn.Module, example: Example, path: PathLike | None = None, *, force: bool = False, **options: Any
) -> Conversion:
    """:func:`to_onnx`, with the report instead of the print."""
    runtime = _onnxruntime()
    root, arguments = _checked(model, path, force, for_inference=True), _needed(example, "torch.onnx")
    args, kwargs = arguments
    with _quiet(), Progress("convert", 3) as progress:
        reference = Reference(root, arguments, False, progress)
        options = {"dynamo": True, "verbose": False, **options}
        program = _made("torch.onnx", lambda: torch.onnx.export(root, args, kwargs=kwargs, **options))
        progress.step()
        content = _made("torch.onnx", lambda: program.model_proto.SerializeToString())
        outputs = _made("onnxruntime", lambda: _run_onnx(runtime, content, arguments))
        check = reference.forward(outputs)
        progress.step()
    notes = [f"run with onnxruntime {runtime.__version__}; ONNX holds no gradient"]
    return _written(Conversion("onnx", _mode(root), program, content, [check], notes), path, force)


def _checked(model: nn.Module, path: PathLike | None, force: bool, for_inference: bool) -> nn.Module:
    """The bare model to convert: itself, or for inference a twin without what acts on the gradient alone."""
    root = bare(model)
    if for_inference:
        refuse_compiled(root, "a conversion for inference", "Leave its operators out: gs.remove(model), model.eval().")
    refuse_lost(root)
    if path is not None:
        refuse_existing(path, force)
    if not for_inference:
        return root
    root, _ = twin(root)
    gone = [
        (module, place)
        for _, module, place in places_of(root)
        if isinstance(place, Place)  # a part that is TorchScript already is shared with the original
        and not isinstance(place, HeadPlace | TapPlace)
        and keeps_value(place.operator(module))
    ]
    taps = {p.tap for _, _, p in places_of(root) if isinstance(p, HeadPlace) and p.training_only}
    gone += [(m, p) for _, m, p in places_of(root) if isinstance(p, HeadPlace | TapPlace) and p.tap in taps]
    for graph in recorded_graphs(root.modules()):
        remove_recorded(graph, [place for place in recorded_places(graph) if keeps_value(place.operator(graph))])
    withdraw(gone)
    with contextlib.suppress(NotImplementedError):  # the program of an export has one mode
        root.eval()
    return root


def refuse_existing(path: PathLike, force: bool) -> None:
    """Refuse to write where there is something already, or where nothing can be."""
    asked = Path(path)
    if asked.exists() and not asked.is_file():
        what = "a directory" if asked.is_dir() else "no ordinary file"
        raise SurgeryError(f"{str(asked)!r} was to be written, and is {what}. Give the name of a file.")
    if not asked.parent.is_dir():
        raise SurgeryError(f"{str(asked)!r} was to be written, and there is no directory {str(asked.parent)!r}.")
    if asked.exists() and not force:
        raise SurgeryError(
            f"{str(asked)!r} was to be written, and exists already. Give another path, or force=True (--force) to "
            "replace it."
        )


def _written(conversion: Conversion, path: PathLike | None, force: bool) -> Conversion:
    if path is not None:
        refuse_existing(path, force)  # it took a while
        target = Path(path).resolve()  # what a link leads to, and not the link
        part = target.with_name(f"{target.name}.part")
        try:
            part.write_bytes(conversion.content)
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise SurgeryError(f"{os.fspath(path)!r} could not be written: {error}.") from error
        conversion.path = os.fspath(path)
    return conversion


def _scripted_or_traced(root: nn.Module, arguments: Arguments | None) -> tuple[str, torch.jit.ScriptModule]:
    if isinstance(root, torch.jit.ScriptModule):
        return "a script already", root
    try:
        return "scripted", torch.jit.script(root)
    except Exception as error:  # of many kinds, one for each thing that TorchScript does not know
        reason = first_line(error).rstrip(".")
        if arguments is None:
            raise SurgeryError(
                f"TorchScript was asked for, and cannot compile this model: {reason}. Give example=, on which it can "
                "be traced instead."
            ) from error
    args, kwargs = arguments
    try:
        made = torch.jit.trace(root, args, example_kwarg_inputs=kwargs or None, strict=False, check_trace=False)
    except Exception as error:
        also = first_line(error).rstrip(".")
        raise SurgeryError(
            f"TorchScript was asked for, and this model can neither be compiled ({reason}) nor traced "
            f"({also}). Convert it to another format, or take out what the messages name."
        ) from error
    return f"traced, since it cannot be scripted: {reason}", made


def _loaded_script(buffer: io.BytesIO) -> torch.jit.ScriptModule:
    buffer.seek(0)
    return torch.jit.load(buffer)


def _loaded_program(buffer: io.BytesIO) -> torch.export.ExportedProgram:
    buffer.seek(0)
    return torch.export.load(buffer)


def _run_onnx(runtime: Any, content: bytes, arguments: Arguments) -> list[torch.Tensor]:
    given = tensors_in(arguments)
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    if len(names) != len(given):
        raise ValueError(f"it takes {len(names)} inputs ({', '.join(names)}), and the example has {len(given)} tensors")
    fed = {name: strided(t.detach()).cpu().numpy() for name, t in zip(names, given, strict=True)}
    return [torch.from_numpy(one) for one in session.run(None, fed)]


def _onnxruntime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - what torch.onnx exports with
    except ImportError as error:
        raise SurgeryError(
            f"to_onnx was asked for a verified ONNX file, and {error.name} is not installed. "
            'Install it with python -m pip install "gradsurgery[onnx]".'
        ) from error
    return onnxruntime


def _needed(example: Example, tool: str) -> Arguments:
    arguments = read_example(example)
    if arguments is None:
        raise SurgeryError(f"{tool} was asked for without an example, on which it runs the model. Give example=.")
    return arguments


def _made(tool: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except SurgeryError:
        raise
    except Exception as error:
        said = first_line(error).rstrip(".")
        raise SurgeryError(
            f"{tool} was asked for, and refuses this model: {type(error).__name__}: {said}. "
            "gs.disabled(model) tells whether it takes the model without the operators."
        ) from error


def _idle(reference: Reference) -> list[str]:
    return [f"{address!r} did not run on the example, so nothing was checked of it" for address in reference.idle]


def _mode(root: nn.Module) -> str:
    if "train" in root.__dict__:  # torch.export puts one there that raises
        return "in the mode that it was exported in"
    return "in training mode" if root.training else "in evaluation mode"


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """What torch warns of while it converts is either said here in the report or for whoever maintains torch."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield warned
