"""The trace page in a real browser. PENSTOCK_SCREENSHOTS=docs/images renders the manual images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Timeline
from support import synthetic_traces
from support.browser import WHY_NOT, Browser, browser, find_programs
from support.debian_programs import INSTALL_S

pytestmark = pytest.mark.timeout(INSTALL_S + 300.0)

EVIL = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">&amp;'
MAX_FRAME_MS = 3000.0
"""Only a page that hangs takes longer. A frame usually takes 16 ms on two cores without a GPU."""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    programs = find_programs()
    if programs is None:
        pytest.skip(WHY_NOT)
    with browser(*programs) as one:
        yield one


def save(folder: Path, **changes: Any) -> Path:
    path = folder / "run.html"
    records = synthetic_traces.make_records(**{"num_workers": 3, "num_batches": 40, **changes})
    Timeline(records).save(path)
    return path


@pytest.fixture
def page(window: Browser, tmp_path: Path) -> Browser:
    """The page of a run of 40 batches, freshly loaded."""
    window.open(save(tmp_path, spans_per_part=2, dataset="Images"))
    return window


def text_of(window: Browser, name: str) -> str:
    text: str = window.run(f"return document.getElementById('{name}').textContent")
    return text


def assert_quiet(window: Browser) -> None:
    """Check that the page logged no errors and made no requests."""
    assert window.complaints() == []
    assert window.requests() == []


def test_times_on_the_axis_have_no_trailing_zeros(page: Browser) -> None:
    times = {0: "0 s", 500: "0.5 µs", 2e8: "200 ms", 1.5e6: "1.5 ms", 1.2e9: "1.2 s", 10e9: "10 s"}
    assert {ns: page.run(f"return window.timeline.tick({ns})") for ns in times} == times


def test_the_page_draws_the_run_and_says_what_limits_it(window: Browser, tmp_path: Path) -> None:
    window.open(save(tmp_path, num_batches=400, spans_per_part=2, dataset="Images"))
    assert "Images" in text_of(window, "title")
    assert "would raise the rate" in text_of(window, "sentence")
    assert text_of(window, "remedy").startswith("Try: DataLoader(")
    painted = window.run(
        "const c = document.getElementById('view');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const seen = new Set();"
        "for (let i = 0; i < d.length; i += 4) seen.add(d[i] + ',' + d[i+1] + ',' + d[i+2]);"
        "return [...seen];"
    )
    assert {"59,130,246", "239,68,68", "34,197,94"} <= set(painted)  # loading, waiting, step
    assert_quiet(window)


def test_wheel_and_buttons_zoom_and_dragging_pans(page: Browser) -> None:
    before = page.state()
    page.wheel(600, 300, -300)
    zoomed = page.state()
    assert zoomed["last"] - zoomed["first"] < 0.7 * (before["last"] - before["first"])
    page.drag(600, 300, 400, 300)
    panned = page.state()
    assert panned["first"] > zoomed["first"]
    assert panned["last"] - panned["first"] == pytest.approx(zoomed["last"] - zoomed["first"])
    page.run("document.getElementById('all').click()")
    assert page.state()["last"] == pytest.approx(before["last"])
    page.run("document.getElementById('in').click()")
    assert page.state()["last"] < before["last"]
    assert_quiet(page)


def test_a_span_under_the_pointer_says_what_it_is(page: Browser) -> None:
    page.move(*page.place_of(1, 0))
    assert "loading samples: 20.000 ms" in text_of(page, "tip")
    assert "worker 0 (process 101)" in text_of(page, "tip")
    page.move(5, 5)


def test_the_keyboard_reaches_everything(page: Browser) -> None:
    whole = page.state()
    page.press("+", "+")
    zoomed = page.state()
    assert zoomed["last"] - zoomed["first"] < 0.5 * (whole["last"] - whole["first"])
    page.press("ArrowRight")
    assert page.state()["first"] > zoomed["first"]
    page.press("-", "0")
    assert page.state()["first"] == pytest.approx(whole["first"])
    page.press("Enter")
    first = page.state()["chosen"]
    assert "starting workers" in first
    page.press("ArrowDown", "Enter", "Enter")
    assert "worker 0" in page.state()["chosen"]
    page.press("f")
    assert page.state()["last"] - page.state()["first"] < 0.1 * whole["last"]
    page.press("Escape", "0")
    assert page.state()["chosen"] is None
    page.press("?")
    assert page.run("return document.getElementById('keys').open")
    page.press("Escape")
    assert_quiet(page)


def type_search(window: Browser, words: str) -> int:
    window.press("/")
    window.run("document.getElementById('search').value = ''")
    window.press(*words)
    window.run("return new Promise(done => setTimeout(done, 150))")
    found: int = window.state()["matches"]
    return found


def test_search_finds_names_batches_and_workers(page: Browser) -> None:
    assert type_search(page, "decode") == 80
    assert "80 found" in text_of(page, "status")
    page.press("Enter")
    assert "1 of 80" in text_of(page, "status")
    page.press("Enter", "Enter")
    assert "3 of 80" in text_of(page, "status")
    page.press("Escape")
    assert type_search(page, "batch 7") == 5  # a part with two spans, the batch, its step
    page.press("Escape")
    assert type_search(page, "worker 2") == 39
    page.press("Escape")
    assert type_search(page, "no such thing") == 0
    page.press("Escape")
    assert page.state()["matches"] == 0


def test_light_and_dark(page: Browser) -> None:
    def back() -> str:
        colour: str = page.run("return getComputedStyle(document.body).backgroundColor")
        return colour

    light = back()
    page.press("t")
    assert (page.state()["theme"], back() != light) == ("dark", True)
    page.press("t")
    assert (page.state()["theme"], back()) == ("light", light)


def test_names_are_text_wherever_they_come_from(window: Browser, tmp_path: Path) -> None:
    window.open(save(tmp_path, name=EVIL, spans_per_part=1, dataset=EVIL))
    window.move(*window.place_of(1, 1))
    assert text_of(window, "tip").startswith("<script>window.hacked = 1</script>")
    assert EVIL in text_of(window, "title")
    assert window.run("return window.hacked === undefined && document.images.length === 0")
    assert_quiet(window)


@pytest.mark.parametrize("changes", [{"num_batches": 0}, {"num_workers": 100, "num_batches": 300}])
def test_no_batches_and_a_hundred_workers(
    window: Browser, tmp_path: Path, changes: dict[str, int]
) -> None:
    window.open(save(tmp_path, **changes))
    window.press("+", "Enter", "ArrowDown", "0")
    assert_quiet(window)


def test_a_page_that_asks_for_something_would_be_noticed(window: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text('<img src="http://127.0.0.1:9/x.png"><script>null.x</script>')
    window.open(path)
    assert any("x.png" in url for url in window.requests())
    assert any("TypeError" in line for line in window.complaints())


def test_two_hundred_thousand_spans_load_and_move(window: Browser, tmp_path: Path) -> None:
    path = save(tmp_path, num_workers=8, num_batches=5300, spans_per_part=36, step_ms=2.0)
    load_s = window.open(path)
    assert window.state()["count"] >= 200_000
    frames = []
    for _ in range(8):
        window.wheel(700, 300, -200)
        frames.append(window.run("return window.timeline.draw()"))
    window.press("0", "ArrowRight")
    frames.append(window.run("return window.timeline.draw()"))
    print(f"loaded in {load_s:.2f} s, frames of {min(frames):.0f} to {max(frames):.0f} ms")
    assert sorted(frames)[len(frames) // 2] < MAX_FRAME_MS
    assert type_search(window, "batch 4321") >= 38
    assert_quiet(window)


def test_pictures_for_the_manual(window: Browser, tmp_path: Path) -> None:
    folder = Path(os.environ.get("PENSTOCK_SCREENSHOTS") or tmp_path)
    window.open(
        save(
            tmp_path,
            num_batches=60,
            spans_per_part=3,
            step_ms=9.0,
            slow={21: 4.0},
            dataset="Images",
        )
    )
    window.press("Enter", "ArrowDown", "Enter", "Enter", "Enter", "Enter", "Enter", "Enter")
    for theme in ("light", "dark"):
        window.screenshot(folder / f"timeline-{theme}.png")
        assert (folder / f"timeline-{theme}.png").stat().st_size > 10_000
        window.press("t")
