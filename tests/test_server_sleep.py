"""`vllm serve` put to sleep and woken over HTTP, by the client that a user has."""

import json
import threading
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

# No --enable-sleep-mode: on a CPU vLLM refuses it, since it could not move the weights. With the flag the KV
# cache sleeps all the same.
FLAGS = (
    "--max-model-len 1024 --max-num-seqs 4 --dtype float32 --enforce-eager --seed 0 "
    "--kv-cache-memory-bytes 268435456 --enable-prompt-tokens-details "
    "--worker-extension-cls sleep_extension.Budget"
).split()
OPTION = ("--additional-config", '{"extensible_kv_cache": {"sleep_backup": "cpu"}}')
PROMPTS = [f"Prompt {i}: " + "what does the cache remember of this? " * (1 + 3 * i) for i in range(4)]
LONG_TOKENS = 800


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, engine_env: dict[str, str], tmp_path_factory: Any) -> Iterator[Server]:
    env = {
        **engine_env,
        "VLLM_SERVER_DEV_MODE": "1",  # opens /sleep, /wake_up, /is_sleeping and /collective_rpc
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    server = Server(tiny_model_path, tmp_path_factory.mktemp("sleep") / "log.txt", env, *FLAGS, *OPTION)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.kill()


@pytest.fixture
def awake(server: Server) -> Iterator[Server]:
    """Hand out the server awake, and leave it so for the next test."""
    yield server
    _rpc(server, "set_host_budget", 0)
    server.get("/wake_up", b"")
    assert not _is_sleeping(server)


def _rpc(server: Server, method: str, *args: Any) -> Any:
    body = json.dumps({"method": method, "args": list(args)}).encode()
    answer = json.loads(server.get("/collective_rpc", body) or "{}").get("results", [None])
    return answer[0]


def _is_sleeping(server: Server) -> bool:
    return json.loads(server.get("/is_sleeping"))["is_sleeping"]


def _memory(server: Server) -> tuple[int, int, list[int]]:
    snapshot = _rpc(server, "ekv_snapshot")
    bases = [reservation["base"] for reservation in snapshot["reservations"]]
    return snapshot["physical_bytes"], snapshot["committed_blocks"], bases


def _complete(server: Server, prompt: str, max_tokens: int = 24) -> dict[str, Any]:
    answer = server.client().completions.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=2
    )
    choice = answer.choices[0]
    return {
        "tokens": choice.logprobs.tokens,
        "logprobs": choice.logprobs.token_logprobs,
        "finish": choice.finish_reason,
        "cached": answer.usage.prompt_tokens_details.cached_tokens,
    }


def _all(server: Server) -> list[dict[str, Any]]:
    return [_complete(server, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def first(server: Server) -> list[dict[str, Any]]:
    """What the server says before it ever slept, nothing of it from the prefix cache."""
    return _all(server)


@pytest.fixture(scope="module")
def second(server: Server, first: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same again, whole blocks from the prefix cache."""
    answers = _all(server)
    assert [answer["cached"] for answer in first] == [0] * len(PROMPTS)
    assert answers[3]["cached"] == 384
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in first]
    return answers


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_up_takes_it_again(
    awake: Server, first: list[dict[str, Any]], second: list[dict[str, Any]], level: int
) -> None:
    physical, blocks, bases = _memory(awake)
    assert physical >= 200 << 20
    assert int(_rpc(awake, "memfd_bytes")) == physical
    awake.get(f"/sleep?level={level}", b"")
    assert _is_sleeping(awake)
    assert _memory(awake) == (0, 0, bases)
    assert int(_rpc(awake, "memfd_bytes")) == 0
    awake.get("/wake_up", b"")
    assert not _is_sleeping(awake)
    assert _memory(awake) == (physical, blocks, bases)
    # Level 1 keeps what is cached, with this server's option; level 2 loses it.
    assert _all(awake) == (second if level == 1 else first)


def test_twice_asleep_and_twice_awake(awake: Server, first: list[dict[str, Any]]) -> None:
    before = _memory(awake)
    for path in ("/sleep?level=1", "/sleep?level=2", "/sleep?level=1"):
        awake.get(path, b"")
        assert _memory(awake)[0] == 0
    for _ in range(2):
        awake.get("/wake_up", b"")
        assert _memory(awake) == before
    assert _complete(awake, PROMPTS[3])["tokens"] == first[3]["tokens"]


@pytest.mark.parametrize("tags", [("weights", "kv_cache"), ("kv_cache", "weights")])
def test_tags_in_any_order(awake: Server, first: list[dict[str, Any]], tags: tuple[str, str]) -> None:
    before = _memory(awake)
    awake.get("/sleep?level=1", b"")
    for number, tag in enumerate(tags):
        awake.get(f"/wake_up?tags={tag}", b"")
        assert _is_sleeping(awake) == (number == 0)
        assert _memory(awake)[0] == (before[0] if "kv_cache" in tags[: number + 1] else 0)
    assert _memory(awake) == before
    assert _complete(awake, PROMPTS[2])["tokens"] == first[2]["tokens"]


def test_both_tags_at_once(awake: Server, first: list[dict[str, Any]]) -> None:
    before = _memory(awake)
    awake.get("/sleep", b"")
    awake.get("/wake_up?tags=kv_cache&tags=weights", b"")
    assert _memory(awake) == before
    assert _complete(awake, PROMPTS[2])["tokens"] == first[2]["tokens"]


def test_release_of_the_cache_alone(awake: Server, first: list[dict[str, Any]]) -> None:
    before = _memory(awake)
    awake.get("/sleep?level=0", b"")
    assert _memory(awake) == before
    awake.get("/release_kv_cache_memory", b"")
    assert _memory(awake)[0] == 0
    awake.get("/wake_up?tags=kv_cache", b"")
    assert _memory(awake) == before
    assert _complete(awake, PROMPTS[2])["tokens"] == first[2]["tokens"]


def test_wake_up_out_of_memory_stays_asleep_and_next_one_works(
    awake: Server, first: list[dict[str, Any]]
) -> None:
    before = _memory(awake)
    awake.get("/sleep", b"")
    _rpc(awake, "set_host_budget", 64 << 20)
    for path in ("/wake_up", "/wake_up?tags=kv_cache"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            awake.get(path, b"")
        assert refused.value.code == 500
        assert _is_sleeping(awake)
        assert _memory(awake) == (0, 0, before[2])
    _rpc(awake, "set_host_budget", 0)
    awake.get("/wake_up", b"")
    assert _memory(awake) == before
    assert [answer["tokens"] for answer in _all(awake)] == [answer["tokens"] for answer in first]


def test_request_sent_to_a_sleeping_server_is_answered_once_it_wakes(
    awake: Server, first: list[dict[str, Any]]
) -> None:
    awake.get("/sleep", b"")
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(_complete(awake, PROMPTS[1])))
    thread.start()
    time.sleep(1.0)
    assert not answers
    assert _memory(awake)[0] == 0
    awake.get("/wake_up", b"")
    thread.join(60)
    assert [answer["tokens"] for answer in answers] == [first[1]["tokens"]]


def _nap_in_flight(server: Server, mode: str) -> tuple[bool, Any]:
    """Return whether the request was answered while the server slept, and its answer."""
    for _ in range(5):  # on a busy machine the request may end before the nap begins
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda to=answers: to.append(_complete(server, PROMPTS[0], LONG_TOKENS))
        )
        thread.start()
        _wait_until_running(server, answers)
        server.get(f"/sleep?level=1&mode={mode}", b"")
        assert _memory(server)[0] == 0
        time.sleep(0.3)
        early = list(answers)
        server.get("/wake_up", b"")
        thread.join(60)
        if mode == "wait" or not (early and early[0]["finish"] == "length"):
            return bool(early), answers[0]
    pytest.fail(f"{mode}: the request ended as if there had been no nap, five times")


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_request_in_flight_sees_what_vllm_promises(awake: Server, mode: str) -> None:
    """`abort`: it ends early. `wait`: sleep comes after it. `keep`: it goes on where it was."""
    whole = _complete(awake, PROMPTS[0], LONG_TOKENS)
    early, answer = _nap_in_flight(awake, mode)
    assert early == (mode != "keep")
    assert answer["tokens"] == whole["tokens"][: len(answer["tokens"])]
    assert answer["finish"] == ("abort" if mode == "abort" else "length")
    assert (len(answer["tokens"]) == LONG_TOKENS) == (mode != "abort")


def test_resume_of_a_sleeping_server_is_refused(awake: Server, first: list[dict[str, Any]]) -> None:
    """Its requests would run over a cache that has no memory."""
    awake.get("/sleep", b"")
    with pytest.raises(urllib.error.HTTPError) as caught:
        awake.get("/resume", b"")
    assert "its KV cache has no memory: wake it up (/wake_up)" in caught.value.read().decode()
    assert _is_sleeping(awake) and _memory(awake)[0] == 0
    awake.get("/wake_up", b"")
    assert _complete(awake, PROMPTS[2])["tokens"] == first[2]["tokens"]


def test_wake_up_of_a_server_that_waits_to_sleep_keeps_it_awake(
    awake: Server, first: list[dict[str, Any]]
) -> None:
    before = _memory(awake)
    answers: list[dict[str, Any]] = []
    said: list[str] = []

    def sleep() -> None:
        try:
            said.append(awake.get("/sleep?level=1&mode=wait", b""))
        except urllib.error.HTTPError as error:
            said.append(error.read().decode())

    threads = [threading.Thread(target=lambda: answers.append(_complete(awake, PROMPTS[0], LONG_TOKENS)))]
    threads[0].start()
    _wait_until_running(awake, answers)
    threads.append(threading.Thread(target=sleep))
    threads[1].start()
    deadline = time.monotonic() + 10
    while not _is_sleeping(awake) and time.monotonic() < deadline:
        time.sleep(0.01)
    awake.get("/wake_up", b"")
    for thread in threads:
        thread.join(60)
    assert answers[0]["finish"] == "length" and len(said) == 1
    # On a busy machine the request may have ended before it was woken up, and then it had slept.
    assert not said[0] or "woken up before it slept" in said[0]
    assert _memory(awake) == before
    assert _complete(awake, PROMPTS[2])["tokens"] == first[2]["tokens"]


def _wait_until_running(server: Server, answers: list[dict[str, Any]]) -> None:
    """Return when a request runs, or is answered already."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not answers:
        lines = server.get("/metrics").splitlines()
        if any(x.startswith("vllm:num_requests_running{") and float(x.split()[-1]) > 0 for x in lines):
            return
        time.sleep(0.02)
    assert answers, "the request never ran"


def test_no_fault_and_a_clean_end(server: Server) -> None:
    """Last in the file: it stops the server, asleep."""
    server.get("/sleep", b"")
    assert server.stop() == 0
    log = server.log.read_text(errors="replace")
    assert "sleep mode is not supported on CPU" not in log
    assert "Segmentation fault" not in log
    assert "Extensible KV cache: rank 0 gave back" in log
