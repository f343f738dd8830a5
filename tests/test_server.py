"""`vllm serve` with the flag, over HTTP: what its user sees, next to a server without the flag."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(480)]

# float32, because with bfloat16 this model's choice of words depends on which requests share a batch. Without
# an explicit size the share of the machine's memory decides, and the second sizing has something to do.
FLAGS = (
    "--max-model-len 512 --max-num-seqs 8 --dtype float32 --enforce-eager --seed 0 "
    "--gpu-memory-utilization 0.15 --no-enable-prefix-caching"
).split()
PROMPTS = [f"Prompt {i}: " + "what does the cache remember of this? " * (1 + i % 4) for i in range(8)]
MAX_TOKENS = 24


def _complete(client: Any, prompt: str) -> dict[str, Any]:
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, logprobs=3
    )
    choice = answer.choices[0]
    return {
        "text": choice.text,
        "tokens": choice.logprobs.tokens,
        "logprobs": choice.logprobs.token_logprobs,
        "top": choice.logprobs.top_logprobs,
        "usage": answer.usage.completion_tokens,
    }


def _chat(client: Any, content: str) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], max_tokens=MAX_TOKENS, temperature=0
    )
    return answer.choices[0].message.content


def _cache_info(server: Server) -> dict[str, str]:
    line = next(x for x in server.get("/metrics").splitlines() if x.startswith("vllm:cache_config_info{"))
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


@pytest.fixture(scope="module")
def stock(tiny_model_path: Path, engine_env: dict[str, str], tmp_path_factory: Any) -> dict[str, Any]:
    """What a server without the flag answers."""
    server = Server(tiny_model_path, tmp_path_factory.mktemp("stock") / "log.txt", engine_env, *FLAGS)
    try:
        server.wait_until_healthy()
        client = server.client()
        answers = {
            "completions": [_complete(client, prompt) for prompt in PROMPTS],
            "chat": _chat(client, "hello"),
            "metrics": server.get("/metrics"),
            "exit": server.stop(),
            "log": server.log.read_text(errors="replace"),
        }
    finally:
        server.kill()
    return answers


@pytest.fixture(scope="module")
def server(
    stock: dict[str, Any], tiny_model_path: Path, engine_env: dict[str, str], tmp_path_factory: Any
) -> Iterator[Server]:
    """Return a server with the flag, started after the stock one has stopped."""
    env = {**engine_env, "VLLM_SERVER_DEV_MODE": "1"}  # opens /collective_rpc, to ask the workers themselves
    log = tmp_path_factory.mktemp("server") / "log.txt"
    report = log.with_name("report.json")
    options = json.dumps({"extensible_kv_cache": {"report": str(report)}})
    flags = ("--enable-extensible-kv-cache", "--additional-config", options)
    server = Server(tiny_model_path, log, env, *FLAGS, *flags)
    server.report = report
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.kill()


def _snapshot(server: Server) -> dict[str, Any]:
    (snapshot,) = json.loads(server.get("/collective_rpc", b'{"method": "ekv_snapshot"}'))["results"]
    return snapshot


def test_completions_sequential_equal_those_without_flag(server: Server, stock: dict[str, Any]) -> None:
    client = server.client()
    assert [_complete(client, prompt) for prompt in PROMPTS] == stock["completions"]


def test_completions_of_different_prompts_differ(stock: dict[str, Any]) -> None:
    """The comparison above could not fail with a model that says the same whatever it is asked."""
    assert len({answer["text"] for answer in stock["completions"]}) == len(PROMPTS)
    assert all(len(set(answer["tokens"])) > MAX_TOKENS // 2 for answer in stock["completions"])


def test_chat_completion_equals_that_without_flag(server: Server, stock: dict[str, Any]) -> None:
    assert _chat(server.client(), "hello") == stock["chat"]


def test_streaming_pieces_join_to_whole_completion(server: Server, stock: dict[str, Any]) -> None:
    # Long, because a busy server joins pieces that wait to be sent.
    asked = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 10 * MAX_TOKENS, "temperature": 0}
    whole = server.client().completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in server.client().completions.create(**asked, stream=True)]
    assert len(pieces) > 1
    assert "".join(pieces) == whole
    assert whole.startswith(stock["completions"][0]["text"])


def test_completions_at_once_equal_sequential_ones(server: Server, stock: dict[str, Any]) -> None:
    client = server.client()
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda prompt: _complete(client, prompt)["text"], PROMPTS))
    assert answers == [answer["text"] for answer in stock["completions"]]


def test_metrics_show_committed_blocks_not_reserved_ones(server: Server) -> None:
    snapshot, info = _snapshot(server), _cache_info(server)
    assert 0 < snapshot["committed_blocks"] < snapshot["capacity_blocks"]
    assert int(info["num_gpu_blocks"]) == snapshot["committed_blocks"]


def _gauges(server: Server, name: str) -> dict[str, float]:
    """Values of one gauge by their labels, as text."""
    found = re.findall(rf"^extensible_kv:{name}\{{([^}}]*)\}} (\S+)$", server.get("/metrics"), re.M)
    return {labels: float(value) for labels, value in found}


def test_metrics_show_pool_of_each_rank(server: Server) -> None:
    """From the workers through the engine core into the process that serves `/metrics`."""
    snapshot, info = _snapshot(server), _cache_info(server)
    only = 'engine="0",model_name="tiny",rank="0"'
    block_bytes = snapshot["bytes_per_block"]
    for name, value in (
        ("committed_blocks", int(info["num_gpu_blocks"])),
        ("committed_bytes", snapshot["committed_blocks"] * block_bytes),
        ("capacity_blocks", snapshot["capacity_blocks"]),
        ("capacity_bytes", snapshot["capacity_blocks"] * block_bytes),
        ("physical_bytes", snapshot["physical_bytes"]),
    ):
        assert _gauges(server, name) == {only: value}, name
    assert 0 < _gauges(server, "commit_seconds")[only] < 60


def test_metrics_show_start_up_table_that_adds_up(server: Server) -> None:
    values = _gauges(server, "memory_bytes")
    parts = {source: {} for source in ("stock", "measured")}
    for labels, value in values.items():
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        parts[named["source"]][named["part"]] = value
    assert {"weights", "other", "graphs and warm-up", "widest step", "margin"} < set(parts["measured"])
    assert parts["measured"]["KV cache"] == _snapshot(server)["physical_bytes"]
    # Both columns are the same requested memory, divided differently.
    assert sum(parts["measured"].values()) == sum(parts["stock"].values())


def test_metrics_without_flag_have_none_of_ours(stock: dict[str, Any]) -> None:
    assert "vllm:cache_config_info" in stock["metrics"]
    assert "extensible_kv" not in stock["metrics"]


def test_report_of_running_server_is_drawn_as_map(server: Server, tmp_path: Path) -> None:
    """Both ways to a map: the file that the option names, and what the server itself answers."""
    program = str(Path(sys.executable).with_name("extensible-kv"))
    answer = tmp_path / "answer.json"
    answer.write_text(server.get("/collective_rpc", b'{"method": "ekv_snapshot"}'))
    report = json.loads(server.report.read_text())
    assert report["blocks"] == report["ranks"][0]["committed_blocks"] == _snapshot(server)["committed_blocks"]
    for path in (server.report, answer):
        picture = path.with_suffix(".png")
        done = subprocess.run(
            [program, "map", str(path), "--output", str(picture)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"{report['blocks']:,} of " in done.stdout
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example is of curl")
def test_readme_pipe_draws_the_map_of_a_running_server(server: Server) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^curl .*\| extensible-kv map -$", readme, re.M)
    example, addresses = re.subn("localhost:8000", server.url, example)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path}
    done = subprocess.run(example, shell=True, env=env, capture_output=True, text=True, timeout=60)
    assert (addresses, done.returncode) == (1, 0), done.stderr
    assert f"{_snapshot(server)['committed_blocks']:,} of " in done.stdout


def test_metrics_usage_returns_to_zero_after_requests(server: Server) -> None:
    _complete(server.client(), PROMPTS[1])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        metrics = server.get("/metrics")
        usage = re.search(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", metrics, re.MULTILINE)
        if usage and float(usage[1]) == 0:
            return
        time.sleep(0.5)
    raise AssertionError(f"usage stayed at {usage and usage[1]}")


def test_too_long_prompt_is_refused_and_server_goes_on(server: Server, stock: dict[str, Any]) -> None:
    import openai

    client = server.client()
    with pytest.raises(openai.BadRequestError):
        _complete(client, "x" * 2000)
    assert _complete(client, PROMPTS[2]) == stock["completions"][2]


def test_log_tells_story_only_with_flag(server: Server, stock: dict[str, Any]) -> None:
    log = server.log.read_text(errors="replace")
    committed = _snapshot(server)["committed_blocks"]
    assert re.search(rf"Extensible KV cache: {committed} blocks \([\d,]+ tokens\) committed", log)
    assert "Extensible KV cache" not in stock["log"]


def test_sigterm_ends_server_with_status_zero_and_no_orphans(server: Server, stock: dict[str, Any]) -> None:
    """Last in the file: it stops the server that the tests before it share."""
    assert len(server.members()) > 1, "the engine runs in a process of its own"
    assert server.stop() == stock["exit"] == 0
    deadline = time.monotonic() + 10
    while server.members() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.members() == []
    # Only the engine's side: vLLM's front end may report its own cancelled reader as a dead engine.
    log = server.log.read_text(errors="replace")
    assert re.findall(r"^\((?:EngineCore|Worker)[^)]*\).*(?:ERROR|Traceback).*", log, re.M) == []
