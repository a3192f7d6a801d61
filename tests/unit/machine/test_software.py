"""Versions, torch's build, notebook, environment and start method are read without side effects."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from penstock.machine import software
from penstock.machine.software import (
    TorchBuild,
    environment,
    gil_enabled_by,
    has_gpu_context,
    is_notebook,
    numpy_version,
    start_method,
    torch_build,
)

pytestmark = pytest.mark.legacy

# First lines of torch/version.py in different builds.
OLD_CUDA = "__version__ = '1.13.1+cu117'\ndebug = False\ncuda = '11.7'\nhip = None\n"
OLD_HIP = "__version__ = '1.13.1+rocm5.2'\ndebug = False\ncuda = None\nhip = '5.2.21151-afdc89f8'\n"
NEW_CPU = (
    "from typing import Optional\n\n__all__ = ['__version__', 'cuda']\n__version__ = '2.13.0+cpu'\n"
    "debug = False\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    "xpu: Optional[str] = None\n"
)
NEW_CUDA = NEW_CPU.replace("cpu", "cu128").replace(
    "cuda: Optional[str] = None", "cuda: str = '12.8'"
)


def put(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, version_file: str | None) -> None:
    """Put a package of this name first on the path, as if not yet imported."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    if version_file is not None:
        (folder / name / "version.py").write_text(version_file)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def test_the_imported_torch_is_the_one_that_counts() -> None:
    found = torch_build()
    assert found.version == torch.__version__
    assert (found.build_version is not None) == (found.build in {"cuda", "hip", "xpu"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OLD_CUDA, TorchBuild(version="1.13.1+cu117", build="cuda", build_version="11.7")),
        (
            OLD_HIP,
            TorchBuild(version="1.13.1+rocm5.2", build="hip", build_version="5.2.21151-afdc89f8"),
        ),
        (NEW_CPU, TorchBuild(version="2.13.0+cpu", build="cpu")),
        (NEW_CUDA, TorchBuild(version="2.13.0+cu128", build="cuda", build_version="12.8")),
        ("", TorchBuild(version=None, build="cpu")),
    ],
)
def test_torch_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: TorchBuild
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    put(tmp_path, monkeypatch, "torch", text)
    assert torch_build() == expected
    assert "torch" not in sys.modules


def test_a_cpu_build_on_an_apple_chip_is_for_mps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch, "torch", NEW_CPU)
    monkeypatch.setattr(sys, "platform", "darwin")
    for machine, build in [("arm64", "mps"), ("x86_64", "cpu")]:
        uname = SimpleNamespace(machine=machine)
        monkeypatch.setattr(software.os, "uname", lambda uname=uname: uname, raising=False)
        assert torch_build().build == build


def test_without_torch_there_is_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: None)
    assert torch_build() == TorchBuild()
    monkeypatch.delitem(sys.modules, "numpy")
    assert numpy_version() is None


def test_numpy_is_read_where_it_says_its_version_and_asked_of_its_metadata_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numpy_version() == numpy.__version__
    put(tmp_path, monkeypatch, "numpy", 'version = "9.8.7"\n')
    assert numpy_version() == "9.8.7"
    (tmp_path / "numpy" / "version.py").write_text("from ._version import get_versions\n")
    assert numpy_version() == numpy.__version__


def test_a_gpu_is_open_only_if_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_initialized() -> bool:
        return True

    def is_available() -> bool:
        raise AssertionError("this may open the GPU")

    fake: Any = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert not has_gpu_context()  # in the middle of its import
    fake.cuda = SimpleNamespace(is_initialized=is_initialized, is_available=is_available)
    assert has_gpu_context()
    monkeypatch.delitem(sys.modules, "torch")
    assert not has_gpu_context()


def put_shell(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    fake: Any = ModuleType("IPython")
    fake.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", fake)


def test_a_notebook_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not is_notebook()
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert not is_notebook()  # only imported, not running
    put_shell(monkeypatch, None)
    assert not is_notebook()
    put_shell(monkeypatch, SimpleNamespace())  # IPython in a terminal
    assert not is_notebook()
    put_shell(monkeypatch, SimpleNamespace(kernel=object()))
    assert is_notebook()


def test_databricks_is_a_notebook_and_its_jobs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "10.4")
    assert not is_notebook()
    monkeypatch.setattr(sys.modules["__main__"], "dbutils", object(), raising=False)
    assert is_notebook()


def test_the_environment_holds_what_matters_and_no_secrets() -> None:
    wanted = {
        "CUDA_VISIBLE_DEVICES": "",
        "HSA_OVERRIDE_GFX_VERSION": "10.3.0",
        "LD_PRELOAD": "libjemalloc.so",
        "MIOPEN_DEBUG_CONV_GEMM": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONHASHSEED": "0",
    }
    others = {"AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root", "OMP": "1", "MY_PYTORCH_KEY": "x"}
    assert environment({**others, **wanted}) == wanted


def test_the_start_method_is_one_that_exists() -> None:
    assert start_method()[0] in multiprocessing.get_all_start_methods()


GIL_WARNING = (
    "The global interpreter lock (GIL) has been enabled to load module 'cv2.cv2', which has not "
    "declared that it can run safely without the GIL. To override this behavior and keep the GIL "
    "disabled (at your own risk), run with PYTHON_GIL=0 or -Xgil=0."
)


def free_threaded(monkeypatch: pytest.MonkeyPatch, *, is_on: bool, shown: dict[Any, Any]) -> None:
    """Make this Python look like a free-threaded one, with these warnings shown on import."""
    monkeypatch.setattr(sys, "version", "3.14.0 free-threading build (main)")
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: is_on, raising=False)
    importer = sys.modules["_frozen_importlib"]
    monkeypatch.setattr(importer, "__warningregistry__", shown, raising=False)


def test_the_module_that_turned_the_gil_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"version": 1, ("something else", UserWarning, 3): True}
    named = {**shown, (GIL_WARNING, RuntimeWarning, 491): True}
    free_threaded(monkeypatch, is_on=True, shown=named)
    assert gil_enabled_by() == "cv2.cv2"
    free_threaded(monkeypatch, is_on=True, shown=shown)  # the warning was filtered out
    assert gil_enabled_by() == "an unknown module"
    free_threaded(monkeypatch, is_on=False, shown=named)  # kept off by -X gil=0
    assert gil_enabled_by() is None


def test_no_module_turns_on_a_gil_that_is_always_on(monkeypatch: pytest.MonkeyPatch) -> None:
    free_threaded(monkeypatch, is_on=True, shown={(GIL_WARNING, RuntimeWarning, 491): True})
    monkeypatch.setattr(sys, "version", "3.14.0 (main)")
    assert gil_enabled_by() is None
