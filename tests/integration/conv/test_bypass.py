"""The bypass at the dispatcher: intercepted calls, memory layout of results, and clean removal."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock.conv import bypass_convolutions
from penstock.conv.bypass import Bypass, OverrideTaken, current
from penstock.errors import BadArgument
from support import broken_convolution, scripts
from support.small_network import NUM_LAYERS, X, assert_close, gradients, net

pytestmark = pytest.mark.legacy
IS_OLD = torch.__version__.startswith("1.")
needs_torch_2 = pytest.mark.skipif(IS_OLD, reason="torch 1.13 has no such thing")


@pytest.fixture
def on() -> Iterator[Bypass]:
    """The bypass, enabled while torch's own convolutions raise, so it must intercept all calls."""
    with broken_convolution.breaking("all:raises") as native:
        with bypass_convolutions("on", devices=("cpu",)) as bypass:
            yield bypass
        assert native.num_calls == 0


# -- intercepted calls -----------------------------------------------------------------------------


def test_every_layer_and_gradient_of_a_network_is_caught() -> None:
    native = gradients(net(), X)
    bypass = bypass_convolutions("on", devices=("cpu",))
    with bypass, broken_convolution.breaking("all:raises"):
        ours = gradients(net(), X)
    assert_close(ours, native, 1e-5)
    assert bypass.num_caught == 3 * NUM_LAYERS
    assert bypass.counts["1x1 product"] == 3
    assert bypass.counts["shifts"] == 3


def test_the_control_without_it_fails() -> None:
    with broken_convolution.breaking("all:raises"), pytest.raises(RuntimeError, match="miopen"):
        gradients(net(), X)


def test_autocast_and_checkpointing(on: Bypass) -> None:
    model = net()
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=True)
        assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert on.num_caught == NUM_LAYERS + 3 * NUM_LAYERS


def test_unbatched_input_and_all_padding_modes(on: Bypass) -> None:
    for mode in ("zeros", "reflect", "replicate", "circular"):
        layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
        assert layer(X).shape == (2, 4, 10, 12)
    assert nn.Conv2d(3, 4, 3, padding=1)(X[0]).shape == (4, 10, 12)
    assert on.num_caught == 5


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_and_traced_modules(on: Bypass) -> None:
    scripted = torch.jit.script(net())
    traced = torch.jit.trace(net(), X)
    before = on.num_caught
    torch.testing.assert_close(scripted(X), traced(X))
    assert on.num_caught == before + 2 * NUM_LAYERS


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_module_traced_inside_is_torch_s_again_outside() -> None:
    native = net()(X)
    with bypass_convolutions("on", devices=("cpu",)):
        traced = torch.jit.trace(net(), X)
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds.count("aten::_convolution") == NUM_LAYERS
    assert not {"aten::as_strided", "aten::bmm", "aten::mm"} & set(kinds)
    assert torch.equal(traced(X), native)


@needs_torch_2
def test_vmap_and_other_transforms(on: Bypass) -> None:
    from torch.func import functional_call, grad, jacrev, vmap

    layer = nn.Conv2d(3, 4, 3, padding=1)
    many = torch.stack([layer.weight.detach() * n for n in (1, 2, 3)])
    y = vmap(lambda w: functional.conv2d(X, w, padding=1))(many)
    torch.testing.assert_close(y[2], functional.conv2d(X, many[2], padding=1), atol=1e-4, rtol=1e-4)
    per_sample = vmap(
        grad(lambda p, x: functional_call(layer, p, (x[None],)).sum()), in_dims=(None, 0)
    )(dict(layer.named_parameters()), X)
    assert per_sample["weight"].shape == (2, 4, 3, 3, 3)
    assert jacrev(lambda w: functional.conv2d(X[:1, :, :4, :4], w))(layer.weight).dim() == 8
    assert on.num_caught > 5


@needs_torch_2
def test_an_exported_program(on: Bypass) -> None:
    program = torch.export.export(net().eval(), (X,))
    before = on.num_caught
    assert program.module()(X).shape == (2, 2, 10, 12)
    assert on.num_caught == before + NUM_LAYERS


@needs_torch_2
@pytest.mark.filterwarnings("ignore")
def test_compiled_training_reads_the_results_as_they_lie() -> None:
    """Uses one layer, because more kernels take seconds of C++ compilation; see tests/soak."""
    x = X.contiguous(memory_format=torch.channels_last)
    model = nn.Conv2d(3, 8, 3, 2, 1, bias=False).to(memory_format=torch.channels_last)
    native = gradients(model, x)
    torch._dynamo.reset()
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        ours = gradients(torch.compile(model), x)
    torch._dynamo.reset()
    assert_close(ours, native, 1e-4)
    assert (bypass.num_caught, bypass.num_native) == (3, 0)


# -- memory layout of results ----------------------------------------------------------------------

SHAPES = [
    ((2, 3, 8, 9), (4, 3, 3, 3), False, 1),
    ((2, 4, 8, 9), (4, 1, 3, 3), False, 4),
    ((2, 4, 1, 1), (4, 4, 1, 1), False, 1),
    ((2, 1, 8, 9), (4, 1, 3, 3), False, 1),
    ((1, 4, 8, 9), (4, 4, 3, 3), True, 1),
    ((2, 3, 9), (4, 3, 3), False, 1),
    ((2, 3, 4, 5, 6), (4, 3, 3, 3, 3), False, 1),
]


@needs_torch_2
@pytest.mark.parametrize("which", ["neither", "input", "weight", "both"])
@pytest.mark.parametrize(("shape", "kernel", "is_transposed", "groups"), SHAPES)
def test_strides_are_as_torch_predicts(
    shape: Any, kernel: Any, is_transposed: bool, groups: int, which: str
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    num = len(kernel) - 2
    kind = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}[num]

    def make(size: Any, is_last: bool) -> torch.Tensor:
        return torch.randn(size).contiguous(
            memory_format=kind if is_last else torch.contiguous_format
        )

    arguments = ([1] * num, [1] * num, [1] * num, is_transposed, [0] * num, groups)
    aten = torch.ops.aten

    def passes() -> list[torch.Tensor]:
        x, w = make(shape, which in ("input", "both")), make(kernel, which in ("weight", "both"))
        y = aten.convolution(x, w, None, *arguments)
        dx, dw, _ = aten.convolution_backward(y, x, w, None, *arguments, [True, True, False])
        return [y, dx, dw]

    with FakeTensorMode():
        predicted = [(t.shape, significant(t)) for t in passes()]
    with bypass_convolutions("on", devices=("cpu",)):
        assert [(t.shape, significant(t)) for t in passes()] == predicted


def significant(t: torch.Tensor) -> list[int | None]:
    """Return the strides, without those of axes with one element, which have no meaning."""
    return [s if n > 1 else None for s, n in zip(t.stride(), t.shape, strict=True)]


# -- enabling and disabling ------------------------------------------------------------------------


def test_when_it_is_off_torch_is_as_before_to_the_bit() -> None:
    before = gradients(net(), X)
    with bypass_convolutions("on", devices=("cpu",)):
        gradients(net(), X)
    assert current() is None
    assert all(torch.equal(a, b) for a, b in zip(gradients(net(), X), before, strict=True))


def test_twice_on_is_on_once_and_one_undo_ends_it() -> None:
    first = bypass_convolutions("on", devices=("cpu",))
    second = bypass_convolutions("on", devices=("cpu",))
    net()(X)
    assert first.num_caught == second.num_caught == NUM_LAYERS
    second.undo()
    assert not first.is_on
    net()(X)
    assert first.num_caught == NUM_LAYERS
    first.undo()


def test_a_nested_with_leaves_the_outer_one_on() -> None:
    with bypass_convolutions("on", devices=("cpu",)) as outer:
        with bypass_convolutions("on", devices=("cpu",)):
            pass
        with bypass_convolutions("on", devices=("cpu",), memory_cap_bytes=1 << 20) as other:
            net()(X)
        assert other.num_caught == NUM_LAYERS
        assert outer.is_on
        net()(X)
        assert outer.num_caught == NUM_LAYERS
    assert current() is None


def test_an_exception_inside_undoes_it_as_well() -> None:
    with pytest.raises(ValueError, match="mine"), bypass_convolutions("on", devices=("cpu",)):
        raise ValueError("mine")
    assert current() is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mode": "off"}, "mode='off'"),
        ({"devices": ("tpu",)}, "devices=.*tpu"),
        ({"devices": "tpu"}, "devices='tpu'"),
        ({"devices": ()}, "devices="),
        ({"memory_cap_bytes": "1 GB"}, "memory_cap_bytes='1 GB'"),
        ({"memory_cap_bytes": -5}, "memory_cap_bytes=-5"),
    ],
)
def test_unknown_words_and_numbers_are_refused(arguments: Any, named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        bypass_convolutions(**{"mode": "on", **arguments})
    assert current() is None


def test_one_device_needs_no_list() -> None:
    with bypass_convolutions("on", devices="cpu") as bypass:
        assert bypass.devices == ("cpu",)


def test_a_memory_cap_from_outside_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONV_MEMORY_MB", "3")
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        assert bypass.memory_cap_bytes == 3 << 20


@needs_torch_2
def test_another_library_that_takes_the_override_is_noticed() -> None:
    taker: Any = torch.library.Library("aten", "IMPL")
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        assert bypass.check() == []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"allow_override": True} if torch.__version__ >= "2.8" else {}
            taker.impl("convolution", lambda x, *rest: x, "CPU", **options)
        try:
            with pytest.warns(OverrideTaken, match=r"aten::convolution \(cpu\)"):
                assert bypass.check() == ["aten::convolution (cpu)"]
            weight = torch.ones(1, 1, 1, 1)
            rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
            backward = torch.ops.aten.convolution_backward
            with pytest.warns(OverrideTaken):  # detected during training, without check()
                _ = [backward(weight, weight, weight, *rest) for _ in range(520)]
        finally:
            taker._destroy()
        assert bypass.check() == []


def test_looking_for_others_disturbs_no_convolution_of_another_thread() -> None:
    model = net()
    with torch.no_grad(), bypass_convolutions("on", devices=("cpu",)) as bypass:
        expected = model(X)
        wrong: list[int] = []

        def compute() -> None:
            with torch.no_grad():
                wrong.extend(n for n in range(60) if not torch.equal(model(X), expected))

        thread = threading.Thread(target=compute)
        thread.start()
        while thread.is_alive():
            assert bypass.check() == []
        thread.join()
    assert wrong == []


def test_the_order_of_algorithms_is_fixed_when_determinism_is_asked_for() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with bypass_convolutions("on", devices=("cpu",)):
            first, second = gradients(net(), X), gradients(net(), X)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


class Forgetful(dict[Any, Any]):
    """A dict that stores no plan."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def count_calls(function: Callable[[], Any]) -> int:
    """Return how many functions, of Python or of C, a call of ``function`` calls."""
    count = 0

    def note(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def test_the_hook_adds_few_calls_to_those_of_the_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are counted, not timed: the time of so short a path depends on the machine's load."""
    from penstock.conv.algorithms import patches

    x, w = torch.randn(1, 4, 2, 2), torch.randn(4, 4, 1, 1)
    arguments = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    with torch.no_grad(), bypass_convolutions("on", devices=("cpu",)) as bypass:
        torch.convolution(x, w, *arguments)
        (plan,) = bypass._hook.runner.plans.values()
        algorithm = patches.prepare_forward(plan.geometry, x, w, 1 << 20)
        alone = count_calls(lambda: algorithm(x, w))
        assert count_calls(lambda: torch.convolution(x, w, *arguments)) - alone <= 40
        monkeypatch.setattr(bypass._hook.runner, "plans", Forgetful())
        assert count_calls(lambda: torch.convolution(x, w, *arguments)) - alone > 80  # a new plan


def test_a_kernel_of_triton_s_that_fails_is_left_out_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.conv import tuning
    from penstock.conv.algorithms import triton_launch
    from penstock.conv.algorithms.candidates import Candidate

    def fail(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("this card has no such instruction")

    monkeypatch.setattr(triton_launch, "_failure", "")
    choose = tuning.choose
    fails = Candidate("implicit product", fail, needs_triton=True)
    monkeypatch.setattr(
        tuning, "choose", lambda *rest: choose(*rest) if triton_launch._failure else (fails, True)
    )
    monkeypatch.setattr(tuning, "_unfinished", {"a shape": tuning.Trial([], fails)})
    with bypass_convolutions("on", devices=("cpu",)) as bypass:
        with pytest.warns(RuntimeWarning, match="no such instruction"):
            net()(X)
        assert bypass.num_caught == NUM_LAYERS
    assert "implicit product" not in bypass.counts
    assert not triton_launch.is_available()
    assert not tuning.num_unfinished()  # a shape would start with the failed kernel again


def test_without_a_home_directory_choices_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.machine import cache_folder

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (cache_folder.VARIABLE, "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(RuntimeError):
        cache_folder.cache_folder()
    assert not cache_folder.write_json("choices.json", {})
    assert cache_folder.read_json("choices.json") is None


def test_results_agree_only_if_they_tell_something() -> None:
    from penstock.conv.tuning import _is_close

    right = torch.randn(100)
    assert _is_close(right + 1e-5, right)
    assert _is_close((right * 1.01).bfloat16(), right.bfloat16())
    for wrong in (right + 1, -right, right.roll(1), right * math.nan, right * math.inf):
        assert not _is_close(wrong, right)
        assert not _is_close(right, wrong)
        assert not _is_close(wrong, torch.zeros(100))
    assert not _is_close(torch.zeros(100), torch.zeros(100))
    assert not _is_close(torch.full((1,), math.inf), torch.full((1,), math.inf))


def test_threads_that_look_for_kernels_put_back_triton_s_own_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.conv import kernel_compiler

    settings = SimpleNamespace(jit_cache_hook=None)
    monkeypatch.setattr(kernel_compiler, "_hooks", lambda: settings)
    kernel = SimpleNamespace(module="module", name="kernel")
    is_first, is_second, is_over = (threading.Event() for _ in range(3))
    found: dict[str, list[Any]] = {}

    def launch(description: str) -> None:
        compiled = {"specialization_data": description}
        assert settings.jit_cache_hook(fn=kernel, compile=compiled)

    def first() -> None:
        is_first.set()
        is_second.wait(0.3)
        launch("first")

    def second() -> None:
        is_second.set()
        is_over.wait(0.3)
        launch("second")

    def look(name: str, run: Callable[[], None], done: threading.Event) -> None:
        found[name] = kernel_compiler.capture(run)
        done.set()

    one = threading.Thread(target=look, args=("first", first, is_over))
    other = threading.Thread(target=look, args=("second", second, threading.Event()))
    one.start()
    assert is_first.wait(30)
    other.start()
    one.join(30)
    other.join(30)
    assert found == {name: [("module", "kernel", name)] for name in ("first", "second")}
    assert settings.jit_cache_hook is None


def test_the_file_of_choices_keeps_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.conv import tuning

    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "MAX_SHAPES", 2)
    monkeypatch.setattr(tuning, "_files", {})
    (tmp_path / "choices.json").write_text('{"a": "columns", "b": "aten"}')
    tuning._choices("choices.json")["c"] = "patches"
    monkeypatch.setattr(tuning, "_dirty", {"choices.json"})
    tuning.save()
    kept = json.loads((tmp_path / "choices.json").read_text())
    assert kept == {"b": "aten", "c": "patches"}


def test_measuring_gets_its_share_of_the_time_and_saves_up_little() -> None:
    from penstock.conv import tuning

    tuning.forget()
    try:
        assert tuning.has_time()
        tuning._charge(0.02, counts=False)  # an idle GPU
        assert tuning.has_time()
        started_s = time.perf_counter()
        tuning._charge(0.012)
        assert not tuning.has_time()
        while not tuning.has_time():
            time.sleep(0.01)
            assert time.perf_counter() - started_s < 30
        least_s = (0.012 - tuning.CREDIT_S) / tuning.SHARE
        assert time.perf_counter() - started_s >= 0.9 * least_s
        assert tuning._credit_s <= tuning.CREDIT_S
    finally:
        tuning.forget()


# -- environment variable --------------------------------------------------------------------------

SCRIPT = """
import penstock
import torch
layer = torch.nn.Conv2d(3, 4, 3)
print(layer(torch.zeros(1, 3, 8, 8)).shape)
from penstock.conv.bypass import current
print(current())
"""


@pytest.mark.parametrize(("mode", "said"), [("on", "columns 1"), ("off", "None")])
def test_an_environment_variable_switches_it_on(tmp_path: Path, mode: str, said: str) -> None:
    result = scripts.run(SCRIPT, tmp_path, PENSTOCK_CONV=mode)
    assert result.returncode == 0, result.stderr
    assert said in result.stdout
