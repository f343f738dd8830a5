"""Two vLLM engines at once, which hand a request's KV cache from one to the other over NIXL.

`Pair` starts them, each in a process of its own (this file as a script), and speaks to them in lines of JSON.
"""

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from connector_steps import drain

ROOT = Path(__file__).resolve().parent.parent
FIRST_PORT = 5600
# A transfer that never ends would hold up the rest of a run: vLLM gives it up after 8 minutes.
LIMIT_S = 180
ROLES = ("kv_producer", "kv_consumer")
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Engine:
    """One engine in its own process; what it prints goes to `log`."""

    def __init__(self, llm: dict[str, Any], env: dict[str, str], log: Path) -> None:
        read, write = os.pipe()
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(write)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(write,),
                cwd=ROOT,
                env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", **env},
            )
        os.close(write)
        self._answers = os.fdopen(read)
        self._send(llm)

    def ready(self) -> dict[str, Any]:
        """Wait for the engine; what it says of itself, or its ``error``."""
        return self._receive()

    def do(self, **request: Any) -> dict[str, Any]:
        """Have it do something; see `serve`."""
        self._send(request)
        return self._receive()

    def close(self) -> int:
        """End the engine; its exit status."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it is gone already, and never read the last request
            self.process.stdin.close()
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        # One line answers one request, so that nothing is left in the file's buffer.
        if not select.select([self._answers], [], [], LIMIT_S)[0]:
            self.process.kill()
            return {"error": f"no answer in {LIMIT_S} s, ended with {self.process.wait()}"}
        line = self._answers.readline()
        return json.loads(line) if line else {"error": f"the engine ended with {self.process.wait()}"}


class Pair:
    """A prefill engine and a decode engine, each with its keywords of `vllm.LLM`."""

    def __init__(
        self,
        llms: tuple[dict[str, Any], dict[str, Any]],
        log: Path,
        env: dict[str, str],
        devices: tuple[str, str],
    ) -> None:
        self.engines: list[Engine] = []
        self.started: list[dict[str, Any]] = []
        for number, (llm, role, device) in enumerate(zip(llms, ROLES, devices, strict=True)):
            transfer = {"kv_connector": "NixlConnector", "kv_role": role}
            own = {
                "CUDA_VISIBLE_DEVICES": device,
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(FIRST_PORT + number),
            }
            self.engines.append(Engine({**llm, "kv_transfer_config": transfer}, {**env, **own}, log))
            # On a device that they share, engines that size themselves by what is free start one by one.
            if len(set(devices)) == 1 and "kv_cache_memory_bytes" not in llm:
                self.started.append(self.engines[-1].ready())
                if self.error:
                    break
        for engine in self.engines[len(self.started) :]:
            self.started.append(engine.ready())

    @property
    def error(self) -> str | None:
        """What kept an engine from starting, or None."""
        return next((answer["error"] for answer in self.started if answer.get("error")), None)

    def hand_over(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Prefill in the first engine, and decode in the second, which fetches what the first computed."""
        prefill, decode = self.engines
        first = prefill.do(prompts=prompts, max_tokens=1, transfer=[REMOTE_DECODE] * len(prompts))
        if first.get("error"):
            return first
        return decode.do(prompts=prompts, max_tokens=max_tokens, transfer=first["transfer"])

    def nap(self) -> list[dict[str, Any]]:
        """Put both to sleep, and wake them; what each says of its memory meanwhile, or its ``error``."""
        return [engine.do(do="nap") for engine in self.engines]

    def close(self) -> list[int]:
        """End both; their exit statuses."""
        return [engine.close() for engine in reversed(self.engines)]


def serve(answers: int) -> None:
    """Be an engine: the first line are the keywords of `vllm.LLM`, each further one a request.

    A request has ``prompts`` (token ids), ``max_tokens``, and ``transfer``, one a prompt; the answer has
    ``outputs``, the ``transfer`` for the other engine, and ``moved``: bytes and seconds of each transfer.
    ``{"do": "nap"}`` is the other kind.
    """
    with os.fdopen(answers, "w") as channel:

        def tell(answer: dict[str, Any]) -> None:
            channel.write(json.dumps(answer) + "\n")
            channel.flush()

        moved = record_transfers()
        from vllm import LLM

        try:
            llm = LLM(**json.loads(sys.stdin.readline()))
        except Exception as error:
            tell({"error": f"{type(error).__name__}: {error}"})
            raise
        config = llm.llm_engine.vllm_config
        snapshot = llm.collective_rpc("ekv_snapshot")[0] if config.additional_config else None
        tell({"error": None, "num_gpu_blocks": config.cache_config.num_gpu_blocks, "snapshot": snapshot})
        for line in sys.stdin:
            request = json.loads(line)
            step = {"generate": generate, "nap": nap}[request.pop("do", "generate")]
            tell({**step(llm, **request), "moved": list(moved)})
            moved.clear()


def generate(
    llm: Any, prompts: list[list[int]], max_tokens: int, transfer: list[Any] | None = None
) -> dict[str, Any]:
    """Generate greedily, one prompt after the other, so that batches do not change the last bits."""
    from vllm import SamplingParams

    outputs, told = [], []
    for number, prompt in enumerate(prompts):
        extra = {"kv_transfer_params": transfer[number]} if transfer else None
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=3, extra_args=extra)
        (request,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        output = request.outputs[0]
        steps = [sorted((token, entry.logprob) for token, entry in s.items()) for s in output.logprobs]
        outputs.append({"tokens": list(output.token_ids), "logprobs": steps})
        told.append(request.kv_transfer_params)
    return {"outputs": outputs, "transfer": told}


def nap(llm: Any) -> dict[str, Any]:
    """Sleep and wake up; the pool's physical bytes while asleep and awake, or the error of the sleep."""
    idle = drain(llm, 20.0)  # until the other engine has told that it fetched everything
    try:
        llm.sleep(level=1)
    except RuntimeError as error:
        return {"error": str(error), "idle": idle}
    asleep = llm.collective_rpc("ekv_snapshot")[0]["physical_bytes"]
    llm.wake_up()
    awake = llm.collective_rpc("ekv_snapshot")[0]["physical_bytes"]
    return {"error": None, "idle": idle, "asleep_bytes": asleep, "awake_bytes": awake}


def record_transfers() -> list[tuple[int, float]]:
    """Have bytes and seconds of every NIXL transfer of this process added to the list that is returned."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    moved: list[tuple[int, float]] = []
    original = NixlKVConnectorStats.record_transfer

    def record_transfer(self: Any, res: Any) -> None:
        if res is not None:  # in 0.33 NIXL may have nothing to tell
            moved.append((int(res.totalBytes), res.xferDuration / 1e6))
        original(self, res)

    NixlKVConnectorStats.record_transfer = record_transfer
    return moved


if __name__ == "__main__":
    serve(int(sys.argv[1]))
