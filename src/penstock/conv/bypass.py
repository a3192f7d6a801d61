"""Convolutions without a convolution library, switched on and off as a whole.

``bypass_convolutions()`` is a call and a context manager; ``PENSTOCK_CONV=auto`` in the environment
and ``penstock run --conv auto`` do the same from outside.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

import torch

from penstock.conv.convolution import CAP_VARIABLE, Plan, Worker
from penstock.conv.dispatcher_hook import KEYS, Hook
from penstock.conv.geometry import Pass
from penstock.errors import BadArgument

Mode = Literal["auto", "on"]
MODES = ("auto", "on")

Broken = frozenset[tuple[str, str, str, str]]
"""Kind, type, layout and pass of what a probe found broken."""


class OverrideTaken(UserWarning):
    """Another library has put its own kernel in our place; some convolutions do not reach us."""


class Bypass:
    """A switch that is on; :func:`bypass_convolutions` makes it.

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
        self._hook = Hook(Worker(memory_cap_bytes), self._is_ours, _warn_of_loss)

    @property
    def is_on(self) -> bool:
        """Do convolutions come here?"""
        return self._hook.is_installed

    @property
    def counts(self) -> dict[str, int]:
        """How many passes each algorithm has computed."""
        return dict(sorted(self._hook.worker.counts.items()))

    @property
    def num_caught(self) -> int:
        """Passes that were computed here."""
        return sum(self._hook.worker.counts.values())

    @property
    def num_native(self) -> int:
        """Calls that were handed on to torch."""
        return self._hook.num_native

    def check(self) -> list[str]:
        """Which operators has somebody else taken over? Warns if there are any."""
        lost = self._hook.missing()
        if lost:
            _warn_of_loss(lost)
        return lost

    def undo(self) -> None:
        """Take everything back, whoever switched it on. Twice is as good as once."""
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

    def _is_ours(self, plan: Plan, dtype: torch.dtype, passes: Sequence[Pass]) -> bool:
        if self.broken is None:
            return True
        layout = "channels_last" if plan.geometry.is_channels_last else "contiguous"
        name = str(dtype).rpartition(".")[2]
        return any((plan.kind, name, layout, which) in self.broken for which in passes)

    def _matches(self, other: Bypass) -> bool:
        return (self.mode, self.devices, self.broken, self.memory_cap_bytes) == (
            other.mode,
            other.devices,
            other.broken,
            other.memory_cap_bytes,
        )


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
        from penstock.conv.probing.probe import probe

        all_broken = {device: probe(device).broken for device in found}
        found = tuple(device for device in found if all_broken[device])
        broken = frozenset(key for keys in all_broken.values() for key in keys)
    bypass = Bypass(
        mode=mode, devices=found, memory_cap_bytes=memory_cap_bytes or _told_cap(), broken=broken
    )
    bypass._before = _current
    if _current is not None and _current.is_on and _current._matches(bypass):
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


def default_devices() -> tuple[str, ...]:
    """The GPU if this torch is built for one that is here, else the CPU. Opens none."""
    if torch.version.cuda or getattr(torch.version, "hip", None):
        from penstock.machine.collect import machine

        if any(gpu.vendor in ("nvidia", "amd") for gpu in machine().gpus):
            return ("cuda",)
    return ("cpu",)


def _told_cap() -> int | None:
    text = os.environ.get(CAP_VARIABLE, "")
    return int(text) << 20 if text.isdecimal() and int(text) else None


def _warn_of_loss(names: list[str]) -> None:
    warnings.warn(
        f"another library has taken over {', '.join(names)}: such convolutions do not reach "
        "Penstock's bypass. Call penstock.conv.bypass_convolutions after importing it.",
        OverrideTaken,
        stacklevel=3,
    )
