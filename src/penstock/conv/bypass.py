"""Switches the convolution bypass on and off.

``bypass_convolutions()`` is a call and a context manager; ``PENSTOCK_CONV=auto`` in the environment
and ``penstock run --conv auto`` do the same from outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import torch

from penstock.conv.convolution import (
    ConvolutionPlan,
    ConvolutionRunner,
    memory_cap_from_environment,
)
from penstock.conv.dispatcher_hook import KEYS, DispatcherHook, default_devices
from penstock.conv.geometry import Pass
from penstock.conv.probing.probe import probe
from penstock.errors import BadArgument

Mode = Literal["auto", "on"]
MODES = ("auto", "on")

Broken = frozenset[tuple[str, str, str, str]]
"""Kind, type, layout and pass of what a probe found broken."""


class OverrideTaken(UserWarning):
    """Another library has overridden our kernels; some convolutions do not reach them."""


class Bypass:
    """The bypass, switched on by :func:`bypass_convolutions`.

    Attributes:
        mode: ``"auto"`` or ``"on"``.
        devices: Where convolutions are caught; none where the probe found nothing broken.
        broken: What the probe found, with ``"auto"``.
    """

    def __init__(
        self,
        *,
        mode: Mode,
        devices: Sequence[str],
        memory_cap_bytes: int | None,
        broken: Broken | None,
    ) -> None:
        self.mode = mode
        self.devices = tuple(devices)
        self.broken = broken
        self.memory_cap_bytes = memory_cap_bytes
        self._before: Bypass | None = None
        self._hook = DispatcherHook(
            ConvolutionRunner(memory_cap_bytes), self._is_ours, _warn_of_loss
        )

    @property
    def is_on(self) -> bool:
        """Whether convolutions are caught."""
        return self._hook.is_installed

    @property
    def counts(self) -> dict[str, int]:
        """How many passes each algorithm has computed."""
        return dict(sorted(self._hook.runner.counts.items()))

    @property
    def num_caught(self) -> int:
        """Passes that were computed here."""
        return sum(self._hook.runner.counts.values())

    @property
    def num_native(self) -> int:
        """Calls that were handed on to torch."""
        return self._hook.num_native

    def check(self) -> list[str]:
        """The operators that another library has taken over. Warns if there are any."""
        lost = self._hook.missing()
        if lost:
            _warn_of_loss(lost)
        return lost

    def undo(self) -> None:
        """Switch the bypass off, whoever switched it on. A second call does nothing."""
        _switch(None)

    def __enter__(self) -> Bypass:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_on and kind is None:
            self.check()
        _switch(self._before)

    def __str__(self) -> str:
        if not self.devices:
            return "convolutions are left to torch: the probe found nothing broken"
        caught = ", ".join(f"{name} {num}" for name, num in self.counts.items()) or "none so far"
        state = "" if self.is_on else " (undone)"
        return f"convolutions caught on {', '.join(self.devices)}{state}: {caught}" + (
            f"; handed on to torch: {self.num_native}" if self.num_native else ""
        )

    def _is_ours(self, plan: ConvolutionPlan, dtype: torch.dtype, passes: Sequence[Pass]) -> bool:
        if self.broken is None:
            return True
        layout = "channels_last" if plan.geometry.is_channels_last else "contiguous"
        name = str(dtype).rpartition(".")[2]
        return any((plan.kind, name, layout, which) in self.broken for which in passes)

    @property
    def _options(self) -> tuple[object, ...]:
        return self.mode, self.devices, self.broken, self.memory_cap_bytes


_current: Bypass | None = None


def bypass_convolutions(
    mode: Mode = "auto",
    *,
    devices: Sequence[str] | None = None,
    memory_cap_bytes: int | None = None,
) -> Bypass:
    """Compute convolutions from matrix products, without the vendor's library.

    From here on (or inside ``with``) every convolution of the given devices is computed by
    Penstock, forwards and backwards, whoever calls it: modules, ``torch.nn.functional``, autocast,
    checkpointing, ``torch.func``, TorchScript, compiled and exported models. Calling it again
    changes nothing; ``.undo()`` takes all of it back.

    Args:
        mode: ``"on"`` for all convolutions; ``"auto"`` for those that
            :func:`penstock.conv.probe` finds broken, whose result is kept between runs.
        devices: ``("cuda",)``, which is also ROCm's name, and ``("cpu",)``; by default the GPU if
            there is one that this torch is built for, else the CPU.
        memory_cap_bytes: For the buffers of one call; ``PENSTOCK_CONV_MEMORY_MB`` says it from
            outside. By default 512 MiB on a GPU and 32 MiB on the CPU.

    Raises:
        BadArgument: An unknown mode or device.

    Example:
        >>> x, layer = torch.ones(1, 3, 8, 8), torch.nn.Conv2d(3, 4, 1)
        >>> with bypass_convolutions("on", devices=("cpu",)) as bypass:
        ...     y = layer(x)
        >>> bypass.counts
        {'1x1 product': 1}
        >>> torch.allclose(y, layer(x))
        True
    """
    if mode not in MODES:
        raise BadArgument(
            f"mode={mode!r} is not known; it is one of 'auto', 'on'",
            remedy="penstock.conv.bypass_convolutions('auto')",
        )
    found = tuple(devices) if devices is not None else default_devices()
    unknown = [device for device in found if device not in KEYS]
    if unknown:
        raise BadArgument(
            f"devices={found!r}: {unknown[0]!r} is not known; there are 'cuda' and 'cpu'",
            remedy="penstock.conv.bypass_convolutions('on', devices=('cuda',))",
        )
    broken = None
    if mode == "auto":
        all_broken = {device: probe(device).broken for device in found}
        found = tuple(device for device in found if all_broken[device])
        broken = frozenset(key for keys in all_broken.values() for key in keys)
    cap = memory_cap_bytes or memory_cap_from_environment()
    bypass = Bypass(mode=mode, devices=found, memory_cap_bytes=cap, broken=broken)
    bypass._before = _current
    if _current is not None and _current.is_on and _current._options == bypass._options:
        return _nested(_current)
    _switch(bypass)
    return bypass


def _nested(outer: Bypass) -> Bypass:
    """The same switch for a `with` inside: its end leaves the outer one on."""
    inner = Bypass.__new__(Bypass)
    inner.__dict__ = {**outer.__dict__, "_before": outer}
    return inner


def _switch(to: Bypass | None) -> None:
    """Make ``to`` the one that is on."""
    global _current
    if to is _current and (to is None or to.is_on):
        return
    if _current is not None:
        _current._hook.remove()
    _current = None
    if to is not None:
        if to.devices:
            to._hook.install(to.devices)
        _current = to


def current() -> Bypass | None:
    """The switch that is on, if one is."""
    return _current


def _warn_of_loss(names: list[str]) -> None:
    warnings.warn(
        f"another library has taken over {', '.join(names)}: such convolutions do not reach "
        "Penstock's bypass. Call penstock.conv.bypass_convolutions after importing it.",
        OverrideTaken,
        stacklevel=3,
    )
