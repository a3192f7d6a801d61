"""Verifies a script's loader, or this machine, in a child process of ``penstock verify``."""

from __future__ import annotations

import functools
import json
from typing import Any

from penstock.cli.doctor.script import TrialFailed, run_script
from penstock.cli.doctor.target import Target, find_target
from penstock.cli.doctor.trial import Notes, conduct
from penstock.errors import BadArgument


def main(folder: str, options_text: str) -> None:
    """Called from: the child's command line."""
    options = json.loads(options_text)
    conduct(folder, options, _verify_script if options["target"] else _verify_machine)


def _verify_script(notes: Notes, options: dict[str, Any], deadline: float) -> None:
    target = find_target(options["target"], "verify")
    value = run_script(target, options["arguments"], notes.doing)
    from penstock.verify.comparison import (
        verify,  # late: it imports torch, the script may set it up
    )

    try:
        verdict = verify(
            _maker(value, target),
            epochs=options["epochs"],
            workers=options["workers"],
            max_batches=options["max_batches"],
            tell=lambda setting: notes.doing(f"running {target.name}: {setting}"),
        )
    except BadArgument as error:
        raise TrialFailed("name", f"{target.name}: {error.what}") from error
    notes.save(verdict=verdict.to_dict())


def _maker(value: Any, target: Target) -> Any:
    """A factory, or a loader that is made again; any other iterable is run as it is."""
    from torch.utils.data import DataLoader

    _refuse_dataset(value, target.name, target)
    if isinstance(value, DataLoader):
        return value
    if hasattr(value, "__iter__"):
        return lambda: value

    @functools.wraps(value)
    def make(*arguments: Any, **keywords: Any) -> Any:
        made = value(*arguments, **keywords)
        _refuse_dataset(made, f"what {target.name}() returns", target)
        return made

    return make


def _refuse_dataset(value: Any, name: str, target: Target) -> None:
    from torch.utils.data import Dataset

    kind = value if isinstance(value, type) else type(value)
    is_indexed = hasattr(kind, "__getitem__") and not hasattr(kind, "__iter__")
    if issubclass(kind, Dataset) or is_indexed:
        raise TrialFailed(
            "name",
            f"{name} is a dataset: verify runs a loader",
            cure=f"def make_loader(num_workers=0): ...  # then: penstock verify "
            f"{target.script}:make_loader",
        )


def _verify_machine(notes: Notes, options: dict[str, Any], deadline: float) -> None:
    from penstock.verify.training import verify_training

    verdict = verify_training(tell=lambda device: notes.doing(f"training on {device}"))
    notes.save(verdict=verdict.to_dict())
