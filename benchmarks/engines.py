"""Engines for the benchmarks: each in a process of its own, with the device's use sampled from outside."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engine_server import EngineServer

from allocator import results

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
UTILIZATION = 0.9
LIMIT_S = 240  # an engine that hangs is killed, so that the rest of a run is not lost with it
FLAG = {"extensible_kv_cache": True}
# Progress bars and the like; everything else of an engine's log is kept.
NOISE = re.compile(r"Capturing CUDA graphs|Loading safetensors|it/s\]|^\s*$")
ABSOLUTE_PATH = re.compile(r"(?<![\w/.])/[\w.+-]+/[\w./+-]*")
# What vLLM itself leaves out of the hash of its compile cache, and what only the parts it adds make of that.
NOT_COMPILED = (
    "cudagraph_capture_sizes",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_transfer_config",
    "additional_config",
    "worker_extension_cls",
)
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    # By what they are, so that any engine may find them; vLLM would keep them by its configuration.
    "TRITON_CACHE_DIR": str(Path(tempfile.gettempdir()) / "ekv-triton"),
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "EKV_EXIT_LIMIT_S": "15",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")])),
}
ENGINES = EngineServer(os.environ | ENGINE_ENV, "load_steps")


def run_engine(
    llm: dict[str, Any],
    steps: list[dict[str, Any]],
    env: dict[str, str],
    on: bool,
    log_file: Path,
    devices: int = 1,
) -> dict[str, Any]:
    """One engine in its own process; its answer, its log's lines, and what the devices lost at the peak."""
    keywords = with_shared_compile_cache(llm, env)
    job = {"llm": {**keywords, "additional_config": FLAG} if on else keywords, "steps": steps}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1", **env}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("job", "answer", "log")}
        files["job"].write_text(json.dumps(job))
        with sampled_use(devices) as use:
            status = ENGINES.run(**files, env=environment, limit_s=LIMIT_S)
        lines = files["log"].read_text(errors="replace").splitlines()
        if files["answer"].exists():
            answer = json.loads(files["answer"].read_text())
        else:
            answer = {"error": {"type": "exit", "text": str(status)}, "results": [], "seconds": {}}
    if answer["error"]:
        answer["error"]["text"] = portable(answer["error"]["text"])
    label = f"{'flag' if on else 'stock'} {env}"
    print(label, answer["error"] or answer["seconds"], "peak", use["peaks"], "exit", status, flush=True)
    kept = [line for line in lines if not NOISE.search(line)]
    with log_file.open("a") as log:
        log.write("\n".join([f"==== {label} {llm}", *kept, ""]))
    if answer["error"]:
        print("\n".join(kept[-60:]), flush=True)
    return {**answer, "log": lines, "use": use, "exit": status}


def with_shared_compile_cache(llm: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Let engines that compile the same code share it: with the flag and without, in every layout and size.

    vLLM would give each a cache of its own, 30 s of device time for the same code.
    """
    factors = {
        name: value for name, value in env.items() if name not in ("VLLM_KV_CACHE_LAYOUT", "EKV_NEIGHBOUR")
    }
    compiled = {name: value for name, value in llm.items() if name not in NOT_COMPILED}
    key = hashlib.sha256(json.dumps([compiled, factors], sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ekv-compiled-{key}"
    return {**llm, "compilation_config": {**llm.get("compilation_config", {}), "cache_dir": str(folder)}}


def nvml_handle(index: int) -> Any:
    """Return NVML's handle of the device that CUDA counts as `index`: it does not know what CUDA may see."""
    import pynvml

    pynvml.nvmlInit()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    name = visible[index] if any(visible) else str(index)
    return (
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdigit()
        else pynvml.nvmlDeviceGetHandleByUUID(name)
    )


@contextmanager
def sampled_use(devices: int = 1) -> Iterator[dict[str, Any]]:
    """Sample the first devices' free memory every 5 ms: what the block's processes take at their peak.

    ``peaks`` has the bytes of each device, ``peak_bytes`` the largest of them, and ``moments`` pairs of a
    time and the bytes of each device, a tenth of a second apart: the largest use since the pair before.
    """
    import pynvml

    pynvml.nvmlInit()
    handles = [nvml_handle(index) for index in range(devices)]
    free = lambda: [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles]  # noqa: E731
    before, stop = free(), threading.Event()
    use: dict[str, Any] = {"peak_bytes": 0, "peaks": [0] * devices, "moments": []}

    def sample() -> None:
        moments = use["moments"]
        while not stop.wait(0.005):
            used = [then - now for then, now in zip(before, free(), strict=True)]
            use["peaks"] = [max(pair) for pair in zip(use["peaks"], used, strict=True)]
            use["peak_bytes"] = max(use["peaks"])
            now = time.time()
            if not moments or now - moments[-1][0] > 0.1:
                moments.append([now, used])
            else:
                moments[-1][1] = [max(pair) for pair in zip(moments[-1][1], used, strict=True)]

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield use
    finally:
        stop.set()
        thread.join()
        # The driver clears what was freed in the background, and the next engine may want all of it.
        deadline = time.monotonic() + 15
        time.sleep(1.0)
        while time.monotonic() < deadline and any(
            then - now > GIB // 16 for then, now in zip(before, free(), strict=True)
        ):
            time.sleep(0.1)


def story(run: dict[str, Any]) -> list[str]:
    """What the plugin logged: nothing without the flag."""
    parts = [line.split("Extensible KV cache: ", 1) for line in run["log"]]
    return [portable(part[1]) for part in parts if len(part) > 1]


def portable(text: str) -> str:
    """Return `text` without the paths of this machine, which results must not hold."""
    return ABSOLUTE_PATH.sub("<path>", text)


def truth(name: str, value: bool, note: str = "", limit: bool | None = True) -> dict[str, Any]:
    """Return the record of what is to be `limit`, or is only told where that is None."""
    return results.record(name, value, "", limit=limit, better="equal", note=portable(note)[:1500])


def budget_left(run: dict[str, Any]) -> float:
    total = run["results"][-1]["device_total_bytes"]
    return (UTILIZATION * total - run["use"]["peak_bytes"]) / GIB


def used_note(run: dict[str, Any]) -> str:
    total = run["results"][-1]["device_total_bytes"]
    return (
        f"budget {UTILIZATION * total / GIB:.3f} GiB ({UTILIZATION} of {total / GIB:.3f}), peak of the "
        f"process {run['use']['peak_bytes'] / GIB:.3f} GiB, its CUDA context included, NVML every 5 ms"
    )


def model_path(layers: int, **sizes: int) -> Path:
    """Qwen3-0.6B's shape with `layers` layers, other `sizes` in it, random weights; made once a machine."""
    name = "-".join([str(layers), *(f"{key}{value}" for key, value in sorted(sizes.items()))])
    path = Path(tempfile.gettempdir()) / f"ekv-qwen3-0.6b-{name}"
    if not (path / "model.safetensors").exists():
        keywords = {"shape": "qwen3-0.6b", "layers": layers, **sizes}
        code = (
            "import torch; from vllm_integration.tiny_model import make_tiny_model as make; "
            "device = 'cuda' if torch.cuda.is_available() else 'cpu'; "
            f"make({str(path)!r}, device=device, **{keywords})"
        )
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # no CUDA context in this process
    return path
