"""From an operated model to a file: TorchScript, ``torch.export`` or ONNX, held against the model before it is written.

The tools themselves keep the operators; these functions add what is easily forgotten: to look at the written bytes and
not at the object in memory, to compare every gradient and not the output alone, to say whether a trace was needed.
"""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .conversion import Compared, Conversion, Reference, say
from .edit import withdraw
from .errors import SurgeryError
from .example import Arguments, Example, read_example
from .formats import (
    PathLike,
    loaded_program,
    loaded_script,
    made_by,
    onnx_runtime,
    quiet,
    refuse_existing,
    run_onnx,
    scripted_or_traced,
    written,
)
from .listing import places_of
from .place import Place
from .progress import Progress
from .recorded.place import recorded_graphs, recorded_places, remove_recorded
from .stand_in import keeps_value
from .tap import HeadPlace, TapPlace
from .twin import twin
from .verify import refuse_lost
from .wrappers import bare, refuse_compiled

__all__ = ["exported", "onnx", "to_exported", "to_onnx", "to_torchscript", "torchscript"]

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
    with quiet() as warned, Progress("convert", 3 + SCRIPT_RUNS) as progress:
        how, script = scripted_or_traced(root, arguments)
        decisions = sum(issubclass(one.category, torch.jit.TracerWarning) for one in warned)
        progress.step()
        buffer = io.BytesIO()
        torch.jit.save(script, buffer)
        progress.step()
        loaded = loaded_script(buffer)
        if arguments is None:
            checks, notes = [Compared("outputs and gradients", "not checked", "no example was given")], []
        else:
            reference = Reference(root, arguments, not for_inference, progress)
            checks, notes = reference.hold(loaded, SCRIPT_RUNS), _idle(reference)
            loaded = loaded_script(buffer)  # the runs may have changed it
    if how.startswith("traced"):
        notes.append("a trace has the branches, shapes and mode of the example, and ignores train() and eval()")
    if decisions:
        notes.append(f"{decisions} values of the example became constants of the trace")
    return written(Conversion("torchscript", how, loaded, buffer.getvalue(), checks, notes), path, force)


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
    with quiet(), Progress("convert", 4) as progress:
        program = made_by("torch.export", lambda: torch.export.export(root, args, kwargs, **options))
        progress.step()
        buffer = io.BytesIO()
        made_by("torch.export.save", lambda: torch.export.save(program, buffer))
        progress.step()
        reference = Reference(root, arguments, not for_inference, progress)
        checks = reference.hold(loaded_program(buffer).module())
        loaded = loaded_program(buffer)
    notes = _idle(reference)
    if any(True for _ in places_of(root)):
        notes.append("run_decompositions loses the operators: train program.module() as it is")
    return written(Conversion("exported", _mode(root), loaded, buffer.getvalue(), checks, notes), path, force)


def onnx(
    model: nn.Module, example: Example, path: PathLike | None = None, *, force: bool = False, **options: Any
) -> Conversion:
    """:func:`to_onnx`, with the report instead of the print."""
    runtime = onnx_runtime()
    root, arguments = _checked(model, path, force, for_inference=True), _needed(example, "torch.onnx")
    args, kwargs = arguments
    with quiet(), Progress("convert", 3) as progress:
        reference = Reference(root, arguments, False, progress)
        options = {"dynamo": True, "verbose": False, **options}
        program = made_by("torch.onnx", lambda: torch.onnx.export(root, args, kwargs=kwargs, **options))
        progress.step()
        content = made_by("torch.onnx", lambda: program.model_proto.SerializeToString())
        outputs = made_by("onnxruntime", lambda: run_onnx(runtime, content, arguments))
        check = reference.forward(outputs)
        progress.step()
    notes = [f"run with onnxruntime {runtime.__version__}; ONNX holds no gradient"]
    return written(Conversion("onnx", _mode(root), program, content, [check], notes), path, force)


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


def _needed(example: Example, tool: str) -> Arguments:
    arguments = read_example(example)
    if arguments is None:
        raise SurgeryError(f"{tool} was asked for without an example, on which it runs the model. Give example=.")
    return arguments


def _idle(reference: Reference) -> list[str]:
    return [f"{address!r} did not run on the example, so nothing was checked of it" for address in reference.idle]


def _mode(root: nn.Module) -> str:
    if "train" in root.__dict__:  # torch.export puts one there that raises
        return "in the mode that it was exported in"
    return "in training mode" if root.training else "in evaluation mode"
