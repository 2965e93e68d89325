"""The commands ``sites``, ``audit``, ``convert`` and ``show``: each calls the package and prints what it says."""

import contextlib
import json
import math
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer
from rich.console import Console

from .. import __version__, convert
from ..audit import audit as audited
from ..conversion import Conversion
from ..draw import matplotlib_classes
from ..errors import SurgeryError, VerificationError
from ..formats import refuse_existing
from ..recipe import apply
from ..review import operations
from ..review import sites as sites_of
from ..surgery import insert_grl, insert_scale_gradient, insert_stop_gradient
from ..tables import one_line
from ..verify import verify
from .patient import Patient, load
from .shown import graph_lines, site_cells

__all__ = ["app"]

REFUSED, USAGE, BROKEN, UNEXPECTED = 1, 2, 3, 4
"""Exit codes: refused with a reason, wrong usage (typer's own), a promise that does not hold, anything unforeseen."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reverse, scale or stop the gradient at a named place of an existing PyTorch model.",
    epilog="Exit codes: 0 done, 1 refused with a reason, 2 wrong usage, 3 a promise does not hold, 4 unforeseen.",
)

Model = Annotated[str, typer.Argument(help="A timm name, package.module:factory, or a .pt or .pt2 file.")]
Grl = Annotated[list[str], typer.Option("--grl", metavar="PLACE[=LAMBD]", help="Reverse the gradient. Repeatable.")]
Scale = Annotated[list[str], typer.Option("--scale", metavar="PLACE=FACTOR", help="Scale it. Repeatable.")]
Stop = Annotated[list[str], typer.Option("--stop", metavar="PLACE", help="Stop it. Repeatable.")]
Recipe = Annotated[Path | None, typer.Option("--recipe", help="A JSON file of what gs.recipe returned.")]
Image = Annotated[Path | None, typer.Option("--image", help="A picture to run the model on.")]
Input = Annotated[
    list[str], typer.Option("--input", metavar="SHAPE", help="Random input, as 2x3x224x224 or 1x128:int64. Repeatable.")
]
Train = Annotated[bool, typer.Option("--train", help="In training mode. Evaluation otherwise.")]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="timm's weights. Random ones otherwise.")]
Trust = Annotated[bool, typer.Option("--trust", help="Read a file although that may run code it holds.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def sites(
    model: Model,
    pattern: Annotated[str, typer.Argument(help="A glob over paths, or PATH:* for the ops in a forward.")] = "**",
    image: Image = None,
    shapes: Input = [],  # noqa: B006 - typer copies it
    pretrained: Pretrained = False,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the places that can be operated on; with an input, those that run, and their shapes."""
    with _told(debug) as out:
        patient = _loaded(model, pretrained, trust)
        example = patient.example(image, shapes) if image is not None or shapes else None
        found = sites_of(patient.model, pattern, example=example)
        if not found:
            raise SurgeryError(f"{pattern!r} matches no place of {model!r}. {model!r} alone lists every module.")
        _print(out, as_json, [site_cells(site) for site in found], found)


@app.command()
def audit(
    model: Model,
    grl: Grl = [],  # noqa: B006
    scale: Scale = [],  # noqa: B006
    stop: Stop = [],  # noqa: B006
    recipe: Recipe = None,
    image: Image = None,
    shapes: Input = [],  # noqa: B006
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it; the ending is the format.")] = None,
    check: Annotated[bool, typer.Option("--verify", help="Hold each operator against its promise too.")] = False,
    train: Train = False,
    pretrained: Pretrained = False,
    trust: Trust = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the picture.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what reaches each parameter with the operators on and off."""
    with _told(debug) as out:
        if plot is not None:
            refuse_existing(plot, force)
            matplotlib_classes()
        patient = _loaded(model, pretrained, trust)
        brought = ", ".join(f"{one_line(row.operator)} at {row.address!r}" for row in operations(patient.model))
        patient = _operated(patient, grl, scale, stop, recipe, train)
        if brought:
            patient.notes.append(f"{model!r} came with {brought}, which is measured with what was asked for here")
            _note(patient.notes[-1])
        if not operations(patient.model):
            raise SurgeryError(
                f"an audit of {model!r} was asked for, and nothing is inserted in it. Give --grl, --scale, --stop or "
                "--recipe."
            )
        args, kwargs = patient.example(image, shapes)
        found = (verify if check else audited)(patient.model, *args, **kwargs)
        if plot is not None:
            try:
                found.plot(plot)
            except (OSError, ValueError) as error:
                raise SurgeryError(f"the picture {str(plot)!r} could not be drawn: {error}.") from error
            _note(f"drawn in {plot}")
        _print(
            out,
            as_json,
            {
                "operators": [asdict(one) for one in found.operators],
                "forward_identical": found.forward_identical,
                "loss": found.loss,
                "plain_loss": found.plain_loss,
                "parameters": [asdict(row) for row in found.rows],
                "blocked": found.blocked,
                "checks": [asdict(one) for one in found.checks],
                "notes": [*patient.notes, *found.notes],
            },
            found,
        )


@app.command("convert")
def convert_(
    model: Model,
    to: Annotated[Literal["torchscript", "exported", "onnx"], typer.Option("--to", help="The format.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    grl: Grl = [],  # noqa: B006
    scale: Scale = [],  # noqa: B006
    stop: Stop = [],  # noqa: B006
    recipe: Recipe = None,
    image: Image = None,
    shapes: Input = [],  # noqa: B006
    for_inference: Annotated[
        bool, typer.Option("--for-inference", help="Without what acts on the gradient alone, in evaluation mode.")
    ] = False,
    train: Train = False,
    pretrained: Pretrained = False,
    trust: Trust = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the operated model as TorchScript, torch.export or ONNX, once it is verified."""
    with _told(debug) as out:
        refuse_existing(output, force)
        patient = _operated(_loaded(model, pretrained, trust), grl, scale, stop, recipe, train)
        example: Any = patient.example(image, shapes)
        if to == "onnx":
            done: Conversion = convert.onnx(patient.model, example, output, force=force)
        elif to == "exported":
            done = convert.exported(patient.model, example, output, for_inference=for_inference, force=force)
        else:
            done = convert.torchscript(patient.model, output, example, for_inference=for_inference, force=force)
        _print(
            out,
            as_json,
            {
                "format": done.format,
                "how": done.how,
                "path": done.path,
                "bytes": len(done.content),
                "checks": [asdict(one) for one in done.checks],
                "notes": [*patient.notes, *done.notes],
            },
            done,
        )


@app.command()
def show(
    model: Model,
    at: Annotated[str, typer.Argument(help="One place; the model itself otherwise.")] = "",
    grl: Grl = [],  # noqa: B006
    scale: Scale = [],  # noqa: B006
    stop: Stop = [],  # noqa: B006
    recipe: Recipe = None,
    pretrained: Pretrained = False,
    trust: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the forward that owns a place as a graph, with the operators marked."""
    with _told(debug) as out:
        patient = _operated(_loaded(model, pretrained, trust), grl, scale, stop, recipe, train=False)
        lines = graph_lines(patient.model, at)
        _print(out, as_json, [asdict(line) for line in lines], "\n".join(map(str, lines)))


@contextlib.contextmanager
def _told(debug: bool) -> Iterator[TextIO]:
    """An error is one message and an exit code, with its traceback only where that was asked for.

    Gives the stdout that results go to; what a model prints goes to stderr.
    """
    try:
        results = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield results
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except (Exception, SystemExit) as error:
        if debug:
            traceback.print_exc()
        known = isinstance(error, SurgeryError)
        said = str(error) if known else f"unforeseen {type(error).__name__}: {error}. --debug shows where."
        sys.stderr.write(f"error: {said}\n")
        code = BROKEN if isinstance(error, VerificationError) else REFUSED if known else UNEXPECTED
        raise typer.Exit(code) from error


def _loaded(name: str, pretrained: bool, trust: bool) -> Patient:
    patient = load(name, pretrained, trust)
    for note in patient.notes:
        _note(note)
    return patient


def _operated(
    patient: Patient, grl: list[str], scale: list[str], stop: list[str], recipe: Path | None, train: bool
) -> Patient:
    """The patient with what the options ask for: a recipe first, then reversals, scales and stops."""
    model = patient.model
    if train:
        try:
            model.train()
        except NotImplementedError:
            raise SurgeryError(
                f"--train was asked for {patient.name!r}, whose mode was fixed when it was exported. Leave it off."
            ) from None
    if recipe is not None:
        model = apply(model, _read_recipe(recipe))
    for text in grl:
        place, lambd = _split(text)
        model = insert_grl(model, place, 1.0 if lambd is None else lambd)
    for text in scale:
        place, factor = _split(text)
        if factor is None:
            raise typer.BadParameter(f"--scale {text!r} has no factor. Give one, as in --scale {text}=0.1.")
        model = insert_scale_gradient(model, place, factor)
    for place in stop:
        model = insert_stop_gradient(model, place)
    patient.model = model
    return patient


def _split(text: str) -> tuple[str, float | None]:
    place, sign, number = text.rpartition("=")
    if not sign or number.endswith("]"):  # an equals sign in a key is a part of the place
        return text, None
    try:
        return place, float(number)
    except ValueError:
        raise typer.BadParameter(f"{text!r} has {number!r} where a number belongs, as in layer3=0.5.") from None


def _read_recipe(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SurgeryError(f"the recipe {str(path)!r} cannot be read: {error}.") from error


def _print(out: TextIO, as_json: bool, data: Any, text: Any) -> None:
    typer.echo(json.dumps(_finite(data), indent=2, allow_nan=False) if as_json else str(text), file=out)


def _finite(value: Any) -> Any:
    """The same with None for each number that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _note(text: str) -> None:
    Console(stderr=True).print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
