"""`vllm serve` on a GPU, asked over HTTP, for `gpu_proof.py --parts serve`: with the flag and without.

The engine core runs in a process of its own, as it does for everyone who serves; NVML is sampled from here.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines import (
    ENGINE_ENV,
    GIB,
    NOISE,
    nvml_handle,
    portable,
    sampled_use,
    story,
    truth,
    with_shared_compile_cache,
)
from server import Server

from allocator import results

GRAPHS = [1, 2, 4, 8, 16]
AT_ONCE, LOAD_TOKENS = 256, 2000
# What may be left on the device when the server is gone: NVML's own readings differ by as much.
LEFT_GIB = 1 / 16


def serve_records(base: dict[str, Any], log: Path, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Serve without the flag and with it; what both answered and what the device held."""
    runs = {}
    for name, on in (("stock", False), ("flag", True)):
        runs[name] = run = run_server(base, prompts, on, log)
        yield truth(f"serve_{name}_ran_all_steps", not run["error"], run["error"])
        if run["error"]:
            return
    yield from _records(runs["stock"], runs["flag"])


def run_server(base: dict[str, Any], prompts: list[list[int]], on: bool, log_file: Path) -> dict[str, Any]:
    """Start a server, ask it, load it, send it to sleep and wake it, stop it; what was seen, or `error`."""
    keywords = with_shared_compile_cache(base | {"cudagraph_capture_sizes": GRAPHS}, {})
    compilation = {**keywords["compilation_config"], "cudagraph_capture_sizes": GRAPHS}
    flags = ["--no-enable-prefix-caching", "--compilation-config", json.dumps(compilation)]
    for name in ("max_model_len", "gpu_memory_utilization", "seed", "dtype", "max_num_seqs"):
        flags += [f"--{name.replace('_', '-')}={base[name]}"] if name in base else []
    flags += ["--enable-extensible-kv-cache"] if on else []
    env = os.environ | ENGINE_ENV | {"VLLM_SERVER_DEV_MODE": "1"}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    server_log = log_file.with_name(f"serve-{'flag' if on else 'stock'}.log")
    run: dict[str, Any] = {"error": ""}
    before = used_bytes()
    with sampled_use() as use:
        start = time.perf_counter()
        server = Server(Path(base["model"]), server_log, env, *flags)
        try:
            server.wait_until_healthy()
            run["start_s"] = time.perf_counter() - start
            _ask(server, prompts, on, run)
            run["exit"] = server.stop()
        except Exception as error:
            run["error"] = portable(f"{type(error).__name__}: {error}"[-1500:])
        finally:
            server.kill()
    lines = server_log.read_text(errors="replace").splitlines()
    server_log.unlink()
    with log_file.open("a") as log:
        log.write("\n".join([f"==== serve {flags}", *(x for x in lines if not NOISE.search(x)), ""]))
    print(f"serve {'flag' if on else 'stock'}", run["error"] or run["start_s"], use["peaks"], flush=True)
    return run | {"log": lines, "peak_bytes": use["peak_bytes"], "left_bytes": used_bytes() - before}


def used_bytes() -> int:
    """Return what NVML says is used of the first device."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(nvml_handle(0)).used)


def _ask(server: Server, prompts: list[list[int]], on: bool, run: dict[str, Any]) -> None:
    client = server.client()
    run["answers"] = [_complete(client, prompt, 48) for prompt in prompts]
    run["streamed"] = _stream(client, prompts[0], 48)
    wide = [[(number * 31 + i * 7) % 1699 + 300 for i in range(LOAD_TOKENS)] for number in range(AT_ONCE)]
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        done = list(threads.map(lambda prompt: len(_complete(client, prompt, 16)["tokens"]), wide))
    run |= {"load_s": time.perf_counter() - start, "load_tokens": done}
    run["metrics"] = server.get("/metrics")
    if on:
        run["report"] = _rpc(server, "ekv_report")
        awake = used_bytes()
        server.get("/sleep?level=1", b"")
        asleep = _rpc(server, "ekv_snapshot")["physical_bytes"]
        run["sleep"] = {"physical_bytes": asleep, "gives_back_bytes": awake - used_bytes()}
        server.get("/wake_up", b"")
        run["answers_after_sleep"] = [_complete(client, prompt, 48) for prompt in prompts]


def _complete(client: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0]
    return {
        "text": choice.text,
        "tokens": choice.logprobs.tokens,
        "logprobs": choice.logprobs.token_logprobs,
        "top": choice.logprobs.top_logprobs,
    }


def _stream(client: Any, prompt: list[int], max_tokens: int) -> str:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    pieces = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    return "".join(piece.choices[0].text for piece in pieces)


def _rpc(server: Server, method: str) -> dict[str, Any]:
    body = json.dumps({"method": method}).encode()
    (answer,) = json.loads(server.get("/collective_rpc", body))["results"]
    return answer


def _records(stock: dict[str, Any], flag: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What both servers are held to."""
    for what in ("text", "tokens", "logprobs", "top"):
        same = [answer[what] for answer in stock["answers"]] == [answer[what] for answer in flag["answers"]]
        yield truth(f"serve_{what}_identical", same)
    distinct = len({token for answer in flag["answers"] for token in answer["tokens"]})
    yield results.record("serve_distinct_tokens", distinct, "tokens", limit=200, better="higher")
    yield truth("serve_stream_joins_to_whole", flag["streamed"] == flag["answers"][0]["text"])
    yield truth("serve_load_answered", flag["load_tokens"] == stock["load_tokens"] == [16] * AT_ONCE)
    report, budget = flag["report"], flag["report"]["measured"]["requested_bytes"]
    for name, run, limit in (("flag", flag, 0), ("stock", stock, None)):
        note = f"budget {budget / GIB:.3f} GiB, NVML every 5 ms, all processes of the server"
        left = (budget - run["peak_bytes"]) / GIB
        yield results.record(
            f"serve_{name}_budget_left_gib", left, "GiB", limit=limit, better="higher", note=note
        )
        yield results.record(
            f"serve_{name}_start_s", run["start_s"], "s", note="from `vllm serve` to /health"
        )
        yield results.record(
            f"serve_{name}_load_s",
            run["load_s"],
            "s",
            note=f"{AT_ONCE} prompts of {LOAD_TOKENS} tokens at once",
        )
        yield results.record(f"serve_{name}_exit_status", run["exit"], "", limit=0, better="equal")
        left_behind = run["left_bytes"] / GIB
        yield results.record(f"serve_{name}_left_on_device_gib", left_behind, "GiB", limit=LEFT_GIB)
    blocks = int(re.search(r'vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', flag["metrics"])[1])
    gauge = float(re.search(r"^extensible_kv:committed_blocks\{.*\} (\S+)$", flag["metrics"], re.M)[1])
    told = f"{blocks} on /metrics, {gauge:.0f} in its gauge, {report['committed_blocks']} committed"
    yield truth("serve_metrics_show_committed_blocks", blocks == gauge == report["committed_blocks"], told)
    gives, held = flag["sleep"]["gives_back_bytes"] / GIB, report["snapshot"]["physical_bytes"] / GIB
    yield results.record(
        "serve_sleep_gives_back_gib",
        gives,
        "GiB",
        limit=held - LEFT_GIB,
        better="higher",
        note=f"POST /sleep?level=1, without --enable-sleep-mode; the pool held {held:.3f} GiB",
    )
    yield truth("serve_sleep_pool_holds_nothing", flag["sleep"]["physical_bytes"] == 0)
    yield truth("serve_output_identical_after_sleep", flag["answers_after_sleep"] == flag["answers"])
    grew = any("committed" in line for line in story(flag)) and not story(stock)
    yield truth("serve_only_the_flag_grew", grew, " | ".join(story(flag))[:1500])
