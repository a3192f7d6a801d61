"""``Machine`` and ``Gpu``: the facts about a computer, as plain values.

``Machine.to_json`` and ``Machine.from_json`` make a machine portable. A report from a Windows
laptop or from an unsupported GPU can be replayed from a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple


class Gpu(NamedTuple):
    """One GPU, as described by its driver.

    Args:
        vendor: ``"nvidia"``, ``"amd"``, ``"apple"`` or ``"intel"``.
        architecture: The compiler's name: ``"sm_90"``, ``"gfx1010"``. None if unknown.
    """

    name: str
    vendor: str
    architecture: str | None = None
    memory_bytes: int | None = None
    driver: str | None = None


class Machine(NamedTuple):
    """A computer, as seen by one of its processes. None means unknown.

    Args:
        os: ``sys.platform``: ``"linux"``, ``"win32"``, ``"darwin"``.
        num_cpus: Logical cores of the machine. This process can run on ``num_affine_cpus`` of
            them, and ``cpu_quota`` (the cgroup's quota, in cores) may allow less.
        memory_limit_bytes: The cgroup's limit, if it is below the machine's memory.
        shm_bytes: Size of ``/dev/shm``.
        max_fds: The limit on open file descriptors of this process. None also without a limit.
        has_proc: True if Linux has ``/proc``. Some chroots and sandboxes lack it.
        is_gil_enabled: False in a free-threaded Python, as long as its GIL is off.
        gil_enabled_by: The module that turned on the GIL of a free-threaded Python when it was
            imported, or ``"an unknown module"``. None in other Pythons, and while the GIL is off.
        torch_build: ``"cuda"``, ``"hip"``, ``"xpu"``, ``"mps"``, ``"cpu"``, or ``"none"`` without
            torch. ``torch_build_version`` is the toolkit's version, such as ``"12.8"``.
        gpus: All GPUs that the drivers list, including those that ``CUDA_VISIBLE_DEVICES`` hides.
        gpus_seen_by: The source of the GPU list: ``"nvml"``, ``"nvidia-smi"``, ``"kfd"``,
            ``"platform"`` (an Apple chip), ``"torch"`` or ``"nobody"``.
        gpu_trouble: What failed during the GPU search. ``""`` if nothing failed.
        has_gpu_context: True if this process has already opened a GPU.
        environment: The variables that affect loading and GPUs, if set.
        is_start_method_set: True if multiprocessing's start method is fixed, by
            ``set_start_method`` or by first use (multiprocessing does not record which).
        decoders: Import names of the installed libraries that decode JPEG.
        has_turbo: True if Pillow was built with libjpeg-turbo.
        ray_cpus: CPUs of the Ray cluster that this process is connected to. None without one.

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
    is_gil_enabled: bool = True
    gil_enabled_by: str | None = None
    torch: str | None = None
    numpy: str | None = None
    torch_build: str = "none"
    torch_build_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_seen_by: str = "nobody"
    gpu_trouble: str = ""
    has_gpu_context: bool = False
    environment: Mapping[str, str] = MappingProxyType({})
    start_method: str = "spawn"
    is_start_method_set: bool = False
    decoders: tuple[str, ...] = ()
    has_turbo: bool | None = None
    ray_cpus: int | None = None

    @property
    def usable_cores(self) -> int:
        """Number of cores this process can use, given its affinity and quota. At least 1.

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
        """Number of training processes on this machine, from torchrun. 1 without torchrun.

        Example:
            >>> Machine(os="linux", environment={"LOCAL_WORLD_SIZE": "8"}).num_local_ranks
            8
        """
        said = self.environment.get("LOCAL_WORLD_SIZE", "")
        return max(1, int(said)) if said.isdecimal() else 1

    @property
    def usable_memory_bytes(self) -> int:
        """Memory this process can use: the machine's memory or the cgroup's limit."""
        return min(self.memory_bytes, self.memory_limit_bytes or self.memory_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as plain values."""
        gpus = tuple(gpu._asdict() for gpu in self.gpus)
        return {**self._asdict(), "gpus": gpus, "environment": dict(self.environment)}

    def to_json(self) -> str:
        """Return all facts as a JSON object."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Return the machine that ``text`` describes. Facts that it omits are unknown.

        Raises:
            ValueError: ``text`` is not a JSON object, contains an unknown fact, or has a value of
                the wrong type.
        """
        try:
            values: Any = json.loads(text)
        except RecursionError:
            raise ValueError(
                "a machine must be a JSON object, not deeply nested brackets"
            ) from None
        _refuse_unknown(cls, "machine", values)
        if "os" not in values:
            raise ValueError('a machine must have an \'os\', as in {"os": "linux"}')
        gpus = values.get("gpus", [])
        for gpu in gpus:
            _refuse_unknown(Gpu, "GPU", gpu)
            if not {"name", "vendor"} <= set(gpu):
                raise ValueError("a GPU must have a 'name' and a 'vendor'")
        values["gpus"] = tuple(Gpu(**gpu) for gpu in gpus)
        values["decoders"] = tuple(values.get("decoders", ()))
        return cls(**values)


def _refuse_unknown(kind: type[Machine] | type[Gpu], word: str, values: Any) -> None:
    """Raise ValueError for unknown facts, which would otherwise be ignored silently."""
    if not isinstance(values, dict):
        raise ValueError(f"a {word} must be a JSON object, not {type(values).__name__}")
    kinds = {name: hint.__forward_arg__ for name, hint in kind.__annotations__.items()}
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise ValueError(f"unknown {word} field: {', '.join(unknown)}")
    for name, value in values.items():
        if not any(_IS_KIND[part.partition("[")[0]](value) for part in kinds[name].split(" | ")):
            raise ValueError(f"{word} field {name} must be {kinds[name]}, not {value!r}")


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
"""Checks a JSON value against the annotation of a fact."""
