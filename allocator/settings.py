"""Settings of a process that a pool cannot work with, or that a user should know of; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Finding", "allocator_options", "check_settings"]

ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
UNCACHED = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
OWN = ("EKV_HOST_GRANULARITY", "EKV_HOST_BUDGET", "EKV_CUDA_LIBRARY", "EKV_HIP_LIBRARY")
PLUGIN = "extensible_kv"


@dataclass(frozen=True)
class Finding:
    """One line of a report: `level` is "ok", "note" (works, but know it) or "problem" (does not work)."""

    name: str
    value: str
    level: str = "ok"
    advice: str = ""


def allocator_options(text: str) -> dict[str, str]:
    """Return the options in the text of `PYTORCH_ALLOC_CONF`; values may be lists in brackets."""
    parts = re.split(r",(?![^\[]*\])", text)
    pairs = (part.partition(":") for part in parts if part.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def check_settings(environ: Mapping[str, str], *, on_gpu: bool) -> list[Finding]:
    """Return what is worth knowing of the environment, and what to do about it."""
    findings = [*_alloc_conf(environ, on_gpu)]
    for name in UNCACHED:
        if environ.get(name):
            value, level = environ[name], "problem" if on_gpu else "note"
            advice = "without PyTorch's cache its MemPools take nothing: unset it"
            findings.append(Finding(name, value, level, advice))
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        advice = f"vLLM loads only the plugins named there: add {PLUGIN}"
        findings.append(Finding("VLLM_PLUGINS", plugins or "(empty)", "problem", advice))
    own = [name for name in OWN if environ.get(name)]
    return findings + [
        Finding(name, environ[name], "note", "changes this package: unset it unless you mean it")
        for name in own
    ]


def _alloc_conf(environ: Mapping[str, str], on_gpu: bool) -> list[Finding]:
    findings = []
    for name in ALLOC_CONF:
        value = environ.get(name)
        if not value:
            continue
        options = allocator_options(value)
        if options.get("backend") == "cudaMallocAsync":
            # Source: PyTorch 2.13, c10/cuda/CUDACachingAllocator.h: createOrIncrefPool is the native
            # backend's.
            level, advice = "problem" if on_gpu else "note", "this backend has no MemPool: remove `backend`"
        elif _fraction(options) < 1:
            level = "problem" if on_gpu else "note"
            advice = "PyTorch takes addresses for memory, and the fraction limits them: remove it"
        elif options.get("expandable_segments", "").lower() == "true":
            level, advice = (
                "note",
                "works: the pool's tensors stay out of expandable segments, the rest uses them",
            )
        else:
            level, advice = "ok", ""
        findings.append(Finding(name, value, level, advice))
    return findings


def _fraction(options: Mapping[str, str]) -> float:
    """Return the option `per_process_memory_fraction`, 1 where it is not set or nonsense."""
    try:
        return float(options.get("per_process_memory_fraction", 1))
    except ValueError:
        return 1.0
