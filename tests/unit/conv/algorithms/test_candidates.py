"""Every convolution algorithm compared with float64: each pass, layout and memory cap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.conv.algorithms import aten, im2col, patches, winograd
from penstock.conv.algorithms.candidates import Candidate, candidates
from penstock.conv.geometry import PASSES, Geometry
from support import conv_cases

pytestmark = pytest.mark.legacy

CAPS = (1 << 30, 1000)
TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", conv_cases.CASES, ids=lambda case: case.name)
def test_every_way_is_within_its_bound(case: conv_cases.Case, dtype: torch.dtype) -> None:
    exact = conv_cases.exact(case, dtype)
    for is_last in (False, True):
        geometry = case.geometry(is_channels_last=is_last)
        for which in PASSES:
            truth, scale = exact.results[which], exact.scales[which]
            for way in every_way(geometry, which, dtype):
                for cap in CAPS:
                    result = way.run(geometry, *exact.arguments(which), cap)
                    assert result.shape == truth.shape
                    off = conv_cases.distance(result, truth, scale)
                    assert off <= conv_cases.bound(way.name, dtype), (which, way.name, cap)


def every_way(geometry: Geometry, which: Any, dtype: torch.dtype) -> list[Candidate]:
    """Return the algorithms for the CPU, and those for a GPU that need no Triton.

    Without torch's own kernels, which call oneDNN on the CPU.
    """
    ways = {
        way.name: way
        for device in ("cuda", "cpu")
        for way in candidates(geometry, which, dtype, device)
        if not way.needs_triton and way.name != aten.NAME
    }
    return [*ways.values()]


def test_torch_s_own_kernels_are_offered_where_their_results_have_the_right_size() -> None:
    others = []
    for case in conv_cases.CASES:
        g = case.geometry(is_channels_last=False)
        x = torch.empty(g.batch, g.in_channels, *g.in_size)
        w = torch.empty(g.out_channels, g.group_in, *g.kernel)
        lists = ([*sizes] for sizes in (g.stride, g.padding, g.dilation))
        size = torch.convolution(x, w, None, *lists, False, [0] * g.num_dims, g.groups).shape
        is_right = tuple(size[2:]) == g.out_size
        is_one_piece = g.groups == 1 or g.is_depthwise
        assert aten.can(g, "forward", torch.float32) == (is_right and is_one_piece), case.name
        others += [case.name] * (not is_right)
    assert others  # otherwise nothing was tested


def test_a_wrong_result_would_be_noticed() -> None:
    case = conv_cases.CASES[0]
    exact = conv_cases.exact(case, torch.float32)
    truth, scale = exact.results["forward"], exact.scales["forward"]
    shifted = truth.roll(1, -1)
    assert conv_cases.distance(shifted, truth, scale) > conv_cases.bound("columns", torch.float32)


def test_winograd_is_among_the_ways_of_a_wide_3x3_and_not_of_a_strided_one() -> None:
    wide = conv_cases.CASES[1].geometry(is_channels_last=False)
    strided = conv_cases.Case(name="", channels=40, outputs=36, stride=2)
    names = {way.name for way in candidates(wide, "forward", torch.float32, "cpu")}
    assert "winograd" in names
    other = strided.geometry(is_channels_last=False)
    assert "winograd" not in {w.name for w in candidates(other, "forward", torch.float32, "cpu")}


def run_columns(geometry: Geometry, exact: Any, cap: int) -> torch.Tensor:
    return im2col.prepare_forward(geometry, exact.x, exact.w, cap)(exact.x, exact.w)


def test_columns_stay_under_the_cap() -> None:
    """The buffers of a call count: the columns, and the padded rows that they view."""
    case = conv_cases.Case(name="", channels=16, outputs=4, size=(32, 32), batch=4)
    geometry = case.geometry(is_channels_last=True)
    exact = conv_cases.exact(case, torch.float32)
    whole = im2col.columns_bytes(geometry, 4)
    for cap in (whole // 2, whole // 8, whole // 128):
        largest = largest_allocation(lambda cap=cap: run_columns(geometry, exact, cap))  # type: ignore[misc]
        assert largest <= max(cap, exact.results["forward"].numel() * 4)
    seen = [  # torch 1.13's profiler occasionally loses an event
        largest_allocation(lambda: run_columns(geometry, exact, whole)) for _ in range(3)
    ]
    assert max(seen) == whole


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("is_last", [False, True])
def test_the_columns_of_one_chunk_are_held_at_a_time(which: Any, is_last: bool) -> None:
    case = conv_cases.Case(name="", channels=16, outputs=16, size=(32, 32), batch=8)
    geometry = case.geometry(is_channels_last=is_last)
    exact = conv_cases.exact(case, torch.float32)
    cap = im2col.columns_bytes(geometry, 4) // 4
    ways = candidates(geometry, which, torch.float32, "cpu")
    prepare = next(way.prepare for way in ways if way.name == "columns")
    pair = exact.arguments(which)
    run = prepare(geometry, *pair, cap)
    result = run(*pair)
    # The least of three, because torch 1.13's profiler occasionally loses an event.
    assert min(peak_bytes(lambda: run(*pair)) for _ in range(3)) <= 1.5 * cap + 4 * result.numel()
    both = peak_bytes(lambda: [run(*pair), torch.empty(cap // 2), torch.empty(cap // 2)])
    assert both > 1.5 * cap + 4 * result.numel()  # what is held longer is noticed


def peak_bytes(run: object) -> int:
    """Return the most memory that was allocated at a time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()  # type: ignore[operator]
    events: Any = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in events:
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return most


def place_of(tensor: torch.Tensor) -> int:
    """Return the start address of the memory. torch 1.13 has only the older name."""
    return int(getattr(tensor, "untyped_storage", tensor.storage)().data_ptr())


class Largest(TorchDispatchMode):
    """Records the size in bytes of the largest operator result that is not a view."""

    num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        given = {place_of(one) for one in args if isinstance(one, torch.Tensor)}
        if place_of(result) not in given:
            self.num_bytes = max(self.num_bytes, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("size", [(2, 2), (16, 16)], ids=["copies", "products"])
def test_a_pointwise_weight_gradient_stays_under_the_cap(size: tuple[int, int]) -> None:
    case = conv_cases.Case(name="", channels=8, outputs=8, size=size, kernel=1, padding=0, batch=16)
    geometry = case.geometry(is_channels_last=False)
    exact = conv_cases.exact(case, torch.float32)

    def largest(cap: int) -> int:
        with Largest() as seen:
            patches.prepare_weight_gradient(geometry, exact.x, exact.dy, cap)(exact.x, exact.dy)
        return seen.num_bytes

    assert largest(1024) <= 1024 < largest(1 << 20)


def largest_allocation(run: object) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()  # type: ignore[operator]
    sizes = [
        getattr(event, "self_cpu_memory_usage", 0) or 0
        for event in profiled.events()
        if event.name.startswith("aten::empty") or event.name == "[memory]"
    ]
    return int(max(sizes))


def test_winograd_s_transforms_undo_each_other() -> None:
    """F(m) of a kernel with a single center tap returns the input exactly."""
    x = torch.arange(2 * 3 * 64.0).reshape(2, 3, 8, 8).remainder(7).double()
    w = torch.zeros(3, 3, 3, 3, dtype=torch.float64)
    for channel in range(3):
        w[channel, channel, 1, 1] = 1
    case = conv_cases.Case(name="", channels=3, outputs=3, size=(8, 8))
    g = case.geometry(is_channels_last=False)
    y = winograd.prepare_forward(g, x, w, 1 << 20)(x, w)
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", PASSES)
def test_winograd_keeps_its_bound_when_some_values_are_much_larger(which: Any) -> None:
    case = conv_cases.Case(name="", channels=32, outputs=32, size=(16, 13), batch=4)
    exact = conv_cases.exact(case, torch.float32, largest=1000.0)
    g, arguments = case.geometry(is_channels_last=False), exact.arguments(which)
    way = next(w for w in candidates(g, which, torch.float32, "cuda") if w.name == "winograd")
    off = (way.run(g, *arguments, 1 << 20).double() - exact.results[which]).abs()
    in_eps = off / torch.finfo(torch.float32).eps
    assert float((in_eps / exact.scales[which].max()).max()) <= 256
    # Control: the same errors are beyond the bound relative to the sum at the same position.
    assert float((in_eps / exact.scales[which]).max()) > 256


@pytest.mark.parametrize(
    ("size", "padding", "has_winograd"),
    [((9, 40), 1, True), ((9, 40), 3, False), ((2, 40), 1, False)],
)
def test_winograd_is_left_out_where_tiles_are_nearly_empty(
    size: tuple[int, ...], padding: int, has_winograd: bool
) -> None:
    case = conv_cases.Case(name="", channels=40, outputs=36, size=size, padding=padding, batch=40)
    g = case.geometry(is_channels_last=False)
    for which in PASSES:
        names = [way.name for way in candidates(g, which, torch.float32, "cuda")]
        assert ("winograd" in names) == has_winograd
