"""How much of timm the opened capture reaches: one random op in every module class of every family.

For the smallest model of each family and every distinct class outside ``torch.nn`` that runs: a random op of its
forward is wrapped by an operator that changes nothing, once found with an example and once without, and the whole
model's forward and every gradient are compared bit for bit with the untouched model's, in eval and in train mode under
one seed.

    python benchmarks/opened.py out.jsonl [family ...]    # goes on where it stopped
    python benchmarks/opened.py out.jsonl --report
    python benchmarks/opened.py out.jsonl --page docs/limits.md
"""

import argparse
import collections
import gc
import json
import pathlib
import platform
import random
import re
import sys
import warnings
from typing import Any

import timm
import torch
from torch import nn

from gradsurgery.capture.preserve import preserved
from gradsurgery.capture.record import Op, list_ops, record_ops
from gradsurgery.capture.rewrite import OpEdit, rewrite
from gradsurgery.errors import CaptureError

# The smallest of its family is too large to hold its gradients several times, and its blocks are all alike.
SHALLOWER = {"deepseek_vit_412m": {"depth": 2}}


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if any(stride == 0 and size > 1 for size, stride in zip(x.size(), x.stride(), strict=True)):
            return x.clone()  # an expanded tensor cannot be written to
        y = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
        return y.copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def keep(value: Any) -> Any:
    """The value, through a node of its own."""
    if isinstance(value, torch.Tensor):
        return _Keep.apply(value) if value.is_floating_point() and value.requires_grad else value
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(keep(item) for item in value)
    if isinstance(value, dict):
        return type(value)({key: keep(item) for key, item in value.items()})
    return value


def families() -> dict[str, str]:
    """The smallest model of each family, by parameters on the meta device."""
    smallest: dict[str, tuple[int, str]] = {}
    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in timm.create_model(name).parameters())
            except Exception:  # some models cannot be built on meta; a family has others
                continue
            if module not in smallest or size < smallest[module][0]:
                smallest[module] = (size, name)
    return {module: name for module, (_, name) in smallest.items()}


def example(model: nn.Module) -> torch.Tensor:
    """A small input, where the model takes one: nothing here depends on the size, and backwards take long."""
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    x = torch.randn(2, size[0], 96, 96)
    try:
        with preserved(model):
            model.train()(x).sum().backward()
        return x
    except Exception:  # a fixed size, or too small a map at the end
        return torch.randn(2, *size)
    finally:
        model.zero_grad(set_to_none=True)
        model.eval()


def run(model: nn.Module, x: torch.Tensor, training: bool) -> list[Any]:
    # Some models keep biases from one eval forward to the next, with their graph.
    model.train()
    model.train(training)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    random.seed(7)
    x = x.clone().requires_grad_()
    out = model(x)
    tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.stack([t.float().square().mean() for t in tensors]).sum().backward()
    return [*(t.detach() for t in tensors), x.grad, *(p.grad for p in model.parameters())]


def same(first: list[Any], second: list[Any]) -> bool:
    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))

    return len(first) == len(second) and all(
        (a is None) == (b is None) and (a is None or equal(a, b)) for a, b in zip(first, second, strict=True)
    )


def attempt(
    model: nn.Module, owner: nn.Module, op: Op, x: torch.Tensor, plain: dict[bool, list[Any]], bare: bool
) -> tuple[str, str]:
    """Wrap one op, and compare. The operator acts on this one instance of the class."""
    passed: dict[bool, int] = {True: 0, False: 0}

    def method(self: nn.Module, value: Any) -> Any:
        passed[self.training] += 1
        return keep(value)

    cls, patched = type(owner), owner.__dict__.get("forward")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        edit = OpEdit(op.name, None if bare else op.index, "_gs_0")
        body = rewrite(cls, (edit,), patched and patched.__func__)
        owner.__dict__.pop("forward", None)
        owner.__class__ = type(cls.__name__, (cls,), {**body, "_gs_0": method})
        reached = []
        for training in (False, True):
            try:
                result = run(model, x, training)
            except CaptureError as error:
                if "in this call" not in str(error):
                    raise
                reached.append(f"not in {'train' if training else 'eval'}: {error}")
                continue
            finally:
                model.load_state_dict(state)
            if not same(result, plain[training]):
                return "wrong", f"differs in {'train' if training else 'eval'}"
            if passed[training]:
                reached.append("ok")
        if "ok" not in reached:
            return "refused", "; ".join(reached) or "no value passed the operator"
        return "reached", ", ".join(reached)
    except CaptureError as error:
        return "refused", str(error)
    except Exception as error:  # whatever it is, the untouched model runs
        return "wrong", f"{type(error).__name__}: {error}"
    finally:
        model.load_state_dict(state)
        owner.__class__ = cls
        if patched is not None:
            owner.__dict__["forward"] = patched


def owners(model: nn.Module, x: torch.Tensor) -> list[tuple[str, nn.Module]]:
    """The first instance of every class outside ``torch.nn`` that runs in a plain forward."""
    ran: dict[type, tuple[str, nn.Module]] = {}
    handles = [
        module.register_forward_pre_hook(lambda m, _, name=name: ran.setdefault(type(m), (name, m)) and None)
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("torch.")
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return list(ran.values())


def measure(family: str, name: str, done: set[tuple[str, str]], write: Any) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, **SHALLOWER.get(name, {})).eval()
    x = example(model)
    found = owners(model, x)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    plain = {}
    for training in (False, True):
        plain[training] = run(model, x, training)
        model.load_state_dict(state)
        if not same(plain[training], run(model, x, training)):
            raise RuntimeError(f"{name} does not repeat itself")
        model.load_state_dict(state)
    for path, owner in found:
        key = type(owner).__qualname__
        if (family, key) in done:
            continue
        line: dict[str, Any] = {"family": family, "model": name, "class": key, "path": path}
        for way in ("example", "static"):
            model.eval()
            chosen = random.Random(f"{family}.{key}.{way}")
            try:
                ops = record_ops(model, [owner], (x,), {})[0] if way == "example" else list_ops(owner)
            except CaptureError as error:
                line[way] = ["refused", str(error)]
                continue
            if not ops:
                line[way] = ["empty", "no op in its forward"]
                continue
            names = collections.Counter(op.name for op in ops)
            line[f"{way}_ops"] = [len(ops), sum(op.certain or names[op.name] == 1 for op in ops)]
            # Without an example an index may be beyond what the source tells; such an op has to be given one.
            op = chosen.choice([op for op in ops if op.certain or names[op.name] == 1] or ops)
            once = names[op.name] == 1
            line[way] = [*attempt(model, owner, op, x, plain, once), f"{op.name}@{op.index}", op.source, op.text]
        write(line)


def report(path: pathlib.Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    classes = [line for line in lines if "class" in line]
    print(f"{len({line['family'] for line in classes})} families, {len(classes)} classes")
    for way in ("example", "static"):
        results = [line[way] for line in lines if way in line]
        counts = collections.Counter(result[0] for result in results)
        tried = sum(counts.values()) - counts["empty"]
        print(f"{way}: {dict(counts)}, reached {counts['reached'] / max(tried, 1):.2%} of {tried}")
        listed = [line[f"{way}_ops"] for line in lines if f"{way}_ops" in line]
        print(f"    ops listed {sum(n for n, _ in listed)}, addressable {sum(n for _, n in listed)}")
        for line in lines:
            if way in line and line[way][0] in ("wrong", "refused"):
                print("   ", line["model"], line["class"], line[way])
    for line in lines:
        if "error" in line:
            print("not measured:", line["family"], line["error"])


def page(path: pathlib.Path) -> str:
    """The limits of the opened capture as a page, from the lines of a run."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    classes = [line for line in lines if "class" in line]
    text = [
        "# Limits of the opened capture",
        "",
        "Written by `python benchmarks/opened.py out.jsonl --page docs/limits.md`; do not edit.",
        "",
        f"Measured with Python {platform.python_version()}, torch {torch.__version__} (CPU), timm {timm.__version__}: "
        f"the smallest model of each of {len({line['family'] for line in classes})} timm families, {len(classes)} "
        "classes of modules outside `torch.nn` (one instance each). A random op in each forward gets an operator that "
        "changes nothing; the whole model's forward and every gradient are compared bit for bit with the untouched "
        "model's, in eval and in train mode under one seed.",
        "",
        "| | forwards with an op | reached | refused | wrong | ops listed | of these addressable |",
        "|---|---|---|---|---|---|---|",
    ]
    refusals = []
    for way, title in (("example", "with `example=`"), ("static", "without")):
        results = collections.Counter(line[way][0] for line in classes)
        tried = sum(results.values()) - results["empty"]
        listed = [line[f"{way}_ops"] for line in classes if f"{way}_ops" in line]
        figures = [
            tried,
            f"{results['reached']} ({results['reached'] / tried:.2%})",
            results["refused"],
            results["wrong"],
        ]
        figures += [sum(n for n, _ in listed), sum(n for _, n in listed)]
        text.append(f"| {title} | " + " | ".join(map(str, figures)) + " |")
        refusals += [(line, way, line[way]) for line in classes if line[way][0] in ("refused", "wrong")]
    text += ["", "## Every refusal", "", "| model | class | found | op | where | reason |", "|---|---|---|---|---|---|"]
    for line, way, result in refusals:
        reason, op, source, code = [*result[1:], "", "", ""][:4]
        where = f"{pathlib.Path(source).name}: `{code}`" if source else ""
        text.append(f"| {line['model']} | {line['class']} | {way} | {op} | {where} | {reason} |")
    text += ["", pathlib.Path(__file__).with_name("limits.md").read_text().rstrip()]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--page", type=pathlib.Path, help="write the page of limits from the lines of a run")
    options = parser.parse_args()
    if options.page:
        options.page.write_text(page(options.out))
        return
    if options.report:
        report(options.out)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # with more, torch's own backward differs from run to run
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(line["family"], line.get("class", "")) for line in lines if "family" in line}
    with options.out.open("a") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        models = next((line["models"] for line in lines if "models" in line), None)
        if models is None:
            models = families()
            write({"models": models})
        for family, name in models.items():
            if (options.families and family not in options.families) or (family, "") in done:
                continue
            print(family, name, file=sys.stderr, flush=True)
            try:
                measure(family, name, done, write)
                write({"family": family, "finished": name})
            except Exception as error:
                write({"family": family, "error": re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]})
            gc.collect()


if __name__ == "__main__":
    main()
