"""What `extensible-kv doctor` finds out, by trying: driver, reservations, settings, vLLM."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from allocator.errors import EkvError
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


def diagnose(device: str | None = None, *, with_vllm: bool = True) -> Diagnosis:
    """Examine `device`, this process's settings and vLLM. Never raises for a device that cannot be used."""
    facts: dict[str, Any] = {"hardware": describe_hardware(), "versions": describe_versions()}
    findings = [Finding("hardware", facts["hardware"])]
    findings += [Finding(name, version) for name, version in facts["versions"].items() if name != "vllm"]
    on_gpu = _examine_device(device, facts, findings)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    address_space = None if limit == resource.RLIM_INFINITY else limit
    findings += check_settings(os.environ, on_gpu=on_gpu, address_space_bytes=address_space)
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
        from allocator.torch_routing import driver_of, resolve_device
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
    findings += [Finding("device", str(torch_device)), Finding("driver", found.driver)]
    if not found.available:
        findings.append(Finding("virtual memory", "unavailable", "problem", found.reason))
        return torch_device.type == "cuda"
    free_bytes, total_bytes = memory_info(torch_device)
    limit = reservation_limit(*driver_of(torch_device))
    facts |= {"free_bytes": free_bytes, "total_bytes": total_bytes, "reservation_limit_bytes": limit}
    sizes = (found.granularity, found.recommended_granularity, found.shareable_granularity)
    granularities = "{}, recommended {}, shareable {}".format(*map(format_bytes, sizes))
    findings += [
        Finding("virtual memory", "works"),
        Finding("memory", f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"),
        Finding("granularity", granularities),
        Finding("shareable handles", found.handle_kind, "ok", found.handle_reason),
        Finding("GPUDirect RDMA", "yes" if found.gpu_direct_rdma else "no"),
        _limit_finding(limit, total_bytes),
    ]
    return torch_device.type == "cuda"


def _limit_finding(limit: int, total_bytes: int) -> Finding:
    value = f"{format_bytes(limit)} or more" if limit < MAX_LIMIT_BYTES else f"at least {format_bytes(limit)}"
    if limit == 0:
        return Finding("largest reservation", "none", "problem", f"not even {format_bytes(MIN_LIMIT_BYTES)}")
    if limit < total_bytes // 2:
        return Finding(
            "largest reservation", value, "note", "less than the memory: the cache will be smaller"
        )
    return Finding("largest reservation", value)


def _examine_vllm(version: str | None, findings: list[Finding]) -> dict[str, Any]:
    if version is None:
        findings.append(Finding("vLLM", "not installed", "note", "the pool works without it"))
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
