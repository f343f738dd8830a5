"""What `extensible-kv doctor` finds out, by trying: driver, reservations, settings, vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from allocator.errors import EkvError
from allocator.limits import check_limits, read_limits
from allocator.machine import describe_hardware, describe_versions
from allocator.pool_map import format_bytes
from allocator.settings import Finding, check_settings

__all__ = ["Diagnosis", "diagnose", "reservation_limit"]

MIN_LIMIT_BYTES, MAX_LIMIT_BYTES = 1 << 21, 1 << 47
VLLM_TIMEOUT_SECONDS = 180
# In a process of its own: importing vLLM takes seconds, and a broken installation must not take the report
# along.
_VLLM_CODE = """
import json
from vllm_integration.plugin import incompatibility
print(json.dumps({"reason": incompatibility()}))
"""


@dataclass(frozen=True)
class Diagnosis:
    """The report: findings in reading order, and the facts behind them for machines."""

    findings: list[Finding]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether nothing stands against an extensible cache here."""
        return all(finding.level != "problem" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return {"works": self.works, **self.facts, "findings": [asdict(item) for item in self.findings]}


def diagnose(device: str | None = None, *, with_vllm: bool = True, root: Path = Path("/")) -> Diagnosis:
    """Examine `device`, this process's settings and limits, and vLLM.

    Never raises for a device that cannot be used. Limits are read from the files below `root`.
    """
    facts: dict[str, Any] = {"hardware": describe_hardware(), "versions": describe_versions()}
    findings = [Finding("hardware", facts["hardware"])]
    findings += [Finding(name, version) for name, version in facts["versions"].items() if name != "vllm"]
    on_gpu = _examine_device(device, facts, findings)
    findings += check_settings(os.environ, on_gpu=on_gpu) or [Finding("settings", "none in conflict")]
    limits = read_limits(root)
    facts["limits"] = asdict(limits)
    findings += check_limits(limits, on_gpu=on_gpu) or [Finding("limits", "none that matters")]
    if with_vllm:
        facts["vllm"] = _examine_vllm(facts["versions"].get("vllm"), findings)
    return Diagnosis(findings, facts)


def reservation_limit(driver: int, device_index: int) -> int:
    """Return the largest power of two, in bytes, that one reservation may have; 0 where 2 MiB fail."""
    from allocator.reservation import Reservation

    found, size = 0, MIN_LIMIT_BYTES
    while size <= MAX_LIMIT_BYTES:
        try:
            Reservation.reserve(driver, device_index, size).unreserve()
        except (EkvError, MemoryError):
            break
        found, size = size, size * 2
    return found


def _examine_device(device: str | None, facts: dict[str, Any], findings: list[Finding]) -> bool:
    """Add what there is to say of the device; return whether it is a GPU."""
    try:
        from allocator.probing import memory_info, probe
        from allocator.torch_routing import current_allocator, driver_of, resolve_device
    except ImportError as error:
        facts["device"] = device
        advice = "build it: `python -m pip install --no-build-isolation -e .` in the source tree"
        findings.append(Finding("extension module", str(error), "problem", advice))
        return False
    try:
        torch_device = resolve_device(device)
        found = probe(torch_device)
    except (EkvError, RuntimeError, AssertionError) as error:
        facts["device"] = device
        findings.append(Finding("device", str(device), "problem", str(error)))
        return False
    facts |= {"device": str(torch_device), "driver": found.driver, "probe": asdict(found)}
    on_gpu = torch_device.type == "cuda"
    findings += [Finding("device", str(torch_device)), Finding("driver", found.driver)]
    if on_gpu:
        facts["torch_allocator"] = current_allocator()
        findings.append(_allocator_finding(facts["torch_allocator"]))
    if not found.available:
        advice = f"{found.reason}; vLLM keeps its normal cache"
        findings.append(Finding("virtual memory", "unavailable", "problem", advice))
        return on_gpu
    free_bytes, total_bytes = memory_info(torch_device)
    limit = reservation_limit(*driver_of(torch_device))
    facts |= {"free_bytes": free_bytes, "total_bytes": total_bytes, "reservation_limit_bytes": limit}
    sizes = (found.granularity, found.recommended_granularity, found.shareable_granularity)
    granularities = "{}, recommended {}, shareable {}".format(*map(format_bytes, sizes))
    findings += [
        Finding("virtual memory", "works"),
        Finding("memory", f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"),
        Finding("granularity", granularities),
        _handle_finding(found.handle_kind, found.handle_reason, on_gpu),
        _rdma_finding(found.gpu_direct_rdma, on_gpu),
        _limit_finding(limit, total_bytes),
    ]
    return on_gpu


def _allocator_finding(current: str) -> Finding:
    if current != "foreign":
        return Finding("PyTorch's allocator", current)
    advice = (
        "torch.cuda.memory.change_current_allocator was called with somebody else's, which would take the "
        "pool's tensors: do not call it, or with allocator.pluggable_allocator()"
    )
    return Finding("PyTorch's allocator", "another pluggable one", "problem", advice)


def _handle_finding(kind: str, reason: str, on_gpu: bool) -> Finding:
    if kind != "none":
        # Why a better kind failed is a driver's error code, no error here: it is among the facts.
        limit = "enough on one machine; UCX asks for fabric handles, and --json says why there are none"
        return Finding("shareable handles", kind, "ok", limit if reason and on_gpu else "")
    advice = f"export, and connectors that register memory, cannot use this device: {reason}"
    return Finding("shareable handles", kind, "note", advice)


def _rdma_finding(capable: bool, on_gpu: bool) -> Finding:
    if capable or not on_gpu:
        return Finding("GPUDirect RDMA", "yes" if capable else "no")
    advice = "network cards copy through host memory; where the device has it, update the driver"
    return Finding("GPUDirect RDMA", "no", "ok", advice)


def _limit_finding(limit: int, total_bytes: int) -> Finding:
    value = f"{format_bytes(limit)} or more" if limit < MAX_LIMIT_BYTES else f"at least {format_bytes(limit)}"
    if limit == 0:
        advice = f"not even {format_bytes(MIN_LIMIT_BYTES)}: raise `ulimit -v`"
        return Finding("largest reservation", "none", "problem", advice)
    if limit < total_bytes // 2:
        advice = "less than the memory: the cache will be smaller; raise `ulimit -v` if that is set"
        return Finding("largest reservation", value, "note", advice)
    return Finding("largest reservation", value)


def _examine_vllm(version: str | None, findings: list[Finding]) -> dict[str, Any]:
    if version is None:
        advice = "install it beside this package; --no-vllm asks for the pool alone"
        findings.append(Finding("vLLM", "not installed", "problem", advice))
        return {"version": None, "supported": None, "reason": None}
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-c", _VLLM_CODE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=VLLM_TIMEOUT_SECONDS, env=environment
        )
        last = (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1:]
        reason = (
            json.loads(last[0])["reason"] if done.returncode == 0 else f"it does not import: {''.join(last)}"
        )
    except subprocess.TimeoutExpired:
        reason = f"importing it took more than {VLLM_TIMEOUT_SECONDS} s"
    except (json.JSONDecodeError, IndexError, KeyError):
        reason = "the check gave no answer"
    level, advice = ("problem", reason) if reason else ("ok", "supported")
    findings.append(Finding("vLLM", version, level, advice))
    return {"version": version, "supported": reason is None, "reason": reason}
