"""Every option of a loader, declared once: name, type, default, check and help.

``DataLoader``, ``patch()``, the integrations, ``penstock run`` and the reference page are made from
the classes below. Options that are torch's own (``batch_size``, ``sampler``, ...) are torch's; here
they stand only where ``patch()`` and ``penstock run`` can override them.

Importing this module imports neither torch nor NumPy.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

from penstock.errors import BadArgument, NoSuchDevice

_Function = TypeVar("_Function", bound=Callable[..., Any])
TRACE_SUFFIXES = (".json", ".json.gz", ".html")


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """What to trace, where a path alone does not say it: ``DataLoader(..., trace=Tracing(...))``.

    Args:
        file: Where the trace goes: ``.json``, ``.json.gz``, ``.html`` or ``.perfetto.json.gz``.
        samples: Note each ``dataset[i]`` in workers, and not only the parts of batches.
        steps: Note each transform of torchvision's ``Compose`` by its name.

    Example:
        >>> import penstock
        >>> loader = penstock.DataLoader([1, 2, 3], trace=penstock.Tracing(samples=True))
        >>> [batch.item() for batch in loader]
        [1, 2, 3]
        >>> loader.timeline().num_batches
        3
    """

    file: str | os.PathLike[str] | None = None
    samples: bool = False
    steps: bool = False


# -- checks ----------------------------------------------------------------------------------------
# Each takes the option's name and a value, and returns the value to use, or raises BadArgument.


def check_whole(name: str, value: Any, example: int = 0) -> int:
    """``value`` as a plain int.

    Raises:
        BadArgument: It is not a whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        remedy = f"{name}={example}"
        raise BadArgument(f"{name}={value!r} is not a whole number", remedy=remedy) from None


def check_count(name: str, value: Any, least: int = 0, most: int = 1 << 62) -> int:
    """``value`` as a plain int from ``least`` to ``most``.

    Example:
        >>> check_count("epoch", 3)
        3
    """
    count = check_whole(name, value, least)
    if not least <= count <= most:
        bounds = f"at least {least}" if count < least else f"at most {most}"
        nearest = least if count < least else most
        raise BadArgument(f"{name}={count} must be {bounds}", remedy=f"{name}={nearest}")
    return count


def check_seed(name: str, seed: Any) -> int:
    """``seed`` as a plain int within what ``torch.manual_seed`` takes.

    Example:
        >>> check_seed("seed", 7)
        7
    """
    value = check_whole(name, seed)
    if not -(1 << 63) <= value < 1 << 64:
        raise BadArgument(
            f"{name}={value} does not fit in 64 bits",
            remedy=f"a seed from -2**63 to 2**64 - 1, such as {name}=0",
        )
    return value


def check_num_workers(name: str, num_workers: Any) -> int | str:
    """A number, which torch checks, or "auto".

    Example:
        >>> check_num_workers("num_workers", "auto"), check_num_workers("num_workers", 4)
        ('auto', 4)
    """
    if num_workers != "auto" and not hasattr(type(num_workers), "__index__"):
        raise BadArgument(
            f"{name}={num_workers!r} is neither a number nor 'auto'",
            remedy="DataLoader(..., num_workers='auto')",
        )
    return num_workers  # type: ignore[no-any-return]


def check_prefetch(name: str, depth: Any) -> int:
    """A number of batches to be ahead.

    Example:
        >>> check_prefetch("device_prefetch", 2)
        2
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 1000:
        raise BadArgument(
            f"{name}={depth!r} is no number of batches from 1 to 1000", remedy=f"{name}=2"
        )
    return depth


def check_finish(name: str, finish: Any) -> Any:
    """A function of a batch, or None."""
    if finish is not None and not callable(finish):
        raise BadArgument(
            f"{name}={finish!r} is no function of a batch",
            remedy=f"{name}=penstock.finish(mean=..., std=...)",
        )
    return finish


def check_device(name: str, device: Any) -> Any:
    """``device`` as a ``torch.device``.

    Raises:
        NoSuchDevice: torch does not know a device of that name.
    """
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise NoSuchDevice(
            f"{name}={device!r}: {first_line}",
            remedy="DataLoader(..., device='cuda')",
            device=str(device),
        ) from None


def check_trace(name: str, trace: Any) -> Any:
    """None, False (off), or a Tracing whose file can be written.

    Example:
        >>> check_trace("trace", "run.json").file
        'run.json'
    """
    if trace is None or trace is False:
        return trace
    if trace is True:
        return Tracing()
    if isinstance(trace, (str, os.PathLike)):
        trace = Tracing(file=trace)
    is_sound = isinstance(trace, Tracing) and isinstance(trace.file, (str, os.PathLike, type(None)))
    if not is_sound:
        raise BadArgument(
            f"{name}={trace!r} is no path, no Tracing(...), and neither True nor False",
            remedy="DataLoader(..., trace='run.json')",
        )
    path = None if trace.file is None else os.fspath(trace.file)
    if path is not None and not path.endswith(TRACE_SUFFIXES):
        raise BadArgument(
            f"{name}={path!r}: a trace is written to {', '.join(TRACE_SUFFIXES)}",
            remedy="DataLoader(..., trace='run.json'), or 'run.html' to look at",
        )
    if path is not None:
        _check_writable(name, path)
    return trace


def _check_writable(name: str, path: str) -> None:
    """Fail now, and not after the first epoch, if no file can be made there."""
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        if folder.startswith("~"):
            what, remedy = "only shells know '~'", f"{name}=os.path.expanduser({path!r})"
        elif os.path.exists(folder):
            what, remedy = f"{folder!r} is a file, no folder", "DataLoader(..., trace='run.json')"
        else:
            what, remedy = f"there is no folder {folder!r}", f"mkdir -p {folder}"
        raise BadArgument(f"{name}={path!r}: {what}", remedy=remedy)
    beside = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(beside, "xb"):
            pass
        os.unlink(beside)
    except FileExistsError:
        pass  # another loader of this process writes just now
    except (OSError, ValueError) as error:
        raise BadArgument(
            f"{name}={path!r} cannot be written: {getattr(error, 'strerror', None) or error}",
            remedy="DataLoader(..., trace='/tmp/run.json'), or another folder that is yours",
        ) from None


def _check_on_error(name: str, on_error: Any) -> Any:
    if not callable(on_error):
        BadArgument.unless_one_of(name, on_error, ("raise", "skip", "replace"))
    return on_error


def _check_max_bad(name: str, max_bad: Any) -> float | None:
    is_count = isinstance(max_bad, int) and not isinstance(max_bad, bool) and max_bad >= 0
    is_part = isinstance(max_bad, float) and 0.0 <= max_bad < 1.0
    if max_bad is None or is_count or is_part:
        return max_bad  # type: ignore[no-any-return]
    raise BadArgument(
        f"{name}={max_bad!r} is neither a count from 0 up nor a part from 0.0 to below 1.0",
        remedy="DataLoader(..., max_bad=100) or max_bad=0.01",
    )


def _check_seconds(name: str, seconds: Any) -> float | None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is None or (is_number and 0 < seconds < math.inf):
        return seconds  # type: ignore[no-any-return]
    raise BadArgument(
        f"{name}={seconds!r} is no number of seconds above 0",
        remedy=f"DataLoader(..., {name}=60), or None for no limit",
    )


def _check_choice(*choices: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        BadArgument.unless_one_of(name, value, choices)
        return value

    return check


def _check_optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


# -- declarations ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option; ``name`` and ``type`` are taken from where it is declared.

    Args:
        default: Its value where nothing is said.
        help: What it does, in sentences; the first one stands in ``penstock run --help``.
        check: ``check(name, value)`` returns the value to use, or raises BadArgument.
        flag: How it is written on the command line; "": it cannot be given there.
        metavar: What stands for its value in the command's help; "": the flag takes no value.
        parse: From the text of the command line to a value.
    """

    default: Any
    help: str
    check: Callable[[str, Any], Any] = lambda name, value: value
    flag: str = ""
    metavar: str = ""
    parse: Callable[[str], Any] = str
    name: str = ""
    type: Any = None


def _parse_count_or_auto(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(text)
    return text if text == "auto" else int(text)


def _parse_count_or_part(text: str) -> float:
    value = float(text)
    return int(value) if value % 1 == 0 else value


class SharedOptions(TypedDict, total=False):
    """Options that a loader takes, and ``patch()`` and ``penstock run`` give to every loader."""

    seed: Annotated[
        int | None,
        Option(
            default=None,
            check=_check_optional(check_seed),
            flag="--seed",
            metavar="N",
            parse=int,
            help="Order and randomness are functions of (seed, epoch, position) and nothing else. "
            "None: torch's sampler, and a seed drawn where torch draws its own.",
        ),
    ]
    pool: Annotated[
        str,
        Option(
            default="auto",
            check=_check_choice("auto", "process", "thread", "inline"),
            help='``"process"``, ``"thread"``, ``"inline"``, or ``"auto"``.',
        ),
    ]
    randomness: Annotated[
        str,
        Option(
            default="sample",
            check=_check_choice("sample", "worker"),
            help='``"sample"``: the generators are set before each sample from its position, so '
            'the number of workers changes nothing. ``"worker"``: torch\'s way, one seed per '
            "worker.",
        ),
    ]
    on_error: Annotated[
        str | Callable[[Any, Exception], Any],
        Option(
            default="raise",
            check=_check_on_error,
            flag="--on-error",
            metavar="raise|skip|replace",
            help='What happens to a sample that raises: ``"raise"``; ``"skip"``: the batch is '
            'shorter; ``"replace"``: another sample takes its place; or a function of (index, '
            "error) that returns a sample, or None to skip it.",
        ),
    ]
    max_bad: Annotated[
        float | None,
        Option(
            default=None,
            check=_check_max_bad,
            flag="--max-bad",
            metavar="N|PART",
            parse=_parse_count_or_part,
            help="More bad samples than this in an epoch (a count, or a part below 1.0) are an "
            "error.",
        ),
    ]
    bad_samples_file: Annotated[
        str | os.PathLike[str] | None,
        Option(
            default=None,
            flag="--bad-samples-file",
            metavar="FILE",
            help="A file that gets a line of JSON for each bad sample; ``penstock doctor`` reads "
            "it.",
        ),
    ]
    max_restarts: Annotated[
        int,
        Option(
            default=100,
            check=lambda name, value: check_count(name, value, 0, 1_000_000),
            flag="--max-restarts",
            metavar="N",
            parse=int,
            help="How many workers that died or hung are replaced within ten minutes.",
        ),
    ]
    sample_timeout_s: Annotated[
        float | None,
        Option(
            default=None,
            check=_check_seconds,
            flag="--sample-timeout-s",
            metavar="SECONDS",
            parse=float,
            help="A sample that takes longer counts as hung; None: no limit.",
        ),
    ]
    trace: Annotated[
        str | os.PathLike[str] | Tracing | bool | None,
        Option(
            default=None,
            check=check_trace,
            flag="--trace",
            metavar="FILE",
            help="A path that gets the timeline of the run (.html to look at, or .json); see "
            ":class:`penstock.Tracing`.",
        ),
    ]


class LoaderOptions(SharedOptions, total=False):
    """What ``DataLoader`` takes beyond torch's arguments."""

    shard: Annotated[
        bool,
        Option(
            default=False,
            help="True: this rank's part, as torch.distributed numbers the ranks. Or give ``rank`` "
            "and ``world_size``.",
        ),
    ]
    rank: Annotated[int | None, Option(default=None, help="This rank, where ``shard`` is not set.")]
    world_size: Annotated[
        int | None, Option(default=None, help="The number of ranks, beside ``rank``.")
    ]
    padding: Annotated[
        bool,
        Option(
            default=False,
            help="With ranks: repeat samples from the start until all have equally many.",
        ),
    ]
    device: Annotated[
        Any,
        Option(
            default=None,
            check=_check_optional(check_device),
            help="Batches are copied there, ``device_prefetch`` of them ahead of the step, on a "
            "stream of their own. None: they stay in CPU memory.",
        ),
    ]
    device_prefetch: Annotated[
        int,
        Option(
            default=2,
            check=check_prefetch,
            help="How many batches are copied to the device ahead of the step.",
        ),
    ]
    finish: Annotated[
        Callable[[Any], Any] | None,
        Option(
            default=None,
            check=check_finish,
            help="Applied to each batch on the device: see :func:`penstock.finish`.",
        ),
    ]


class PatchOptions(SharedOptions, total=False):
    """What ``patch()`` and ``penstock run`` take.

    ``num_workers``, ``multiprocessing_context`` and ``persistent_workers`` replace what the code
    says.
    """

    num_workers: Annotated[
        int | str | None,
        Option(
            default=None,
            check=_check_optional(check_num_workers),
            flag="--workers",
            metavar="auto|N",
            parse=_parse_count_or_auto,
            help="The number of workers, instead of what the code says.",
        ),
    ]
    multiprocessing_context: Annotated[
        str | None,
        Option(
            default=None,
            check=_check_optional(_check_choice("spawn", "fork", "forkserver")),
            flag="--start-method",
            metavar="spawn|fork",
            help="How workers are started, instead of what the code says.",
        ),
    ]
    persistent_workers: Annotated[
        bool,
        Option(
            default=False,
            flag="--persistent-workers",
            help="Keep workers between epochs, also where the code does not ask for it.",
        ),
    ]


# -- use -------------------------------------------------------------------------------------------


@functools.cache
def options_of(kind: type) -> dict[str, Option]:
    """The options that a class of this module declares, by name.

    Example:
        >>> options_of(LoaderOptions)["max_restarts"].default
        100
    """
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        (option,) = hint.__metadata__
        found[name] = replace(option, name=name, type=hint.__origin__)
    return found


def read_options(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of ``kind`` with the values given, checked, or their defaults.

    Raises:
        BadArgument: A value is not valid.

    Example:
        >>> read_options(PatchOptions, {"on_error": "skip"})["on_error"]
        'skip'
    """
    known = options_of(kind)
    return {
        name: option.check(name, given[name]) if name in given else option.default
        for name, option in known.items()
    }


def refuse_unknown(function: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise TypeError, as Python does, for a keyword that is not known; names the nearest one.

    Example:
        >>> refuse_unknown("DataLoader", {"num_worker": 2}, {"num_workers": 0})
        Traceback (most recent call last):
        TypeError: DataLoader() got an unexpected keyword argument 'num_worker'. Did you mean \
'num_workers'?
    """
    import difflib

    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            text = f"{function}() got an unexpected keyword argument {name!r}{hint}"
            raise TypeError(text)


def describe_options(kind: type) -> str:
    """The options of ``kind`` as the arguments section of a docstring."""
    import textwrap

    lines = []
    for name, option in options_of(kind).items():
        text = f"{name}: {option.help}"
        lines += textwrap.wrap(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join(lines) + "\n"


def takes_options(kind: type) -> Callable[[_Function], _Function]:
    """Decorate a function of ``**options`` so that its signature names those of ``kind``."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        added = [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=option.type,
            )
            for option in options_of(kind).values()
        ]
        function.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return function

    return decorate
