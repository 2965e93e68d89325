"""The ops of a forward, listed: from one run on an example, or without one.

Both go by the very sites and counters that an edit goes by, so that ``relu@1`` means the same call to all of them.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..legacy import cure_of
from .anatomy import anatomy
from .flow import in_order
from .present import Present
from .preserve import preserved
from .recorder import Event, Op, Recorder, attach, check_instance, numbered, patched_forward, user_class

__all__ = ["Op", "list_ops", "record_ops"]


def record_ops(
    root: nn.Module, owners: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, list[Op]]:
    """Run a model once on an example, without gradients, and list the ops in the forwards of some of its modules.

    Everything that the run changes is put back: see :func:`.preserve.preserved`. A module that does not run has an
    empty list; of one that runs several times the first run counts.

    Raises:
        CaptureError: where a forward cannot be opened, or the model itself fails on the example.
    """
    found: dict[int, Recorder] = {}
    with preserved(root), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for k, owner in enumerate(owners):
            found[k] = attach(owner)
        try:
            root(*args, **kwargs)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"asked for the ops of a run on the example; during that run the model raised "
                f"{type(error).__name__}: {error}. "
                + cure_of(error, "Give an example that the model takes as it is now (shape, dtype, device).")
            ) from error
        finally:
            calls = {k: recorder.calls.pop(id(owners[k]), []) for k, recorder in found.items()}
    return {k: numbered(runs[0]) if runs else [] for k, runs in calls.items()}


def list_ops(module: nn.Module) -> list[Op]:
    """The ops in the forward of a module, without an example.

    A forward without loops whose branches the module's own attributes decide is listed as written. Of any other, a
    trace by torch.fx with every child a leaf tells in which order the ops run in the present mode. Where that fails
    too, the list is that of the source: one round of every loop, every ``x + y`` that is not known to add numbers, and
    every branch but those that the module's own attributes rule out as they are now. Such a list can hold more than
    what runs, so that the index of an op may be another when the forward runs: it is then not ``certain``. A name that
    it holds once is safe without an index,
    since an edit of a bare name makes sure that it runs once.

    Raises:
        CaptureError: where the forward cannot be opened.
    """
    body = anatomy(user_class(module), patched_forward(module))
    check_instance(module, body)
    written = in_order(body.root, Present(module, body.root))
    uncertain = {site for site, certain in written if not (certain and site.sure)}
    if uncertain:
        traced = _traced(module)
        if traced is not None:
            return numbered(traced)
    return numbered([(site, site.name, None, None) for site, _ in written if site.name is not None], uncertain)


def _traced(module: nn.Module) -> list[Event] | None:
    with preserved(module):
        recorder = attach(module)
        try:
            # As in a call that gives no optional argument.
            defaults = {
                parameter.name: parameter.default
                for parameter in inspect.signature(module.forward).parameters.values()
                if parameter.default is not parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY
            }
            _Leaves().trace(module, concrete_args=defaults)
        except Exception:  # whatever a forward raises when it is given proxies
            return None
        finally:
            runs = recorder.calls.pop(id(module), [])
    return runs[0] if runs else None


class _Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True
