"""Compares Penstock's convolutions with those of cuDNN or oneDNN, ATen, and unfold + matmul.

python benchmarks/convolution.py --save my-card          # on a CUDA GPU, about four minutes
python benchmarks/convolution.py --device cpu --quick    # compared with oneDNN

Measures forward and backward of two sets of layers, whole training steps, the first steps of a new
process, and speed under memory caps.
All contenders take turns in one run. None of them uses TF32 for float32.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PENSTOCK_CONV_TUNE_S", "600")

import torch
from rich.console import Console
from rich.table import Table

from conv_models import NETWORKS, training_step
from conv_shapes import (
    LAYERS,
    OTHER_LAYERS,
    Layer,
    Problem,
    busy_ms,
    contenders,
    costs_of,
    peak_bytes,
    time_ms,
)
from penstock.cli.loader_timing import take_turns
from penstock.conv import kernel_compiler, tuning
from penstock.conv.algorithms import triton_launch
from penstock.conv.bypass import bypass_convolutions
from record import describe_machine, describe_versions, save, today

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TARGETS = {"float32": 1.6, "bfloat16": 2.5}
MAX_LAYER = 3.0
CAPS_MIB = (4, 8, 16, 64, 256, 1024)


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    tuning.in_background = False  # tune every shape before its turn
    if options.without_triton:
        triton_launch.switch_off("--without-triton")
    if options.one_thread:
        torch.autograd.set_multithreading_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    console = Console(width=None if sys.stdout.isatty() else 150)
    machine, versions = _describe(options.device)
    console.print(", ".join(f"{k} {v}" for k, v in {**machine, **versions}.items()))
    command = shlex.join(["python", "benchmarks/convolution.py", *arguments])
    content = {"benchmark": "convolution", "date": today(), "command": command}
    content |= {"machine": machine, "versions": versions}
    records: dict[str, Any] = {"layers": [], "caps": [], "first": [], "steps": []}

    def keep(part: str, found: list[dict[str, Any]]) -> None:
        records[part] += found
        if options.save:  # after each part, so that an interrupted run keeps its results
            save(options.save, {**content, **records})

    for name in options.types:
        keep("layers", _layers(console, name, options))
    missed = _judge(console, records["layers"], options.device) if records["layers"] else 0
    if "caps" in options.only and options.device == "cuda":
        keep("caps", _caps(console, options))
    if "first" in options.only and options.device == "cuda":
        for network in ("MobileNetV3", "ConvNeXt-tiny"):
            keep("first", _first(console, network))
    if "steps" in options.only:
        tuning.in_background, tuning.CREDIT_S = True, 1e9
        for network in options.networks:
            keep("steps", _steps(console, network, options))
    if options.save:
        console.print(f"Saved as benchmarks/results/convolution-{options.save}.json")
    return 1 if options.check and missed else 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/convolution.py", description=__doc__)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--types", type=lambda text: text.split(","), help="float32,bfloat16,...")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=["layers", "first", "steps", "caps"]
    )
    parser.add_argument("--layers", type=lambda text: text.split(","), default=[""],
                        help="only layers whose names contain one of these texts")  # fmt: skip
    parser.add_argument("--no-unfold", action="store_true", help="leave out unfold + matmul")
    parser.add_argument("--networks", type=lambda text: text.split(","), help="only these steps")
    parser.add_argument("--without-triton", action="store_true", help="as on cards that lack it")
    parser.add_argument("--one-thread", action="store_true", help="no thread for the gradients")
    parser.add_argument("--repeats", type=int, help="turns of each contender (default 7)")
    parser.add_argument("--calls", type=int, help="calls of a layer in each turn (default 20)")
    parser.add_argument("--quick", action="store_true", help="3 short turns: a smoke test")
    parser.add_argument("--save", metavar="NAME", help="write results/convolution-NAME.json")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    options = parser.parse_args(arguments)
    if options.types is None:
        options.types = ["float32", "bfloat16"] if options.device == "cuda" else ["float32"]
    options.repeats = options.repeats or (3 if options.quick else 7)
    calls = (1, 3) if options.device == "cpu" else (5, 20)
    options.calls = options.calls or calls[not options.quick]
    usual = [*NETWORKS] if options.device == "cuda" else ["ResNet-50", "YOLOv8n"]
    options.networks = options.networks or usual
    return options


def _describe(device: str) -> tuple[dict[str, Any], dict[str, str]]:
    machine, versions = describe_machine(), describe_versions()
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
        versions["cuda"] = str(torch.version.cuda or getattr(torch.version, "hip", None))
        versions["cudnn"] = str(torch.backends.cudnn.version())
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        versions["triton"] = "none"
    return machine, versions


# -- the eleven layers -----------------------------------------------------------------------------


def _layers(console: Console, type_name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    if "layers" not in options.only:
        return []
    sets = {"eleven layers": LAYERS, "other layers": OTHER_LAYERS}
    sets = {
        title: [one for one in layers if any(text in one.name for text in options.layers)]
        for title, layers in sets.items()
    }
    if options.device == "cuda":
        _request_kernels([one for layers in sets.values() for one in layers], TYPES[type_name])
    found = []
    for title, layers in sets.items():
        if not layers:
            continue
        shown = layers if options.device == "cuda" else [one.scaled(8) for one in layers]
        records = [{"set": title, **_layer(one, type_name, options)} for one in shown]
        _print_layers(console, f"{type_name}, {title}", records)
        found += records
    return found


def _request_kernels(layers: list[Layer], dtype: torch.dtype) -> None:
    """Compile the kernels of all layers at once. No layer is tuned or timed meanwhile."""
    tuning.in_background, tuning.CREDIT_S = True, 1e9
    while triton_launch.is_available() and not kernel_compiler.is_set_up():
        time.sleep(0.1)
    for layer in layers:
        problem = Problem(layer, "cuda", dtype, is_last=dtype != torch.float32)
        with bypass_convolutions("on", devices=("cuda",)):
            for _ in range(8):
                problem.native()
    while not all(kernel_compiler._states.values()):
        time.sleep(0.1)
    tuning.forget()  # what was measured while the children were busy
    tuning.in_background = False


def _layer(layer: Layer, type_name: str, options: argparse.Namespace) -> dict[str, Any]:
    device, dtype = options.device, TYPES[type_name]
    problem = Problem(layer, device, dtype, is_last=dtype != torch.float32)
    reference = problem.exact()
    turns: dict[str, Callable[[], float]] = {}
    record: dict[str, Any] = {"layer": layer.name, "batch": layer.batch, "type": type_name}
    record["memory_bytes"], record["error"], record["gpu_ms"] = {}, {}, {}
    for name, (surroundings, method) in contenders(device).items():
        if method == "unfold" and (options.no_unfold or not problem.can_unfold):
            continue
        run = getattr(problem, method)
        with surroundings() as inside:
            result = run()  # warm-up: libraries search, kernels compile, algorithms are tuned
            errors = [_distance(a, b) for a, b in zip(result, reference, strict=True)]
            record["error"][name] = max(errors)
            if device == "cuda":
                del result
                record["memory_bytes"][name] = peak_bytes(run)
                record["gpu_ms"][name] = busy_ms(run)
        del inside
        turns[name] = _turn(surroundings, run, device, options.calls)
    record["ways"], record["costs"] = _ways(problem, device)
    record["samples_ms"] = take_turns(turns, options.repeats)
    record["median_ms"] = {k: statistics.median(v) for k, v in record["samples_ms"].items()}
    return record


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a.double() - b).abs().max() / b.abs().max()).item())


def _turn(
    surroundings: Callable[[], Any], run: Callable[[], Any], device: str, calls: int
) -> Callable[[], float]:
    def turn() -> float:
        with surroundings():
            run()
            return time_ms(run, device, calls)

    return turn


def _ways(problem: Problem, device: str) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the algorithms that forward and backward of this layer use, and the cost of each."""
    costs = []
    with bypass_convolutions("on", devices=(device,)) as bypass:
        before = bypass.counts
        problem.native()
        after = bypass.counts
        if device == "cuda":
            tensors = {"x": problem.x.detach(), "w": problem.w.detach(), "dy": problem.dy}
            if problem.layer.is_transposed:
                tensors |= {"x": tensors["dy"], "dy": tensors["x"]}
            pairs = {"forward": "x w", "input gradient": "dy w", "weight gradient": "x dy"}
            chosen = {
                which: (way, plan.geometry)
                for plan in bypass._hook.runner.plans.values()
                for which, way in plan.chosen.items()
            }
            for which, (way, g) in chosen.items():
                a, b = (tensors[name] for name in pairs[which].split())
                costs.append(costs_of(way, g, which, a, b))
    return {k: n - before.get(k, 0) for k, n in after.items() if n > before.get(k, 0)}, costs


def _print_layers(console: Console, title: str, records: list[dict[str, Any]]) -> None:
    names = [*records[0]["median_ms"]]
    table = Table(title=f"Forward and backward, {title}, ms", title_justify="left")
    table.add_column("layer")
    more = (
        "ratio",
        "GPU ms / ATen's",
        "memory",
        "error / library's",
        "launches",
        "MB",
        "Gop",
        "ways",
    )
    for name in (*names, *more):
        table.add_column(name, justify="left" if name == "ways" else "right")
    for record in records:
        times, memory, error = record["median_ms"], record["memory_bytes"], record["error"]
        gpu = record["gpu_ms"]
        ratio = times["Penstock"] / times[names[0]]
        share = memory["Penstock"] / max(1, memory[names[0]]) if memory else float("nan")
        table.add_row(
            record["layer"],
            *(f"{times[name]:.3f}" if name in times else "" for name in names),
            f"{ratio:.2f}x",
            f"{gpu['Penstock'] / gpu[names[1]]:.2f}x" if gpu else "",
            f"{share:.2f}x",
            f"{error['Penstock'] / max(error[names[0]], 1e-12):.1f}x",
            str(sum(cost["launches"] for cost in record["costs"])),
            *(_sum_of(record["costs"], *which) for which in (("bytes", 1e6), ("operations", 1e9))),
            ", ".join(record["ways"]),
        )
    sums = {name: sum(r["median_ms"].get(name, 0.0) for r in records) for name in names}
    launches = sum(cost["launches"] for record in records for cost in record["costs"])
    ratio = f"{sums['Penstock'] / sums[names[0]]:.2f}x"
    times = (f"{sums[name]:.3f}" for name in names)
    table.add_row("sum", *times, ratio, "", "", "", str(launches))
    console.print(table)


def _sum_of(costs: list[dict[str, Any]], name: str, unit: float) -> str:
    """Return the sum over the passes, or nothing if it is not known for one of them."""
    known = [cost[name] for cost in costs if name in cost]
    return f"{sum(known) / unit:.1f}" if known and len(known) == len(costs) else ""


def _judge(console: Console, records: list[dict[str, Any]], device: str) -> int:
    """Compare sums and single layers with their targets. Returns the number of missed targets."""
    missed = 0
    for type_name in dict.fromkeys(r["type"] for r in records):
        eleven = [r for r in records if r["set"] == "eleven layers"]
        chosen = [r["median_ms"] for r in eleven if r["type"] == type_name]
        if not chosen:
            continue
        sums = {name: sum(c[name] for c in chosen) for name in chosen[0]}
        library, *others, ours = sums.values()
        lines = [(f"sum {ours / library:.2f}x the library", TARGETS.get(type_name), ours / library)]
        worst = max(c["Penstock"] / next(iter(c.values())) for c in chosen)
        lines.append((f"worst layer {worst:.2f}x", MAX_LAYER, worst))
        slower = ", ".join(
            f"{name} {ms / ours:.1f}x" for name, ms in zip([*sums][1:-1], others, strict=True)
        )
        lines.append((f"{slower} slower than ours", None, 0.0))
        for text, bound, value in lines:
            verdict = ""
            if bound is not None and device == "cuda":
                verdict = f" (at most {bound:g}x: {'ok' if value <= bound else 'missed'})"
                missed += value > bound
            console.print(f"{type_name}: {text}{verdict}")
    return missed


# -- training steps and memory caps ----------------------------------------------------------------


def _steps(console: Console, network: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure training steps of a network, in float32 and on a GPU also in bfloat16."""
    records = []
    device = options.device
    for is_half in (False, True) if device == "cuda" else (False,):
        step = training_step(network, device, is_half=is_half, divisor=1 if device == "cuda" else 8)
        turns, memory = {}, {}
        tuning.forget()
        for name, (surroundings, method) in contenders(device).items():
            if method == "unfold":
                continue
            with surroundings():
                step()
                if name == "Penstock":
                    _tune(step)
                memory[name] = peak_bytes(step) if device == "cuda" else 0
            turns[name] = _turn(surroundings, step, device, 1 if options.quick else 3)
        samples = take_turns(turns, min(options.repeats, 5))
        medians = {k: statistics.median(v) for k, v in samples.items()}
        title = f"{network} {'bfloat16' if is_half else 'float32'}"
        times = ", ".join(
            f"{k} {ms:.1f} ms ({memory[k] / 2**30:.2f} GiB)" for k, ms in medians.items()
        )
        console.print(f"{title}: {times}")
        records.append({"network": title, "samples_ms": samples, "median_ms": medians,
                        "memory_bytes": memory})  # fmt: skip
    return records


def _tune(step: Callable[[], Any], limit_s: float = 60.0) -> None:
    """Repeat a step until its shapes are tuned. All kernels are compiled at the same time."""
    started_s = time.perf_counter()
    while tuning.num_unfinished() and time.perf_counter() - started_s < limit_s:
        step()


FIRST = """
import json, sys, time, torch
sys.path.insert(0, sys.argv[1])
from conv_models import training_step
from penstock.conv import bypass_convolutions
step, times = training_step(sys.argv[2], "cuda", is_half=False), []
torch.cuda.synchronize()
if sys.argv[3] == "Penstock":
    bypass_convolutions("on", devices=("cuda",))
elif sys.argv[3] == "ATen":
    torch.backends.cudnn.enabled = False
for _ in range(int(sys.argv[4])):
    started_s = time.perf_counter()
    step()
    torch.cuda.synchronize()
    times.append(time.perf_counter() - started_s)
print(json.dumps(times))
"""


def _first(console: Console, network: str) -> list[dict[str, Any]]:
    """Measure the first steps of new processes with empty caches.

    Penstock gets enough of them to choose its algorithms.
    """
    records: list[dict[str, Any]] = []
    aten_ms = 0.0
    for name in ("cuDNN", "ATen", "Penstock"):
        with tempfile.TemporaryDirectory() as folder:
            names = ("PENSTOCK_CACHE_DIR", "TRITON_CACHE_DIR")
            num = "400" if name == "Penstock" else "50"
            command = [sys.executable, "-c", FIRST, os.path.dirname(__file__), network, name, num]
            environ = {**os.environ, **dict.fromkeys(names, folder)}
            environ.pop("PENSTOCK_CONV_TUNE_S", None)
            result = subprocess.run(
                command, env=environ, capture_output=True, text=True, check=True
            )
        times = json.loads(result.stdout.splitlines()[-1])
        records.append({"network": network, "contender": name, "steps_s": times})
        later_ms = [time_s * 1e3 for time_s in times[1:]]
        usual_ms = statistics.median(later_ms)
        console.print(
            f"{network}, {name}: first step {times[0]:.2f} s, then {usual_ms:.1f} ms, "
            f"at most {max(later_ms):.1f} ms"
        )
        if name == "ATen":
            aten_ms = max(later_ms)
        elif name == "Penstock":
            slow = [round(ms) for ms in later_ms if ms > aten_ms]
            console.print(f"  longer than ATen's longest: {len(slow)} of {len(later_ms)} {slow}")
    return records


def _caps(console: Console, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure speed and peak memory in float32, over the layers that use buffers."""
    table = Table(title="Sum of the layers by memory cap, float32", title_justify="left")
    for name in ("cap MiB", "ms", "peak MiB", "largest share of the library's memory"):
        table.add_column(name, justify="right")
    problems = [Problem(layer, "cuda", torch.float32, is_last=False) for layer in LAYERS]
    library = [_peak(problem, None) for problem in problems]
    records = []
    for cap in CAPS_MIB:
        total, peaks = 0.0, []
        for problem in problems:
            with bypass_convolutions("on", devices=("cuda",), memory_cap_bytes=cap << 20):
                problem.native()
                total += time_ms(problem.native, "cuda", options.calls)
            peaks.append(_peak(problem, cap << 20))
        record = {"cap_mib": cap, "sum_ms": total, "peak_bytes": peaks, "library_bytes": library}
        share = _share(record)
        records.append(record)
        table.add_row(str(cap), f"{total:.2f}", f"{max(peaks) / 2**20:.0f}", f"{share:.2f}x")
    console.print(table)
    within = [r for r in records if _share(r) <= 1.5]
    best = min(within, key=lambda r: r["sum_ms"], default=None)
    if best is None:
        console.print("No cap keeps every layer within 1.5x the library's memory.")
    else:
        console.print(
            f"Within 1.5x the library's memory: {best['sum_ms']:.2f} ms, cap {best['cap_mib']} MiB"
        )
    return records


def _share(record: dict[str, Any]) -> float:
    pairs = zip(record["peak_bytes"], record["library_bytes"], strict=True)
    return max(ours / theirs for ours, theirs in pairs)


def _peak(problem: Problem, cap_bytes: int | None) -> int:
    if cap_bytes is None:
        problem.native()
        return peak_bytes(problem.native)
    with bypass_convolutions("on", devices=("cuda",), memory_cap_bytes=cap_bytes):
        return peak_bytes(problem.native)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
