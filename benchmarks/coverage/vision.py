"""The vision libraries: every architecture of timm and torchvision, every encoder of segmentation_models_pytorch."""

from collections.abc import Callable, Iterator
from typing import Any

import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from segmentation_models_pytorch.encoders import get_encoder_names
from timm.models import get_pretrained_cfg
from timm.models._registry import _model_to_module
from torch import Tensor, nn

from .building import Inputs, Subject, Trial

BATCH = 2
SIDES = (64, 96, 128, 192, 224, 256)


def _images(*shape: int) -> Inputs:
    def inputs(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(5)
        return (torch.randn(BATCH, *shape, generator=generator).to(device),), {}

    return inputs


def _trial(build: Callable[[], nn.Module], channels: int, side: int, said: str = "") -> Trial:
    inputs = _images(channels, side, side)
    return Trial(said or f"{side}", build, inputs, inputs)


def timm_trials(name: str, **more: Any) -> Iterator[Trial]:
    """Sizes to try a model of timm at, the smallest first."""
    config = get_pretrained_cfg(name)
    channels, usual = (config.input_size[0], config.input_size[-1]) if config else (3, 224)
    if config and config.fixed_input_size:
        for side in SIDES:
            if side < usual:
                yield _trial(
                    lambda side=side: timm.create_model(name, img_size=side, **more), channels, side, f"img_size={side}"
                )
    else:
        for side in SIDES:
            if side < usual:
                yield _trial(lambda: timm.create_model(name, **more), channels, side)
    yield _trial(lambda: timm.create_model(name, **more), channels, usual)


def timm_subjects() -> list[Subject]:
    """Every architecture that timm registers."""
    return [
        Subject("timm", name, _model_to_module[name], lambda name=name: timm_trials(name))
        for name in timm.list_models()
    ]


# --- torchvision ----------------------------------------------------------------------------------------------------


def _targets(name: str, side: int) -> list[dict[str, Tensor]]:
    box = torch.tensor([[4.0, 4.0, side * 0.6, side * 0.7], [side * 0.3, side * 0.2, side * 0.9, side * 0.8]])
    target: dict[str, Tensor] = {"boxes": box, "labels": torch.tensor([1, 1])}
    if "mask" in name:
        target["masks"] = torch.ones(2, side, side, dtype=torch.uint8)
    if "keypoint" in name:
        points = torch.tensor([side * 0.4, side * 0.4, 1.0]).repeat(2, 17, 1)
        target["keypoints"] = points
    return [{key: value.clone() for key, value in target.items()} for _ in range(BATCH)]


def _detection_trials(name: str) -> Iterator[Trial]:
    side = 320 if name.startswith("ssd") else 128

    def build() -> nn.Module:
        sized = {} if name.startswith("ssd") else {"min_size": side, "max_size": side}
        return torchvision.models.get_model(name, weights=None, weights_backbone=None, **sized)

    def images(device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(5)
        return [torch.rand(3, side, side, generator=generator).to(device) for _ in range(BATCH)]

    def train(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        targets = [{key: value.to(device) for key, value in target.items()} for target in _targets(name, side)]
        return (images(device), targets), {}

    yield Trial(f"{side}, two boxes", build, train, lambda device: ((images(device),), {}))


def _plain_trials(name: str) -> Iterator[Trial]:
    options: dict[str, Any] = {"weights": None}
    if name.startswith("quantized_"):
        options["quantize"] = False
    if "deeplab" in name or "fcn_" in name or "lraspp" in name:
        options["weights_backbone"] = None
    if "googlenet" in name or "inception" in name:
        options["init_weights"] = False

    def build(**more: Any) -> nn.Module:
        return torchvision.models.get_model(name, **options, **more)

    if name.startswith("raft"):

        def pair(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
            generator = torch.Generator().manual_seed(5)
            one, two = torch.rand(2, 1, 3, 128, 128, generator=generator).to(device)
            return (one, two), {"num_flow_updates": 2}

        yield Trial("128, two images, 2 updates", build, pair, pair)
    elif name.startswith(("mvit", "swin3d", "r3d", "mc3", "r2plus1d", "s3d")):
        for frames, side in ((16, 64), (16, 112), (16, 224)):
            inputs = _images(3, frames, side, side)
            yield Trial(f"{frames} frames of {side}", build, inputs, inputs)
    elif name.startswith(("vit_", "maxvit")):
        side = 56 if name == "vit_h_14" else 64
        if name.startswith("vit_"):
            yield _trial(lambda: build(image_size=side), 3, side, f"image_size={side}")
        yield _trial(build, 3, 224)
    else:
        for side in (*SIDES, 299):
            yield _trial(build, 3, side)


def torchvision_subjects() -> list[Subject]:
    """Every builder that torchvision registers; the quantizable ones before they are quantized."""
    detection = set(torchvision.models.list_models(module=torchvision.models.detection))
    subjects = []
    for name in torchvision.models.list_models():
        trials = _detection_trials if name in detection else _plain_trials
        group = torchvision.models.get_model_builder(name).__module__.rpartition("torchvision.models.")[2]
        subjects.append(Subject("torchvision", name, group, lambda name=name, trials=trials: trials(name)))
    return subjects


# --- segmentation_models_pytorch ------------------------------------------------------------------------------------

_DECODERS = (
    "Unet",
    "FPN",
    "MAnet",
    "UnetPlusPlus",
    "Linknet",
    "PSPNet",
    "DeepLabV3Plus",
    "UPerNet",
    "Segformer",
    "PAN",
)


def smp_subjects() -> list[Subject]:
    """Every encoder under a Unet, and every decoder over a resnet18."""

    def trials(decoder: str, encoder: str) -> Iterator[Trial]:
        for side in (64, 128, 224, 256):
            yield _trial(lambda: getattr(smp, decoder)(encoder, encoder_weights=None), 3, side)

    subjects = [
        Subject("smp", f"Unet({encoder})", "Unet", lambda encoder=encoder: trials("Unet", encoder))
        for encoder in get_encoder_names()
    ]
    for decoder in (*_DECODERS[1:], "DeepLabV3", "DPT"):
        encoder = "tu-vit_tiny_patch16_224" if decoder == "DPT" else "resnet18"
        made = lambda decoder=decoder, encoder=encoder: trials(decoder, encoder)  # noqa: E731
        subjects.append(Subject("smp", f"{decoder}({encoder})", decoder, made))
    return subjects
