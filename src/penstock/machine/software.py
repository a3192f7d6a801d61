"""Facts about the Python environment: versions, torch's build, notebook, variables.

Nothing here imports torch or NumPy. Reading multiprocessing's start method does not fix it.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.machine.host import is_gil_enabled

_VARIABLES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "HSA_OVERRIDE_GFX_VERSION",
        "LD_PRELOAD",
        "LOCAL_WORLD_SIZE",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTHONHASHSEED",
        "ROCM_PATH",
        "ROCR_VISIBLE_DEVICES",
    }
)
_PREFIXES = ("MIOPEN_", "PYTORCH_")
UNKNOWN_MODULE = "an unknown module"
_GIL_WARNING = re.compile(
    r"The global interpreter lock \(GIL\) has been enabled to load module '([^']+)'"
)


class TorchBuild(NamedTuple):
    """The installed torch and the platform it was built for."""

    version: str | None = None
    build: str = "none"
    build_version: str | None = None


def torch_build() -> TorchBuild:
    """Return the installed torch, from the imported module or else from its ``version.py``.

    Example:
        >>> torch_build().build in {"cuda", "hip", "xpu", "mps", "cpu", "none"}
        True
    """
    loaded = getattr(sys.modules.get("torch"), "version", None)
    if loaded is not None:
        return _describe(vars(loaded))
    written = _read_version_file("torch")
    return TorchBuild() if written is None else _describe(written)


def _read_version_file(package: str) -> dict[str, object] | None:
    """Return the plain values that a package's ``version.py`` assigns, or None without the package.

    Does not import the package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    source = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found: dict[str, object] = {}
    for name, text in re.findall(r"^(\w+)(?: *:[^=]+)? *= *(.+)$", source, re.MULTILINE):
        with suppress(ValueError, SyntaxError):  # a computed value
            found[name] = ast.literal_eval(text)
    return found


def _describe(values: Mapping[str, object]) -> TorchBuild:
    version = None if values.get("__version__") is None else str(values["__version__"])
    for build in ("hip", "cuda", "xpu"):
        if values.get(build):
            return TorchBuild(version=version, build=build, build_version=str(values[build]))
    is_apple = sys.platform == "darwin" and os.uname().machine == "arm64"
    return TorchBuild(version=version, build="mps" if is_apple else "cpu")


def numpy_version() -> str | None:
    """Return the version of NumPy, or None if it is not installed.

    Reads its ``version.py``, as for torch. importlib.metadata takes 15 ms to import and is used
    only for old NumPy releases, which compute their version.
    """
    loaded = getattr(sys.modules.get("numpy"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    written = _read_version_file("numpy")
    if written is None:
        return None
    if "version" in written:
        return str(written["version"])
    from importlib.metadata import version

    return version("numpy")


def has_gpu_context() -> bool:
    """Return True if this process has already opened a GPU. Always False without torch.

    Does not call ``torch.cuda.is_available()``, because on ROCm that can open the GPU.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def is_notebook() -> bool:
    """Return True if this code runs in a notebook: Jupyter, VS Code, Colab, Kaggle, Databricks.

    Importing ipykernel is not enough, because programs outside a notebook do it too. There must be
    a kernel.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if callable(get_ipython) else None
    if getattr(shell, "kernel", None) is not None:
        return True
    # Some Databricks runtimes run notebooks without a Jupyter kernel. Its jobs have no dbutils.
    main = sys.modules.get("__main__")
    return "DATABRICKS_RUNTIME_VERSION" in os.environ and hasattr(main, "dbutils")


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that affect loading and GPUs, if set.

    Example:
        >>> environment({"OMP_NUM_THREADS": "1", "MIOPEN_LOG_LEVEL": "3", "API_KEY": "secret"})
        {'MIOPEN_LOG_LEVEL': '3', 'OMP_NUM_THREADS': '1'}
    """
    variables = os.environ if variables is None else variables
    return {
        name: variables[name]
        for name in sorted(variables)
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }


def start_method() -> tuple[str, bool]:
    """Return multiprocessing's start method, and whether it is already fixed.

    ``multiprocessing.get_start_method()`` would fix it, and a later ``set_start_method`` in the
    user's script would fail. ``allow_none`` avoids this.

    Example:
        >>> method, is_settled = start_method()
        >>> method in {"fork", "forkserver", "spawn"}
        True
    """
    settled: str | None = multiprocessing.get_start_method(allow_none=True)
    if settled is not None:
        return settled, True
    return multiprocessing.get_all_start_methods()[0], False  # documented: the default is first


def gil_enabled_by() -> str | None:
    """Return the module that turned on the GIL of a free-threaded Python.

    Python turns it on when it imports an extension module that does not declare support for free
    threads, and warns once. The text of that warning, which names the module, stays in the registry
    of the import system. Returns None while the GIL is off, and in a Python that always has it.

    Example:
        >>> gil_enabled_by() is None or is_gil_enabled()
        True
    """
    if "free-threading" not in sys.version or not is_gil_enabled():
        return None
    for importer in ("_frozen_importlib", "_frozen_importlib_external"):
        shown = getattr(sys.modules.get(importer), "__warningregistry__", {})
        for key in list(shown):
            found = _GIL_WARNING.match(str(key[0])) if isinstance(key, tuple) else None
            if found is not None:
                return found[1]
    return UNKNOWN_MODULE  # warnings were off
