"""The facts about a computer that a choice can rest on, as plain values.

``Machine.to_json`` and ``Machine.from_json`` make it something to send: a Windows laptop or a card
that the vendor dropped is replayed from a file, without owning one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, as its driver describes it.

    Args:
        vendor: ``"nvidia"``, ``"amd"``, ``"apple"`` or ``"intel"``.
        architecture: As the compiler names it: ``"sm_90"``, ``"gfx1010"``; None where unknown.
    """

    name: str
    vendor: str
    architecture: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """What one GPU is doing at one moment. None means: its driver does not say.

    Args:
        index: The driver's number of the GPU; ``CUDA_VISIBLE_DEVICES`` does not change it.
        use_percent: Share of the last moment in which at least one kernel ran.
    """

    index: int
    name: str
    use_percent: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A computer, as one of its processes sees it. None means: not known here.

    Args:
        os: ``sys.platform``: ``"linux"``, ``"win32"``, ``"darwin"``.
        num_cpus: Logical cores of the machine; ``num_affine_cpus`` of them are open to this
            process, and ``cpu_quota`` (a cgroup's, in cores) may allow less.
        memory_limit_bytes: The cgroup's limit, where there is one below the machine's memory.
        shm_bytes: Size of ``/dev/shm``.
        max_fds: How many descriptors this process may hold; None also where there is no limit.
        has_proc: Whether ``/proc`` is there on Linux; some chroots and sandboxes have none.
        torch_build: ``"cuda"``, ``"hip"``, ``"xpu"``, ``"mps"``, ``"cpu"``, or ``"none"`` without
            torch; ``torch_build_version`` is the toolkit's, as in ``"12.8"``.
        gpus: As the drivers list them, whatever ``CUDA_VISIBLE_DEVICES`` hides.
        gpus_seen_by: Who described the GPUs: ``"nvml"``, ``"nvidia-smi"``, ``"kfd"``,
            ``"platform"`` (an Apple chip), ``"torch"`` or ``"nobody"``.
        gpu_trouble: What went wrong when the GPUs were looked for; ``""`` if nothing did.
        has_gpu_context: Whether this process has opened a GPU already.
        environment: The variables that matter to loading and to GPUs, where they are set.
        is_start_method_set: Whether multiprocessing's start method is settled, by
            ``set_start_method`` or by a first use (multiprocessing does not keep which).
        decoders: Libraries here that decode JPEG, by import name.
        has_turbo: Whether Pillow was built with libjpeg-turbo.

    Example:
        >>> from penstock import machine
        >>> here = machine()
        >>> Machine.from_json(here.to_json()) == here
        True
    """

    os: str
    os_version: str = ""
    architecture: str = ""
    cpu_model: str = ""
    num_cpus: int = 1
    num_affine_cpus: int | None = None
    cpu_quota: float | None = None
    memory_bytes: int = 0
    available_bytes: int = 0
    memory_limit_bytes: int | None = None
    shm_bytes: int | None = None
    max_fds: int | None = None
    is_notebook: bool = False
    is_frozen: bool = False
    can_start_python: bool = True
    has_proc: bool = True
    python: str = ""
    torch: str | None = None
    numpy: str | None = None
    torch_build: str = "none"
    torch_build_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_seen_by: str = "nobody"
    gpu_trouble: str = ""
    has_gpu_context: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    start_method: str = "spawn"
    is_start_method_set: bool = False
    decoders: tuple[str, ...] = ()
    has_turbo: bool | None = None

    @property
    def usable_cores(self) -> int:
        """Cores this process may really use: affinity and quota counted, at least 1.

        Example:
            >>> Machine(os="linux", num_cpus=64, cpu_quota=1.5).usable_cores
            2
        """
        cores = self.num_affine_cpus or self.num_cpus
        if self.cpu_quota:
            cores = min(cores, -int(-self.cpu_quota // 1))
        return max(1, cores)

    @property
    def num_local_ranks(self) -> int:
        """Processes that train on this machine together, as torchrun says; 1 without it.

        Example:
            >>> Machine(os="linux", environment={"LOCAL_WORLD_SIZE": "8"}).num_local_ranks
            8
        """
        said = self.environment.get("LOCAL_WORLD_SIZE", "")
        return max(1, int(said)) if said.isdecimal() else 1

    @property
    def usable_memory_bytes(self) -> int:
        """Memory this process may really use: the machine's, or the cgroup's limit."""
        return min(self.memory_bytes, self.memory_limit_bytes or self.memory_bytes)

    def to_json(self) -> str:
        """All facts as a JSON object."""
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The machine that ``text`` describes; facts it does not name are unknown.

        Raises:
            ValueError: ``text`` is not a JSON object, names a fact that does not exist, or gives
                one a value of the wrong kind.
        """
        try:
            values: Any = json.loads(text)
        except RecursionError:
            raise ValueError("a machine is a JSON object, not a tower of brackets") from None
        _refuse_unknown(cls, "machine", values)
        if "os" not in values:
            raise ValueError('a machine needs at least its \'os\', as in {"os": "linux"}')
        gpus = values.get("gpus", [])
        for gpu in gpus:
            _refuse_unknown(Gpu, "GPU", gpu)
            if not {"name", "vendor"} <= set(gpu):
                raise ValueError("a GPU needs at least its 'name' and its 'vendor'")
        values["gpus"] = tuple(Gpu(**gpu) for gpu in gpus)
        values["decoders"] = tuple(values.get("decoders", ()))
        return cls(**values)


def _refuse_unknown(kind: type, word: str, values: Any) -> None:
    """A fact that does not exist is a mistake in the file, and would be lost without a word."""
    if not isinstance(values, dict):
        raise ValueError(f"a {word} is a JSON object, not a {type(values).__name__}")
    kinds = {item.name: str(item.type) for item in fields(kind)}
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise ValueError(f"a {word} has no {', '.join(unknown)}")
    for name, value in values.items():
        if not any(_IS_KIND[part.partition("[")[0]](value) for part in kinds[name].split(" | ")):
            raise ValueError(f"{name} of a {word} is {kinds[name]}, not {value!r}")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_IS_KIND: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": _is_count,
    "float": lambda value: _is_count(value) or (isinstance(value, float) and 0 <= value < inf),
    "bool": lambda value: isinstance(value, bool),
    "None": lambda value: value is None,
    "tuple": lambda value: isinstance(value, list),
    "Mapping": lambda value: (
        isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    ),
}
"""What JSON may give for each annotation of a fact."""
