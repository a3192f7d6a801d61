"""The doctor's report on convolutions."""

from __future__ import annotations

from penstock.cli.doctor.convolutions import (
    convolution_problems,
    convolution_rows,
    probe_convolutions,
)
from penstock.conv.probing.probe import ProbeResult
from penstock.conv.probing.remedies import Remedy, RemedyTrial, best_of, remedies_for
from penstock.conv.probing.steps import StepVerdict, all_steps
from penstock.machine.facts import Gpu, Machine
from penstock.machine.gpu import FoundGpus

NATIVE = Remedy(name="torch's own kernels", line="torch.backends.cudnn.enabled = False")
OURS = Remedy(name="Penstock's bypass", line='penstock.conv.bypass_convolutions("auto")')


def result(word: str, *trials: RemedyTrial) -> ProbeResult:
    verdicts = tuple(
        StepVerdict(
            step=step,
            word=word if step.kind == "strided" else "right",
            note="miopenStatusUnknownError" if step.kind == "strided" else "",
        )
        for step in all_steps()
    )
    return ProbeResult(device="cuda", verdicts=verdicts, trials=trials, about=("torch 1.13.1",))


def trial(remedy: Remedy, num_right: int, ms: float) -> RemedyTrial:
    return RemedyTrial(remedy=remedy, num_right=num_right, num_steps=18, ms=ms)


def test_broken_convolutions_are_harm_with_the_fastest_remedy_that_gets_all_right() -> None:
    found = result("raises", trial(NATIVE, 18, 90.0), trial(OURS, 18, 9.0))
    (problem,) = convolution_problems(found)
    assert problem.severity == "harm"
    assert "18 of 153" in problem.what
    assert "miopenStatusUnknownError" in problem.why
    assert problem.cure.startswith(OURS.line)


def test_a_remedy_that_gets_only_some_right_is_no_advice_however_fast() -> None:
    assert best_of([trial(NATIVE, 17, 1.0), trial(OURS, 18, 9.0)]) == trial(OURS, 18, 9.0)
    assert "no remedy" in result("raises", trial(NATIVE, 17, 1.0)).advice


def test_a_healthy_card_is_no_problem() -> None:
    assert convolution_problems(result("right")) == []
    assert convolution_problems(None) == []


def test_the_table_has_a_row_for_each_kind_and_pass() -> None:
    rows = [text for _, text in convolution_rows(result("crashes"))]
    assert sum("forward" in row for row in rows) == 9
    assert sum("CRASH" in row for row in rows) == 3


def test_a_result_survives_being_written_down() -> None:
    found = result("wrong", trial(OURS, 18, 9.0))
    assert ProbeResult.from_dict(found.to_dict()) == found


def test_without_a_gpu_nothing_is_probed() -> None:
    assert probe_convolutions(None) is None
    assert probe_convolutions(FoundGpus()) is None


def test_an_rx_5600_xt_is_advised_settings_first_and_the_bypass_last() -> None:
    card = Gpu(name="RX 5600 XT", vendor="amd", architecture="gfx1010")
    machine = Machine(
        os="linux",
        torch_build="hip",
        gpus=(card,),
        environment={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"},
    )
    names = [remedy.name for remedy in remedies_for(machine, "cuda")]
    assert names == [
        "new MIOpen kernel search",
        "HSA_OVERRIDE_GFX_VERSION=10.1.0",
        "torch's own kernels",
        "Penstock's bypass",
    ]
