"""Worker classes with the extensible cache, made from whichever worker class vLLM or the user chose."""

from __future__ import annotations

import importlib
from typing import Any

from vllm_integration.worker_names import base_name

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    """Return the extended form of the class that `name` stands for, always the same object."""
    module_name, _, class_name = base_name(name).rpartition(".")
    if ":" not in name or not module_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_integration.worker import extend

    extended = extend(getattr(importlib.import_module(module_name), class_name))
    return globals().setdefault(name, extended)
