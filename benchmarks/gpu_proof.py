#!/usr/bin/env python3
"""Everything that only a GPU can prove, in one run: `make gpu-test`.

    python benchmarks/gpu_proof.py [--parts pool-tests,identity,...] [--output DIR]

Each part writes `DIR/<part>.json` (the schema of `allocator.results`) and prints a table; the exit
status is 1 when a record failed.  Engines run one at a time, each in a process of its own, and NVML
is sampled from this process, which never makes a CUDA context.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from connector_proof import connector_records
from engines import (
    ROOT,
    UTILIZATION,
    budget_left,
    model_path,
    run_engine,
    story,
    truth,
    used_note,
)
from neighbour_proof import neighbour_records
from ranks_proof import tp_records
from serve_proof import serve_records
from sizing_proof import sizing_records
from sleep_proof import sleep_records

from allocator import results

PROMPTS = [[(7 * i + j * (i + 3)) % 1999 + 300 for j in range(20 + 40 * i)] for i in range(16)]
# Left out: filling the device and running out of memory, which are errors to memcheck too; processes of their
# own, which it would have to follow; figures of free memory, of which it takes some itself.
SANITIZED = "new_blocks or shrink or defragment or graph_captured or kernels_run or lifetime_any or odd_sizes"
CONFIGURATIONS = [(runner, layout) for runner in ("V2", "V1") for layout in ("LBHNC", "LHBNC", "BLHNC")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(part for part in PARTS if part not in TWO_GPUS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--layers", type=int, default=28, help="of the model, which has Qwen3-0.6B's shape")
    parser.add_argument("--configurations", help="of identity, sizing, connectors and neighbours")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each kind in the part startup")
    parser.add_argument("--load-seconds", type=float, default=60, help="of each load in sizing and tp2")
    parser.add_argument("--warm-starts", type=int, default=1, help="starts of each kind before those")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in args.parts.split(","):
        failed += run_part(part, args)
    print("FAILED: " + ", ".join(failed) if failed else "all limits kept")
    return 1 if failed else 0


def run_part(part: str, args: argparse.Namespace) -> list[str]:
    """Run one part, write what it has after each record, and return the names of those that failed.

    What a part raises is one failed record more, so that the parts after it still run.
    """
    command = f"python benchmarks/gpu_proof.py --parts {part} --layers {args.layers}"
    if part in ("sizing", "tp2"):
        command += f" --load-seconds {args.load_seconds:g}"
    if part == "startup":
        command += f" --repeats {args.repeats} --warm-starts {args.warm_starts}"
    if part in ("identity", "sizing", "connectors", "neighbours") and args.configurations:
        command += f" --configurations {args.configurations}"
    records: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for item in guarded(part, PARTS[part](args)):
        records.append(item)
        machine = machine or results.build(records, command=command)  # asks the driver, which takes time
        # Again after each record: a run may be cut off.
        results.write(args.output / f"{part}.json", {**machine, "records": records})
    data = results.read(args.output / f"{part}.json")
    results.print_table(data)
    return results.failed(data)


def guarded(part: str, items: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pass `items` on; the last is a failed record where the part raised something."""
    note = ""
    try:
        yield from items
    except Exception as error:
        traceback.print_exc()
        note = f"{type(error).__name__}: {error}"
    yield truth(f"{part}_ran_to_its_end", not note, note)


def pool_tests(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The tests of the allocator on the real driver, one record for all of them."""
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout=60", "--timeout-method=thread"]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=400)
    last = process.stdout.strip().splitlines()[-1]
    if process.returncode:
        print(process.stdout[-8000:])
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    bad = counts.get("failed", 0) + counts.get("error", 0) + (process.returncode not in (0, 1))
    yield results.record("pool_tests_failed", bad, "tests", limit=0, better="equal", note=last)
    yield results.record("pool_tests_passed", counts.get("passed", 0), "tests", limit=40, better="higher")


def sanitizer(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """compute-sanitizer's memcheck over the pool's tests that need no second process."""
    tests = ["tests/test_pool.py", "tests/test_gpu_pool.py"]
    options = ["-q", "-s", "-m", "gpu", "-p", "no:cacheprovider", "--timeout=200", "-k", SANITIZED]
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    tool = shutil.which("compute-sanitizer", path=path) or "compute-sanitizer"
    command = [tool, "--tool=memcheck", "--error-exitcode=99", sys.executable, "-m", "pytest"]
    process = subprocess.run(
        [*command, *options, *tests], cwd=ROOT, capture_output=True, text=True, check=False, timeout=400
    )
    if process.returncode:
        print(process.stdout[-6000:])
    yield from sanitizer_records(process.stdout, process.returncode)


def sanitizer_records(output: str, status: int) -> Iterator[dict[str, Any]]:
    """Errors of memory, which there must be none of, apart from calls that failed and were handled."""
    summaries = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", output)]  # one a process
    calls = re.findall(r"Program hit (\w+) .*on CUDA API call to (\w+)", output)
    passed = [int(n) for n in re.findall(r"(\d+) passed", output)]
    failed = [int(n) for n in re.findall(r"(\d+) (?:failed|errors?)\b.* in [\d.]+s", output)]
    errors = sum(summaries) - len(calls) if summaries else -1
    note = f"exit status {status}; {SANITIZED}"
    yield results.record("compute_sanitizer_errors", errors, "errors", limit=0, better="equal", note=note)
    kinds = ", ".join(sorted({f"{call} {code}" for code, call in calls}))
    yield results.record("compute_sanitizer_failed_calls", len(calls), "calls", note=kinds[:500])
    tests = passed[-1] if passed else 0
    yield results.record("compute_sanitizer_tests_passed", tests, "tests", limit=8, better="higher")
    bad = sum(failed)
    yield results.record("compute_sanitizer_tests_failed", bad, "tests", limit=0, better="equal")


def pool(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`pool_bench.py` in a process of its own."""
    yield from bench("pool_bench.py")


def bench(script: str, *options: str) -> Iterator[dict[str, Any]]:
    """Run a benchmark in a process of its own, and pass its records on."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, str(ROOT / "benchmarks" / script), "--output", str(file), *options]
        process = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL, timeout=300)
        if file.exists():
            yield from results.read(file)["records"]
        else:
            name = f"{Path(script).stem}_exit_status"
            yield results.record(name, process.returncode or -1, "", limit=0, better="equal")


def identity(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens and logprobs with the flag against without, for both runners and three layouts, with graphs."""
    for runner, layout in CONFIGURATIONS:
        if f"{runner}_{layout}" not in (args.configurations or f"{runner}_{layout}").split(","):
            continue
        env = {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0", "VLLM_KV_CACHE_LAYOUT": layout}
        llm = {**base(args), "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        steps = [
            {"do": "generate", "prompts": PROMPTS, "max_tokens": 64},
            {"do": "load", "num_prompts": 64, "prompt_tokens": 1000, "max_tokens": 8},
            {"do": "figures"},
        ]
        name = f"{runner}_{layout}"
        stock, flag = (run_engine(llm, steps, env, on, args.output / "engines.log") for on in (False, True))
        yield from compare(name, stock, flag)


def load(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Full-width load against the budget, with the flag and without."""
    work = {"do": "load", "num_prompts": 600, "prompt_tokens": 2000, "max_tokens": 32, "seconds": 20}
    steps = [{"do": "generate", "prompts": PROMPTS, "max_tokens": 64}, work, {"do": "figures"}]
    flag, stock = (run_engine(base(args), steps, {}, on, args.output / "engines.log") for on in (True, False))
    yield from compare("load", stock, flag)
    if flag["error"] or stock["error"]:
        return
    left, stock_left = budget_left(flag), budget_left(stock)
    yield results.record("budget_left_unused_gib", left, "GiB", limit=0.35, note=used_note(flag))
    yield results.record("budget_never_exceeded_gib", left, "GiB", limit=0, better="higher")
    yield results.record(
        "budget_left_unused_stock_gib", stock_left, "GiB", better="higher", note=used_note(stock)
    )
    tokens = [run["results"][-1]["kv_cache_size_tokens"] for run in (flag, stock)]
    yield results.record(
        "kv_tokens_flag_vs_stock",
        tokens[0] / tokens[1],
        "",
        limit=0.99,
        better="higher",
        note=f"{tokens[0]} against {tokens[1]} tokens; stock ends {stock_left:+.3f} GiB from its budget",
    )
    for name, run in (("flag", flag), ("stock", stock)):
        yield results.record(
            f"load_seconds_{name}", run["results"][1]["seconds"], "s", note=str(run["results"][1])
        )


def startup(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Alternating starts; those before `--repeats` only warm the compile caches."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    starts: dict[bool, list[float]] = {True: [], False: []}
    stages = ""
    for number in range(args.warm_starts + args.repeats):
        for on in (True, False):
            steps = [{"do": "rpc", "method": "ekv_report"}] if on else []
            run = run_engine(base(args), steps, {}, on, args.output / "engines.log")
            if run["error"]:
                yield from compare("startup", run, run)
                return
            if on:
                parts = run["results"][0][0]["snapshot"]["stages"]
                stages = ", ".join(f"{part['stage']} {part['seconds']:.3f} s" for part in parts)
                print(stages, flush=True)
            if number >= args.warm_starts:
                seconds[on].append(run["seconds"]["initialize_kv_caches"])
                starts[on].append(run["seconds"]["start"])
    for name, samples in (("engine_init", seconds), ("whole_start", starts)):
        for on, kind in ((True, "flag"), (False, "stock")):
            note = ", ".join(f"{sample:.2f}" for sample in samples[on])
            if name == "engine_init" and on:
                note += f"; the last: {stages}"
            yield results.from_samples(f"{name}_{kind}_s", samples[on], "s", note=note)
    yield results.record(
        "startup_flag_vs_stock",
        statistics.median(seconds[True]) / statistics.median(seconds[False]),
        "",
        limit=0.95,
        repeats=args.repeats,
        note="EngineCore._initialize_kv_caches, alternating starts, compile caches warm from "
        f"{args.warm_starts} starts of each kind before, or from other parts of the same run",
    )


def sleep(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What a nap costs; levels 1 and 2 beside vLLM's cumem, with graphs; alone; prefix hits over a nap."""
    yield from bench("sleep_bench.py", "--gib", "8", "--rounds", "3")
    yield from sleep_records(base(args), args.output / "engines.log", PROMPTS)


def connectors(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """CPU offload with evicted blocks, and NIXL between two engines; 8 layers are enough: `--layers 8`."""
    only = args.configurations.split(",") if args.configurations else None
    yield from connector_records(base(args), args.output / "engines.log", only)


def sizing(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """At the edge of the device: where stock vLLM runs out of memory, and what each leaves of its budget."""
    yield from sizing_records(args)


def neighbours(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Starts beside a process that takes and frees memory of the same GPU; 8 layers are enough."""
    only = args.configurations.split(",") if args.configurations else None
    yield from neighbour_records(base(args), args.output / "engines.log", PROMPTS, only)


def serve(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`vllm serve` over HTTP with the flag and without; 8 layers are enough."""
    yield from serve_records(base(args), args.output / "engines.log", PROMPTS)


def tp2(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Two ranks on two GPUs; not among the default parts."""
    yield from tp_records(base(args), args.output / "engines.log", PROMPTS, args.load_seconds)


def compare(name: str, stock: dict[str, Any], flag: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of one configuration: starts, same output, within the budget, what the log says."""
    for kind, run in (("stock", stock), ("flag", flag)):
        error = run["error"] or ""
        yield truth(f"{name}_{kind}_starts", not error, str(error)[:500])
    if stock["error"] or flag["error"]:
        return
    pairs = list(zip(stock["results"][0], flag["results"][0], strict=True))
    for what in ("tokens", "logprobs"):
        same = all(a[what] == b[what] for a, b in pairs)
        yield truth(f"{name}_{what}_identical", same)
    distinct = len({token for output in flag["results"][0] for token in output["tokens"]})
    yield results.record(f"{name}_distinct_tokens", distinct, "tokens", limit=200, better="higher")
    figures = [run["results"][-1] for run in (flag, stock)]
    yield results.record(
        f"{name}_blocks",
        figures[0]["num_gpu_blocks"],
        "blocks",
        better="higher",
        note=f"stock {figures[1]['num_gpu_blocks']}",
    )
    yield results.record(
        f"{name}_budget_left_gib", budget_left(flag), "GiB", limit=0, better="higher", note=used_note(flag)
    )
    yield results.record(
        f"{name}_engine_init_s",
        flag["seconds"]["initialize_kv_caches"],
        "s",
        note=f"stock {stock['seconds']['initialize_kv_caches']:.2f}; compile caches not controlled",
    )
    told, untold = story(flag), story(stock)
    grew = any("committed" in line for line in told) and not untold
    grew = grew and not any("could not run the widest step" in line for line in told)
    yield truth(f"{name}_only_the_flag_grew", grew, " | ".join(told)[:1500])


def base(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `vllm.LLM` that every engine has."""
    return {
        "model": str(model_path(args.layers)),
        "max_model_len": 4096,
        "gpu_memory_utilization": UTILIZATION,
        "enable_prefix_caching": False,
        "seed": 0,
    }


PARTS = {
    "pool-tests": pool_tests,
    "pool": pool,
    "sanitizer": sanitizer,
    "identity": identity,
    "load": load,
    "startup": startup,
    "sleep": sleep,
    "sizing": sizing,
    "connectors": connectors,
    "neighbours": neighbours,
    "serve": serve,
    "tp2": tp2,
}
TWO_GPUS = ("tp2",)

if __name__ == "__main__":
    sys.exit(main())
