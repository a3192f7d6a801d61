"""Every fact about this computer that a choice can rest on, as plain values.

``Machine.to_json`` and ``Machine.from_json`` make it something to send: a Windows laptop or a card
that the vendor dropped is replayed from a file, without owning one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
class Machine:
    """What is this computer? None means: not known here.

    Args:
        os: ``sys.platform``: ``"linux"``, ``"win32"``, ``"darwin"``.
        num_cpus: Logical cores of the machine; ``num_affine_cpus`` of them are open to this
            process, and ``cpu_quota`` (a cgroup's, in cores) may allow less.
        memory_limit_bytes: The cgroup's limit, where there is one below the machine's memory.
        shm_bytes: Size of ``/dev/shm``.
        torch_build: ``"cuda"``, ``"hip"``, ``"mps"``, ``"cpu"``, or ``"none"`` without torch;
            ``torch_build_version`` is the toolkit's, as in ``"12.8"``.
        gpus_seen_by: Who described the GPUs: ``"nvml"``, ``"nvidia-smi"``, ``"kfd"``, ``"torch"``,
            ``"system_profiler"`` or ``"nobody"``.
        has_gpu_context: Has this process opened a GPU already?
        environment: The variables that matter to loading and to GPUs, where they are set.
        is_start_method_set: Has somebody called ``multiprocessing.set_start_method``?
        decoders: Libraries here that decode JPEG, by import name.
        has_turbo: Was Pillow built with libjpeg-turbo?

    Example:
        >>> from penstock import machine
        >>> Machine.from_json(machine().to_json()) == machine()
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
    python: str = ""
    torch: str | None = None
    numpy: str | None = None
    torch_build: str = "none"
    torch_build_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_seen_by: str = "nobody"
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
            ValueError: ``text`` is not a JSON object, or names a fact that does not exist.
        """
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a machine is a JSON object, not a {type(values).__name__}")
        unknown = sorted(set(values) - {item.name for item in fields(cls)})
        if unknown:
            raise ValueError(f"a machine has no {', '.join(unknown)}")
        if "os" not in values:
            raise ValueError("a machine needs at least its 'os', as in {\"os\": \"linux\"}")
        values["gpus"] = tuple(Gpu(**gpu) for gpu in values.get("gpus", ()))
        values["decoders"] = tuple(values.get("decoders", ()))
        return cls(**values)
