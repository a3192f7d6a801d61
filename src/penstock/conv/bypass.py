"""``bypass_convolutions``: switches the convolution bypass on and off.

It is a function and a context manager. ``PENSTOCK_CONV=auto`` in the environment and
``penstock run --conv auto`` do the same without a change to the script.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

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
"""Kind, dtype, layout and pass of the convolutions that a probe found broken."""


class OverrideTaken(UserWarning):
    """Another library has overridden Penstock's kernels. Some convolutions do not reach them."""


class Bypass:
    """The convolution bypass. Created by :func:`bypass_convolutions`.

    Attributes:
        mode: ``"auto"`` or ``"on"``.
        devices: Devices whose convolutions are intercepted. Empty if the probe found nothing
            broken.
        broken: The convolutions that the probe found broken, in mode ``"auto"``.
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
            ConvolutionRunner(memory_cap_bytes, self._is_ours), _warn_of_loss
        )

    @property
    def is_on(self) -> bool:
        """True while convolutions are intercepted."""
        return self._hook.is_installed

    @property
    def counts(self) -> dict[str, int]:
        """The number of passes that each algorithm has computed."""
        return dict(sorted(self._hook.runner.counts.items()))

    @property
    def num_caught(self) -> int:
        """The number of passes computed by Penstock."""
        return sum(self._hook.runner.counts.values())

    @property
    def num_native(self) -> int:
        """The number of calls passed to torch."""
        return self._hook.num_native

    def check(self) -> list[str]:
        """Return the operators that another library has overridden. Warns if there are any."""
        lost = self._hook.missing()
        if lost:
            _warn_of_loss(lost)
        return lost

    def undo(self) -> None:
        """Switch off the active bypass, even if a different call switched it on.

        A second call does nothing.
        """
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
            return "convolution bypass not needed: the probe found nothing broken"
        caught = ", ".join(f"{name} {num}" for name, num in self.counts.items()) or "none so far"
        state = "" if self.is_on else " (switched off)"
        return f"convolutions intercepted on {', '.join(self.devices)}{state}: {caught}" + (
            f"; passed to torch: {self.num_native}" if self.num_native else ""
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
    devices: str | Sequence[str] | None = None,
    memory_cap_bytes: int | None = None,
) -> Bypass:
    """Compute convolutions with matrix products instead of the vendor's library.

    After this call (or inside ``with``), Penstock computes the forward and backward pass of every
    convolution on the given devices. This includes convolutions called by modules,
    ``torch.nn.functional``, autocast, checkpointing, ``torch.func``, TorchScript, and compiled and
    exported models. Calling it again with the same arguments has no effect. ``.undo()`` reverts it
    completely. Other threads must not compute convolutions while it is switched on or off: torch
    does not guard its list of kernels against that.

    Args:
        mode: ``"on"`` for all convolutions, or ``"auto"`` for those that
            :func:`penstock.conv.probe` finds broken. The probe's result is kept between runs.
        devices: ``"cuda"`` (also for ROCm), ``"cpu"``, or a sequence of both. Defaults to the GPU
            if there is one that this torch is built for, otherwise the CPU.
        memory_cap_bytes: Limit for the buffers of one call. Defaults to the environment variable
            ``PENSTOCK_CONV_MEMORY_MB``, otherwise 512 MiB on a GPU and 32 MiB on the CPU.

    Raises:
        BadArgument: The mode or a device is unknown, or the cap is not a number of bytes.

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
            f"mode={mode!r} must be one of 'auto', 'on'",
            remedy="penstock.conv.bypass_convolutions('auto')",
        )
    given = (devices,) if isinstance(devices, str) else devices
    found = default_devices() if given is None else tuple(given)
    unknown = [device for device in found if device not in KEYS]
    if unknown or not found:
        raise BadArgument(
            f"devices={devices!r} must be 'cuda', 'cpu', or both",
            remedy="penstock.conv.bypass_convolutions('on', devices=('cuda',))",
        )
    given_cap: Any = memory_cap_bytes
    if given_cap is not None and not (isinstance(given_cap, int) and given_cap > 0):
        raise BadArgument(
            f"memory_cap_bytes={memory_cap_bytes!r} must be a positive number of bytes",
            remedy="penstock.conv.bypass_convolutions('on', memory_cap_bytes=64 << 20)",
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
    """Return a bypass for a nested ``with``. Leaving it keeps the outer bypass switched on."""
    inner = Bypass.__new__(Bypass)
    inner.__dict__ = {**outer.__dict__, "_before": outer}
    return inner


def _switch(to: Bypass | None) -> None:
    """Make ``to`` the active bypass. None switches the bypass off."""
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
    """Return the active bypass, or None."""
    return _current


def _warn_of_loss(names: list[str]) -> None:
    warnings.warn(
        f"another library has overridden {', '.join(names)}. These convolutions do not reach "
        "Penstock's bypass. Call penstock.conv.bypass_convolutions after importing that library.",
        OverrideTaken,
        stacklevel=3,
    )
