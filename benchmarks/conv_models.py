"""Networks to measure whole training steps of. Some are in plain PyTorch, some in torchvision."""

from __future__ import annotations

import torch
from torch import nn


class Unit(nn.Sequential):
    """Convolution, normalisation, activation."""

    def __init__(self, a: int, b: int, k: int = 1, s: int = 1, act: bool = True) -> None:
        layers: list[nn.Module] = [nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b)]
        super().__init__(*layers, *([nn.SiLU(inplace=True)] if act else []))


class Bottleneck(nn.Module):
    def __init__(self, a: int, b: int, s: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Unit(a, b), Unit(b, b, 3, s), Unit(b, 4 * b, act=False))
        self.skip = Unit(a, 4 * b, 1, s, act=False) if s > 1 or a != 4 * b else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet50() -> nn.Module:
    """Return a network with the layers of ResNet-50, including its 53 convolutions."""
    layers: list[nn.Module] = [Unit(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for place in range(depth):
            layers.append(Bottleneck(channels, width, 2 if stage and not place else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class C2f(nn.Module):
    """YOLOv8's C2f block: a split, pairs of 3x3 convolutions, and a concatenation."""

    def __init__(self, a: int, b: int, num: int) -> None:
        super().__init__()
        self.first, self.half = Unit(a, b), b // 2
        self.pairs = nn.ModuleList(
            nn.Sequential(Unit(self.half, self.half, 3), Unit(self.half, self.half, 3))
            for _ in range(num)
        )
        self.last = Unit((2 + num) * self.half, b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [*self.first(x).split(self.half, 1)]
        for pair in self.pairs:
            parts.append(parts[-1] + pair(parts[-1]))
        return self.last(torch.cat(parts, 1))


class YoloShaped(nn.Module):
    """Backbone, neck and heads of YOLOv8n. The loss is a sum of mean squares."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Unit(3, 16, 3, 2), Unit(16, 32, 3, 2), C2f(32, 32, 1))
        self.p3 = nn.Sequential(Unit(32, 64, 3, 2), C2f(64, 64, 2))
        self.p4 = nn.Sequential(Unit(64, 128, 3, 2), C2f(128, 128, 2))
        self.p5 = nn.Sequential(Unit(128, 256, 3, 2), C2f(256, 256, 1), Unit(256, 256))
        self.up = nn.Upsample(scale_factor=2)
        self.n4, self.n3 = C2f(384, 128, 1), C2f(192, 64, 1)
        self.d4, self.m4 = Unit(64, 64, 3, 2), C2f(192, 128, 1)
        self.d5, self.m5 = Unit(128, 128, 3, 2), C2f(384, 256, 1)
        self.heads = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(Unit(a, b, 3), Unit(b, b, 3), nn.Conv2d(b, out, 1))
                for b, out in ((64, 64), (80, 80))
            )
            for a in (64, 128, 256)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p3 = self.p3(self.stem(x))
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        n4 = self.n4(torch.cat([self.up(p5), p4], 1))
        n3 = self.n3(torch.cat([self.up(n4), p3], 1))
        m4 = self.m4(torch.cat([self.d4(n3), n4], 1))
        m5 = self.m5(torch.cat([self.d5(m4), p5], 1))
        outs = [
            head(f) for f, heads in zip((n3, m4, m5), self.heads, strict=True) for head in heads
        ]
        return torch.stack([out.float().square().mean() for out in outs]).sum()


class UNet(nn.Module):
    """A U-Net of four levels with 64 to 512 channels, two 3x3 convolutions each."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)

        def pair(a: int, b: int) -> nn.Module:
            return nn.Sequential(Unit(a, b, 3), Unit(b, b, 3))

        self.down = nn.ModuleList(pair(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * b, b, 2, 2) for b in widths[-2::-1])
        self.up = nn.ModuleList(pair(2 * b, b) for b in widths[-2::-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            seen.append(x)
        for rise, block, skip in zip(self.rise, self.up, seen[-2::-1], strict=True):
            x = block(torch.cat([rise(x), skip], 1))
        return x


NETWORKS = {
    "ResNet-50": (32, (224, 224)),
    "YOLOv8n": (8, (640, 640)),
    "ConvNeXt-tiny": (32, (224, 224)),
    "MobileNetV3": (32, (224, 224)),
    "U-Net": (4, (256, 256)),
    "3-D ResNet-18": (4, (16, 112, 112)),
}
"""Batch and input size of each network."""


def _make(name: str) -> nn.Module:
    own = {"ResNet-50": resnet50, "YOLOv8n": YoloShaped, "U-Net": UNet}
    if name in own:
        return own[name]()
    from torchvision import models

    made = {
        "ConvNeXt-tiny": models.convnext_tiny,
        "MobileNetV3": models.mobilenet_v3_large,
        "3-D ResNet-18": models.video.r3d_18,
    }
    return made[name]()


def training_step(name: str, device: str, *, is_half: bool, divisor: int = 1):
    """Return a function that runs one training step: forward, backward, SGD."""
    torch.manual_seed(0)
    batch, size = NETWORKS[name]
    batch = max(1, batch // divisor)
    size = tuple(n // (2 if divisor > 1 else 1) for n in size)
    kind = torch.contiguous_format
    if is_half:
        kind = torch.channels_last if len(size) == 2 else torch.channels_last_3d
    model = _make(name).to(device).to(memory_format=kind)
    x = torch.randn(batch, 3, *size, device=device).contiguous(memory_format=kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=is_half):
            loss = model(x)
            if loss.dim():
                loss = loss.float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
