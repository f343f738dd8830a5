"""A real `vllm serve` on loopback for tests: start, wait until healthy, ask, stop, leave nothing behind."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


class Server:
    """One `vllm serve` in a process group of its own; stop it with `stop`, or `kill` when a test failed."""

    def __init__(self, model: Path, log: Path, env: dict[str, str], *flags: str) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        script = Path(sys.executable).with_name("vllm")
        # Without the script where vLLM is only on the import path.
        vllm = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        command = [*vllm, "serve", str(model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port), *flags]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def wait_until_healthy(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once `/health` answers; fail with the end of the log when it does not come to that."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.25)
        text = self.log.read_text(errors="replace")
        raise AssertionError(f"the server did not start (exit {self.process.poll()}):\n{text[-6000:]}")

    def get(self, path: str, body: bytes | None = None) -> str:
        """Return what `path` answers to a GET, or to a POST of the JSON text `body`."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.read().decode()

    def client(self) -> Any:
        """Return an OpenAI client for this server."""
        import openai

        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", timeout=60, max_retries=0)

    def members(self) -> list[str]:
        """Return the command lines of the living processes in this server's session."""
        return [command for pid, command in _processes() if _session_of(pid) == self.process.pid]

    def stop(self) -> int:
        """Send SIGTERM to the server itself, as a service manager does, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """End whatever is left of this server's own process group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)


def _free_port() -> int:
    """Return a port that the kernel gives to nobody else before the server, in a while, listens there."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(15_000, 30_000)))
            return probe.getsockname()[1]


def _processes() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append((int(folder.name), command.strip()))
            except OSError:
                continue
    return found


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1
