"""Second heads: a value at any place of a model feeds one, in the same forward."""

from typing import Any, List, Optional, TypeVar  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .edit import join, withdraw
from .errors import OperatorError, SurgeryError
from .example import Example, ops_on, read_example, run_on
from .operate import check_operator, expect_places
from .resolve import At, resolve
from .tap import HeadPlace, Tap, TapPlace
from .wrappers import bare, owns_parameters, refuse_compiled

__all__ = ["DomainHead", "attach_head"]

M = TypeVar("M", bound=nn.Module)


def attach_head(
    model: M,
    at: At,
    head: nn.Module,
    *,
    name: str = "aux",
    operator: nn.Module | None = None,
    training_only: bool = False,
    example: Example = None,
) -> M:
    """Feed the value at a place to a second head, and return what it makes of it beside the output of the model.

        gs.attach_head(model, "global_pool", gs.DomainHead(), operator=gs.GradientReversal(), name="domain")
        logits, heads = model(images)
        loss = task_loss(logits, labels) + domain_loss(heads["domain"], domains)

    One forward serves both, so that BatchNorm sees each batch once. The operator acts on the branch alone: the main
    path keeps its plain gradient. This is the network of domain-adversarial training (Ganin et al. 2016,
    https://arxiv.org/abs/1505.07818) without cutting the model by hand.

    The head takes the value after the operators that are at the place already; operators inserted later act after it.
    It becomes the child ``name`` of the model, its parameters come last, and everything else keeps its name. Several
    heads share the one dict. :func:`gradsurgery.remove` takes a head away again.

    Args:
        model: the model that is called: its output becomes ``(output, {name: head(value)})``.
        at: one place, as in :func:`gradsurgery.insert`: a module, an op, an element, an edge.
        head: a module that maps the value to one tensor. Lazy layers are materialised when ``example`` is given, else
            by the first forward, which then has to come before an optimizer is built.
        name: the child of the model, and the key of the dict.
        operator: what acts between the place and the head, such as ``GradientReversal()``.
        training_only: in evaluation, run no head and return the plain output.
        example: inputs to run the model on once, leaving no trace, to check that the place runs.

    Returns:
        The model itself.

    Raises:
        AddressError: where ``at`` does not name exactly one place.
        OperatorError: where the head or the operator is no module.
        SurgeryError: where the name is taken, or a wrapper would not train the head.
    """
    root, arguments = bare(model), read_example(example)
    refuse_compiled(
        root,
        "a head",
        "Attach it to the nn.Module that was scripted or traced, then convert that; or to one around it.",
    )
    _check_head(model, root, head, name)
    if operator is not None:
        check_operator(operator, model)
        if any(True for _ in (*operator.parameters(), *operator.buffers())):
            raise SurgeryError(
                f"the operator of the head {name!r} has parameters or buffers of its own. Put it in front of the head: "
                "nn.Sequential(operator, head)."
            )
    targets = resolve(root, at, "output", ops_on(root, arguments))
    expect_places(targets, 1, at)
    target = targets[0]
    if isinstance(target.module, GraphModule) or isinstance(root, GraphModule):
        raise SurgeryError(
            f"a head was asked for at {target.address!r} of a GraphModule, whose output is fixed in its graph. "
            "Attach the head to the module before it is traced; tracing and exporting keep it."
        )
    tap = Tap(target.address, name)
    done = join(target.module, TapPlace(target.where, tap, operator, target.hops))
    try:
        if arguments is not None:
            _materialise(root, head, tap, operator, arguments)
        root._modules[name] = head.train(root.training)
        path = next(path for path, module in root.named_modules() if module is target.module)
        done += join(root, HeadPlace(name, tap, operator, training_only, tuple(path.split(".")) if path else ()))
    except BaseException:
        withdraw(done)
        root._modules.pop(name, None)
        raise
    return model


class DomainHead(nn.Module):
    """A ready head that tells domains apart: pool, one hidden layer, logits.

        gs.attach_head(model, "layer3", gs.DomainHead(num_domains=2), operator=gs.GradientReversal(), name="domain")

    Features of any layout are pooled to one vector an image: ``(B, C)`` as they are, tokens ``(B, N, C)`` over ``N``,
    maps ``(B, C, H, W)`` and ``(B, H, W, C)`` over ``H`` and ``W``.

    Args:
        num_domains: how many logits.
        hidden: the width of the hidden layer.
        channels: the number of channels ``C``, where it is known. It tells a map's layout and makes the layers at
            once; without it they are lazy, and the layout of a map is told by which two sides are equal.

    Raises:
        OperatorError: in the forward, where the layout cannot be told.
    """

    channels: Optional[int]  # noqa: UP045

    def __init__(self, num_domains: int = 2, hidden: int = 256, channels: int | None = None) -> None:
        super().__init__()
        self.channels = channels
        self.hidden = nn.LazyLinear(hidden) if channels is None else nn.Linear(channels, hidden)
        self.act = nn.ReLU()
        self.logits = nn.Linear(hidden, num_domains)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape ``(B, num_domains)``."""
        if x.ndim == 3:
            x = x.mean(1)
        elif x.ndim == 4:
            x = x.mean((2, 3)) if self._is_channels_first(x.shape) else x.mean((1, 2))  # type: ignore[arg-type]
        elif x.ndim != 2:
            raise OperatorError(
                f"a DomainHead was given features of shape {x.shape}. It takes (B, C), (B, N, C), (B, C, H, W) and "
                "(B, H, W, C). Put a layer that makes one of these in front of it."
            )
        return self.logits(self.act(self.hidden(x)))

    def _is_channels_first(self, shape: List[int]) -> bool:  # noqa: UP006 - the form that TorchScript reads
        channels = self.channels
        if channels is None:
            first, last = shape[2] == shape[3], shape[1] == shape[2]
        else:
            first, last = shape[1] == channels, shape[3] == channels
        if first == last:
            raise OperatorError(
                f"a DomainHead was given a map of shape {shape}, whose layout cannot be told. Give "
                "DomainHead(channels=...) the number of channels, or pool the map in front of it."
            )
        return first


def _check_head(model: nn.Module, root: nn.Module, head: Any, name: str) -> None:
    if not isinstance(head, nn.Module):
        raise OperatorError(
            f"the head {name!r} is {head!r}, which is not an nn.Module instance. Give one, such as gs.DomainHead()."
        )
    if not isinstance(name, str) or not name.isidentifier():
        raise SurgeryError(f"name={name!r} was asked for. It becomes an attribute of the model: give an identifier.")
    if hasattr(root, name):
        raise SurgeryError(
            f"name={name!r} was asked for, but this {type(root).__name__} has an attribute of that name already. "
            "Give another name."
        )
    if any(part is root for part in head.modules()):
        raise OperatorError(f"the head {name!r} contains the model itself. Give a head that stands outside of it.")
    if wrapper := owns_parameters(model):
        raise SurgeryError(
            f"the model is in {wrapper}, which has taken in its parameters already and would not train those of the "
            f"head {name!r}. Attach it before wrapping the model."
        )


def _materialise(root: nn.Module, head: nn.Module, tap: Tap, operator: nn.Module | None, arguments: Any) -> None:
    """Run the head once on the value of the example, so that lazy layers are made and a wrong width is heard of now."""
    tap.arm()
    run_on(root, arguments)
    with torch.no_grad(), torch.random.fork_rng():
        value = tap.take()
        modes = {module: module.training for module in head.modules()}
        try:
            head.eval()(value if operator is None else operator(value))
        except SurgeryError:
            raise
        except Exception as error:
            raise OperatorError(
                f"the head {tap.name!r} was run on the value at {tap.address!r} of the example and raised "
                f"{type(error).__name__}: {error}. Give a head that takes that value."
            ) from error
        finally:
            for module, training in modes.items():
                module.training = training
