"""Declarations of all loader options: name, type, default, check and help.

``DataLoader``, ``patch()``, the integrations, ``penstock run`` and the reference page are generated
from the classes below. Each option is declared once. torch's options (``batch_size``, ``sampler``,
...) are declared here only if ``patch()`` and ``penstock run`` can override them.

Importing this module imports neither torch nor NumPy. Annotations are evaluated here, and not kept
as text, because :func:`options_of` reads the options from them.
"""

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar

from penstock.errors import BadArgument, NoSuchDevice
from penstock.named_tuple import NamedTuple as FastNamedTuple

_Function = TypeVar("_Function", bound=Callable[..., Any])
TRACE_SUFFIXES = (".json", ".json.gz", ".html")


class Tracing(NamedTuple):
    """Detailed tracing options: ``DataLoader(..., trace=Tracing(...))``.

    Args:
        file: Output file: ``.json``, ``.json.gz``, ``.html`` or ``.perfetto.json.gz``.
        samples: Record each ``dataset[i]`` call in workers, in addition to the stages of a batch.
        steps: Record each transform of torchvision's ``Compose`` by name.

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
# Each check takes the option's name and a value. It returns the value to use or raises BadArgument.


def check_whole(name: str, value: Any, example: int = 0) -> int:
    """Return ``value`` as a plain int.

    Raises:
        BadArgument: ``value`` is not an integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        remedy = f"{name}={example}"
        raise BadArgument(f"{name}={value!r} must be an integer", remedy=remedy) from None


def check_count(name: str, value: Any, least: int = 0, most: int = 1 << 62) -> int:
    """Return ``value`` as a plain int between ``least`` and ``most``, inclusive.

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
    """Return ``seed`` as a plain int in the range that ``torch.manual_seed`` accepts.

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


def check_arguments(dataset: Any, has_sampler: bool, batch_size: Any, prefetch_factor: Any) -> None:
    """Refuse values that torch accepts but cannot iterate, and strings, which look like numbers.

    torch checks the rest.

    Example:
        >>> check_arguments(list, False, 8, None)
        Traceback (most recent call last):
        TypeError: the dataset is the class list, not an instance of it. Try: DataLoader(list(...))
    """
    if not has_sampler and not hasattr(type(dataset), "__len__"):
        if dataset is None:
            raise TypeError(
                "the dataset is None. Try: DataLoader(dataset), where dataset has __len__ and "
                "__getitem__, or is an IterableDataset. Does the function that makes it return it?"
            )
        if isinstance(dataset, type):
            name = dataset.__qualname__.rpartition(".")[2]
            raise TypeError(
                f"the dataset is the class {name}, not an instance of it. Try: "
                f"DataLoader({name}(...))"
            )
    if isinstance(batch_size, str):
        raise BadArgument(
            f"batch_size={batch_size!r} is a string, not an integer",
            remedy=f"DataLoader(..., batch_size=int({batch_size!r}))",
        )
    if prefetch_factor == 0:
        raise BadArgument(
            "prefetch_factor=0 would load no batch. It must be at least 1",
            remedy="DataLoader(...) without prefetch_factor",
        )


def check_num_workers(name: str, num_workers: Any) -> int | str:
    """Return ``num_workers`` if it is "auto" or an integer. torch checks the range.

    Example:
        >>> check_num_workers("num_workers", "auto"), check_num_workers("num_workers", 4)
        ('auto', 4)
    """
    if num_workers != "auto" and not hasattr(type(num_workers), "__index__"):
        raise BadArgument(
            f"{name}={num_workers!r} must be an integer or 'auto'",
            remedy="DataLoader(..., num_workers='auto')",
        )
    return num_workers  # type: ignore[no-any-return]


def check_in_flight(name: str, in_flight: Any) -> int | str:
    """Return ``in_flight`` if it is "auto" or a number of samples.

    Example:
        >>> check_in_flight("in_flight", "auto"), check_in_flight("in_flight", 64)
        ('auto', 64)
    """
    if isinstance(in_flight, str):
        BadArgument.unless_one_of(name, in_flight, ("auto",))
        return in_flight
    return check_count(name, in_flight, 1, 4096)


def check_prefetch(name: str, depth: Any) -> int:
    """Return ``depth`` if it is a valid number of batches to prefetch.

    Example:
        >>> check_prefetch("device_prefetch", 2)
        2
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= 1000:
        raise BadArgument(
            f"{name}={depth!r} must be a number of batches from 1 to 1000", remedy=f"{name}=2"
        )
    return depth


def check_finish(name: str, finish: Any) -> Any:
    """Return ``finish`` if it is callable or None."""
    if finish is not None and not callable(finish):
        raise BadArgument(
            f"{name}={finish!r} must be a function that takes a batch",
            remedy=f"{name}=penstock.finish(mean=..., std=...)",
        )
    return finish


def check_device(name: str, device: Any) -> Any:
    """Return ``device`` as a ``torch.device``.

    Raises:
        NoSuchDevice: torch does not support a device of this name.
    """
    import torch

    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = f"{name}={device!r}: {str(error).strip().splitlines()[0]}"
        if not isinstance(device, (str, int)):
            problem = f"{name}={device!r} is of type {type(device).__name__}, not a device"
        if isinstance(device, str) and "device type at start of device string" in problem:
            problem = f"{name}={device!r} is not a device of torch. Did you mean 'cuda'?"
        raise NoSuchDevice(
            problem,
            remedy="DataLoader(..., device='cuda')",
            device=str(device),
        ) from None


def check_trace(name: str, trace: Any) -> Any:
    """Return None, False (off), or a Tracing whose file is writable.

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
            f"{name}={trace!r} must be a path, Tracing(...), True or False",
            remedy="DataLoader(..., trace='run.json')",
        )
    path = None if trace.file is None else os.fspath(trace.file)
    if path is not None and not path.endswith(TRACE_SUFFIXES):
        raise BadArgument(
            f"{name}={path!r} must end in one of {', '.join(TRACE_SUFFIXES)}",
            remedy="DataLoader(..., trace='run.json'), or 'run.html' to view in a browser",
        )
    if path is not None:
        _check_writable(name, path)
    return trace


def _check_writable(name: str, path: str) -> None:
    """Raise now, and not after the first epoch, if the file cannot be created."""
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        if folder.startswith("~"):
            what, remedy = "'~' is not expanded", f"{name}=os.path.expanduser({path!r})"
        elif os.path.exists(folder):
            what, remedy = f"{folder!r} is not a folder", "DataLoader(..., trace='run.json')"
        else:
            what, remedy = f"folder {folder!r} does not exist", f"mkdir -p {folder}"
        raise BadArgument(f"{name}={path!r}: {what}", remedy=remedy)
    probe = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(probe, "xb"):
            pass
        os.unlink(probe)
    except FileExistsError:
        pass  # another loader in this process is writing the file now
    except (OSError, ValueError) as error:
        raise BadArgument(
            f"{name}={path!r} cannot be written: {getattr(error, 'strerror', None) or error}",
            remedy="DataLoader(..., trace='/tmp/run.json'), or a different folder you can write to",
        ) from None


ON_ERROR = ("raise", "skip", "replace")


def _check_on_error(name: str, on_error: Any) -> Any:
    if not callable(on_error):
        BadArgument.unless_one_of(name, on_error, ON_ERROR, likely="skip")
    return on_error


def check_max_bad(name: str, max_bad: Any) -> float | None:
    is_count = isinstance(max_bad, int) and not isinstance(max_bad, bool) and max_bad >= 0
    is_part = isinstance(max_bad, float) and 0.0 <= max_bad < 1.0
    if max_bad is None or is_count or is_part:
        return max_bad  # type: ignore[no-any-return]
    raise BadArgument(
        f"{name}={max_bad!r} must be a count (an int, at least 0) or a fraction (a float, from 0.0 "
        "to below 1.0)",
        remedy="DataLoader(..., max_bad=100) or max_bad=0.01",
    )


def _check_seconds(name: str, seconds: Any) -> float | None:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is None or (is_number and 0 < seconds < math.inf):
        return seconds  # type: ignore[no-any-return]
    raise BadArgument(
        f"{name}={seconds!r} must be a positive number of seconds",
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


class Option(FastNamedTuple):
    """One option. ``name`` and ``type`` are filled in from its declaration.

    Args:
        default: Value if the option is not given.
        help: Description in full sentences. ``penstock run --help`` shows the first sentence.
        check: ``check(name, value)`` returns the value to use or raises BadArgument.
        flag: Command-line flag. Empty if the option is not available on the command line.
        metavar: Placeholder for the value in the command's help. Empty if the flag takes no value.
        parse: Converts the command-line text to a value.
    """

    default: Any
    help: str
    check: Callable[[str, Any], Any] = lambda name, value: value
    flag: str = ""
    metavar: str = ""
    parse: Callable[[str], Any] = str
    name: str = ""
    type: Any = None


def _check_remote_workers(name: str, value: Any) -> int | str:
    return value if value == "auto" else check_count(name, value, 0, 100_000)


def _parse_count_or_auto(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(text)
    return text if text == "auto" else int(text)


def _parse_count_or_part(text: str) -> float:
    value = float(text)
    return int(value) if value % 1 == 0 else value


class SharedOptions(TypedDict, total=False):
    """Options of a loader that ``patch()`` and ``penstock run`` can set for every loader."""

    seed: Annotated[
        int | None,
        Option(
            default=None,
            check=_check_optional(check_seed),
            flag="--seed",
            metavar="N",
            parse=int,
            help="Seed for the sample order and the randomness of each sample. Both depend only on "
            "(seed, epoch, position). If None, torch's sampler determines the order, and the seed "
            "is drawn like torch's base seed.",
        ),
    ]
    pool: Annotated[
        str,
        Option(
            default="auto",
            check=_check_choice("auto", "process", "thread", "inline", "ray"),
            help='Where samples are loaded: ``"process"`` (worker processes), ``"thread"`` '
            '(threads), ``"inline"`` (the training process), ``"ray"`` (the nodes of a Ray '
            'cluster), or ``"auto"``.',
        ),
    ]
    randomness: Annotated[
        str,
        Option(
            default="sample",
            check=_check_choice("sample", "worker"),
            help='``"sample"`` seeds the random generators before each sample from its position, '
            "so the number of workers does not affect the samples. "
            '``"worker"`` uses one seed per worker, like torch.',
        ),
    ]
    on_error: Annotated[
        str | Callable[[Any, Exception], Any],
        Option(
            default="raise",
            check=_check_on_error,
            flag="--on-error",
            metavar="raise|skip|replace",
            help='Policy for a sample that raises: ``"raise"`` propagates the error, ``"skip"`` '
            'makes the batch shorter, and ``"replace"`` uses a different sample. In Python, it can '
            "also be a function of (index, error) that returns a sample, or None to skip it.",
        ),
    ]
    max_bad: Annotated[
        float | None,
        Option(
            default=None,
            check=check_max_bad,
            flag="--max-bad",
            metavar="N|FRACTION",
            parse=_parse_count_or_part,
            help="Raise an error if an epoch has more bad samples than this (a count, or a "
            "fraction below 1.0).",
        ),
    ]
    bad_samples_file: Annotated[
        str | os.PathLike[str] | None,
        Option(
            default=None,
            flag="--bad-samples-file",
            metavar="FILE",
            help="Write one line of JSON per bad sample to this file, for ``penstock doctor``.",
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
            help="Maximum number of dead or hung workers to replace within ten minutes.",
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
            help="Treat a sample that takes longer than this many seconds as hung. None means no "
            "limit.",
        ),
    ]
    trace: Annotated[
        str | os.PathLike[str] | Tracing | bool | None,
        Option(
            default=None,
            check=check_trace,
            flag="--trace",
            metavar="FILE",
            help="Write a timeline of the run to this file (.html to view in a browser, or .json). "
            "See :class:`penstock.Tracing` for more options.",
        ),
    ]


class LoaderOptions(SharedOptions, total=False):
    """Options of ``DataLoader`` that torch's DataLoader does not have."""

    shard: Annotated[
        bool,
        Option(
            default=False,
            help="Load only the shard of this rank, as numbered by torch.distributed. "
            "Alternatively, pass ``rank`` and ``world_size``.",
        ),
    ]
    rank: Annotated[
        int | None, Option(default=None, help="Rank of this process, if ``shard`` is not set.")
    ]
    world_size: Annotated[
        int | None, Option(default=None, help="Number of ranks. Required with ``rank``.")
    ]
    padding: Annotated[
        bool,
        Option(
            default=False,
            help="Repeat samples from the start so that all ranks get the same number of samples.",
        ),
    ]
    in_flight: Annotated[
        int | str,
        Option(
            default="auto",
            check=check_in_flight,
            help="Samples of an async dataset (``async def __getitem__``) that each worker loads "
            'at once. ``"auto"`` starts with 8 and doubles that while it pays.',
        ),
    ]
    remote_workers: Annotated[
        int | str,
        Option(
            default=0,
            check=_check_remote_workers,
            help="Workers on other nodes of a Ray cluster, beside those of this machine. They join "
            'after the first batch. ``"auto"``: one for each CPU of the other nodes, once the '
            "training loop waits for batches.",
        ),
    ]
    device: Annotated[
        Any,
        Option(
            default=None,
            check=_check_optional(check_device),
            help="Device to copy batches to. Copies run on a separate stream, ``device_prefetch`` "
            "batches ahead of the training step. If None, batches stay in CPU memory.",
        ),
    ]
    device_prefetch: Annotated[
        int,
        Option(
            default=2,
            check=check_prefetch,
            help="Number of batches to copy to the device ahead of the training step.",
        ),
    ]
    finish: Annotated[
        Callable[[Any], Any] | None,
        Option(
            default=None,
            check=check_finish,
            help="Function applied to each batch on the device. See :func:`penstock.finish`.",
        ),
    ]


class PatchOptions(SharedOptions, total=False):
    """Options of ``patch()`` and ``penstock run``.

    ``num_workers``, ``multiprocessing_context`` and ``persistent_workers`` override the values in
    the user's code.
    """

    num_workers: Annotated[
        int | str | None,
        Option(
            default=None,
            check=_check_optional(check_num_workers),
            flag="--workers",
            metavar="auto|N",
            parse=_parse_count_or_auto,
            help="Number of workers, overriding the value in the code.",
        ),
    ]
    multiprocessing_context: Annotated[
        str | None,
        Option(
            default=None,
            check=_check_optional(_check_choice("spawn", "fork", "forkserver")),
            flag="--start-method",
            metavar="spawn|fork",
            help="Start method of the workers, overriding the value in the code.",
        ),
    ]
    persistent_workers: Annotated[
        bool,
        Option(
            default=False,
            flag="--persistent-workers",
            help="Keep workers between epochs, even if the code does not request it.",
        ),
    ]


# -- use -------------------------------------------------------------------------------------------


@functools.cache
def options_of(kind: type) -> dict[str, Option]:
    """Return the options that a class in this module declares, by name.

    Example:
        >>> options_of(LoaderOptions)["max_restarts"].default
        100
    """
    found = {}
    for name, hint in kind.__annotations__.items():
        (option,) = hint.__metadata__
        found[name] = option._replace(name=name, type=hint.__origin__)
    return found


def read_options(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of ``kind``: the given values, checked, and the defaults of the rest.

    Raises:
        BadArgument: A value is invalid.

    Example:
        >>> read_options(PatchOptions, {"on_error": "skip"})["on_error"]
        'skip'
    """
    known = options_of(kind)
    if kind is LoaderOptions and not options_of(SharedOptions).keys() <= given.keys():
        given = run_defaults.complete(given)
    return {
        name: option.check(name, given[name]) if name in given else option.default
        for name, option in known.items()
    }


class RunDefaults:
    """Options of ``penstock run`` for loaders of the script that are Penstock's own.

    A value that the script gives takes precedence. Patched loaders give all shared options.
    """

    NAMES = ("on_error", "max_bad", "bad_samples_file", "max_restarts", "sample_timeout_s")

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.num_loaders = 0

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a new loader."""
        self.num_loaders += 1
        return {**self.values, **given}


run_defaults = RunDefaults()


def refuse_unknown(
    function: str, given: Mapping[str, Any], known: Mapping[str, Any], otherwise: str = ""
) -> None:
    """Raise TypeError for an unknown keyword, like Python. Suggests the closest known name.

    Args:
        otherwise: The end of the message if no known name is close.

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
            hint = f". Did you mean {near[0]!r}?" if near else otherwise
            text = f"{function}() got an unexpected keyword argument {name!r}{hint}"
            raise TypeError(text)


def describe_options(kind: type) -> str:
    """Return the options of ``kind`` formatted as the ``Args`` section of a docstring."""
    import textwrap

    lines = []
    for name, option in options_of(kind).items():
        text = f"{name}: {option.help}"
        lines += textwrap.wrap(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join(lines) + "\n"


class DocWithOptions:
    """Docstring of a class that ends with its options. Formatting them takes a millisecond."""

    def __init__(self, text: str | None, kind: type) -> None:
        self._text, self._kind = text, kind

    def __get__(self, owner: Any, owner_type: Any = None) -> str:
        return f"{self._text}\n    Args:\n{describe_options(self._kind)}"


def takes_options(kind: type) -> Callable[[_Function], _Function]:
    """Return a decorator that lists the options of ``kind`` in a function's signature.

    The function takes them as ``**options``.
    """

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
