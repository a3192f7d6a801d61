"""The functions of penstock.legacy behave like the project helpers that they replace."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import penstock
from penstock import legacy
from penstock import legacy as legacy_names
from penstock.machine.facts import Machine
from penstock.order.seeding import seeded
from penstock.verify import training
from support.paths import MACHINES

pytestmark = pytest.mark.legacy

WINDOWS = Machine(
    os="win32", num_cpus=8, torch_build="cpu", memory_bytes=16 << 30, available_bytes=12 << 30
)


class Draws:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, random.random()


def use(monkeypatch: pytest.MonkeyPatch, facts: Machine) -> None:
    monkeypatch.setattr(legacy_names, "quick_facts", lambda: facts)
    monkeypatch.setattr(legacy_names, "machine", lambda: facts)


def recorded(name: str) -> Machine:
    return Machine.from_json((MACHINES / f"{name}.json").read_text(encoding="utf-8"))


def parameters(function: Any) -> dict[str, Any]:
    return {name: item.default for name, item in inspect.signature(function).parameters.items()}


# -- the names -------------------------------------------------------------------------------------


def test_the_door_has_every_name_of_the_module() -> None:
    assert legacy.__all__ == legacy_names.__all__
    assert all(getattr(legacy, name) is getattr(legacy_names, name) for name in legacy.__all__)


@pytest.mark.parametrize("name", legacy.__all__)
def test_every_name_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(legacy, name).__doc__ or "")


def test_the_arguments_are_those_that_people_give_today() -> None:
    assert list(parameters(legacy.create_dataloader)) == [
        *("dataset", "batch_size", "shuffle", "num_workers", "pin_memory", "drop_last", "seed"),
        *("force_zero_workers_on_windows", "kwargs"),
    ]
    assert list(parameters(legacy.print_dataloader_config)) == [
        *("num_workers", "batch_size", "seed", "shuffle"),
    ]
    assert list(parameters(legacy.set_seed)) == ["seed", "deterministic", "benchmark"]
    assert parameters(legacy.verify_reproducibility) == {"verbose": True}
    assert parameters(legacy.setup_rocm_multiprocessing) == {"force": True, "verbose": True}
    assert parameters(legacy.patch_dataloader) == {"verbose": True}
    for bare in (legacy.is_windows, legacy.get_recommended_num_workers, legacy.print_rocm_info):
        assert parameters(bare) == {}


# -- loaders ---------------------------------------------------------------------------------------


def test_everything_else_is_handed_on() -> None:
    loader = legacy.create_dataloader(
        Draws(), 4, num_workers=1, drop_last=True, persistent_workers=True, on_error="skip"
    )
    assert isinstance(loader, penstock.DataLoader)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (4, 1, True)
    assert (loader.persistent_workers, loader.on_error, loader.shuffle) == (True, "skip", False)
    assert loader.pin_memory == torch.cuda.is_available()
    assert legacy.create_dataloader(Draws(), num_workers="auto").plan.num_workers.source != "asked"


def test_on_windows_workers_are_kept_and_the_plan_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, WINDOWS)
    loader = legacy.create_dataloader(Draws(), num_workers=4)
    assert loader.num_workers == 4
    assert legacy_names.WHY_NOT_ZERO in loader.plan.notes[0]
    assert legacy.create_dataloader(Draws()).plan.notes == ()


def test_on_other_systems_the_plan_says_nothing_about_windows() -> None:
    if legacy.is_windows():
        pytest.skip("this is Windows")
    assert legacy.create_dataloader(Draws(), num_workers=2).plan.notes == ()
    loader = legacy.create_dataloader(
        Draws(), num_workers=2, force_zero_workers_on_windows=True, persistent_workers=True
    )
    assert loader.num_workers == 2


@pytest.mark.parametrize("num_workers", [4, "auto"])
def test_zero_on_windows_is_obeyed_with_a_warning_that_it_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, num_workers: Any
) -> None:
    use(monkeypatch, WINDOWS)
    with pytest.warns(UserWarning, match="becomes 0: .* requested but are not needed") as told:
        loader = legacy.create_dataloader(
            Draws(),
            num_workers=num_workers,
            force_zero_workers_on_windows=True,
            persistent_workers=True,
            prefetch_factor=2,
            multiprocessing_context="spawn",
        )
    assert told[0].filename == __file__
    assert loader.num_workers == 0
    assert len(list(loader)) == 12


def test_arguments_that_only_workers_have_are_still_refused_where_nobody_took_the_workers() -> None:
    with pytest.raises(ValueError, match="persistent_workers"):
        legacy.create_dataloader(Draws(), num_workers=0, persistent_workers=True)


# -- worker counts ---------------------------------------------------------------------------------


def test_the_recommended_number_is_the_plan_s() -> None:
    assert legacy.get_recommended_num_workers() == penstock.plan().num_workers.value


def test_the_recommended_number_on_windows_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, WINDOWS)
    assert legacy.is_windows()
    assert legacy.get_recommended_num_workers() == 8


def test_a_container_s_quota_counts_and_not_the_cores_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, recorded("container-2-of-64-cores"))
    assert legacy.get_recommended_num_workers() == 2


def test_the_table_has_the_usual_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, WINDOWS)
    assert legacy.get_safe_num_workers_table() == {n: n for n in (0, 1, 2, 4, 8)}
    use(monkeypatch, recorded("low-memory-4gb"))
    table = legacy.get_safe_num_workers_table()
    assert list(table) == [0, 1, 2, 4, 8]
    legacy.print_safe_num_workers_table()
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("(")[0].split() for line in lines[1:]]
    assert shown == [
        ["requested", str(asked), "->", "safe", str(safe)] for asked, safe in table.items()
    ]


def test_more_than_the_machine_bears_is_lowered_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, Machine(os="linux", num_cpus=8, max_fds=80))
    with pytest.warns(UserWarning, match=r"num_workers=8 becomes 4: only 80 files"):
        assert legacy.get_safe_num_workers(8) == 4
    assert legacy.get_safe_num_workers(8, warn=False) == 4
    with pytest.warns(UserWarning, match="becomes 4"):
        assert legacy.create_dataloader(Draws(), num_workers=8).num_workers == 4


def test_the_configuration_is_printed_with_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, WINDOWS)
    legacy.print_dataloader_config(num_workers=4, batch_size=32, seed=42, shuffle=True)
    shown = capsys.readouterr().out
    for text in ("batch_size", "32", "42", "True", "4 (asked:", "spawn (rule: win32"):
        assert text in shown
    legacy.print_dataloader_config(0, 8)
    assert "drawn like torch's base seed" in capsys.readouterr().out


# -- seeds -----------------------------------------------------------------------------------------


@pytest.fixture
def put_back() -> Iterator[None]:
    """Restore seeds, switches and environment variables after the test."""
    with seeded(0, deterministic=False):
        yield


@pytest.mark.usefixtures("put_back")
def test_set_seed_gives_a_record_that_a_checkpoint_can_hold() -> None:
    info = legacy.set_seed(42, deterministic=True, benchmark=False)
    first = (random.random(), torch.rand(1).item())
    assert (info["seed"], info["deterministic"], info["benchmark"]) == (42, True, False)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()  # such operations only warn
    assert json.loads(json.dumps(info)) == info
    legacy.set_seed(42, deterministic=False)
    assert (random.random(), torch.rand(1).item()) == first
    assert not torch.are_deterministic_algorithms_enabled()


def brief(monkeypatch: pytest.MonkeyPatch, runs: list[bool], *, is_same: bool) -> None:
    """Replace training by one step that records whether determinism was requested."""

    def train(kind: str, is_deterministic: bool) -> training.Trace:
        runs.append(is_deterministic)
        return [("the loss", b"same" if is_same else bytes([len(runs)]))]

    monkeypatch.setattr(training, "train", train)


@pytest.mark.usefixtures("put_back")
def test_reproducibility_is_judged_as_torch_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    brief(monkeypatch, runs, is_same=True)
    assert legacy.verify_reproducibility(verbose=False) is True
    assert set(runs) == {False}
    legacy.set_seed(1, deterministic=True)
    runs.clear()
    assert legacy.verify_reproducibility(verbose=False) is True
    assert set(runs) == {True}


@pytest.mark.usefixtures("put_back")
def test_a_training_that_differs_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brief(monkeypatch, [], is_same=False)
    assert legacy.verify_reproducibility(verbose=False) is False
    assert capsys.readouterr().out == ""
    assert legacy.verify_reproducibility(verbose=True) is False
    shown = capsys.readouterr().out
    assert "first difference: the loss" in shown
    assert "set_seed(42, deterministic=True)" in shown


# -- ROCm ------------------------------------------------------------------------------------------


@pytest.fixture
def start_method() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("start_method")
def test_spawn_is_settled_and_where_it_may_not_be_that_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    multiprocessing.set_start_method("forkserver", force=True)
    legacy.setup_rocm_multiprocessing(force=False)
    assert multiprocessing.get_start_method() == "forkserver"
    assert "still uses 'forkserver': context has already been set" in capsys.readouterr().out
    legacy.setup_rocm_multiprocessing(verbose=False)
    assert multiprocessing.get_start_method() == "spawn"
    assert capsys.readouterr().out == ""


def test_a_patched_loader_loads_with_our_engine(capsys: pytest.CaptureFixture[str]) -> None:
    original = torch.utils.data.DataLoader._get_iterator
    legacy.patch_dataloader(verbose=False)
    try:
        assert capsys.readouterr().out == ""
        loader = torch.utils.data.DataLoader(Draws(), batch_size=6)
        assert type(iter(loader)).__module__.startswith("penstock.")
    finally:
        penstock.unpatch()
    assert torch.utils.data.DataLoader._get_iterator is original


def test_an_rx_5600_xt_is_shown_with_its_override(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, recorded("rx5600xt-rocm52"))
    monkeypatch.setenv("ROCM_PATH", "/opt/rocm-5.2.0")
    legacy.print_rocm_info()
    shown = capsys.readouterr().out
    for text in (
        "5600 XT",
        "gfx1010",
        "(hip",
        "ROCM_PATH",
        "/opt/rocm-5.2.0",
        "forkserver",
        "Try:",
    ):
        assert text in shown
