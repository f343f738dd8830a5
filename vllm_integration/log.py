"""The plugin's logger: a child of vLLM's, so that vLLM's level, handlers and format apply to it."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["format_bytes", "logger"]


class _Logger:
    """Looks the logger up on each call, because importing the plugin must not configure vLLM's logging."""

    def __getattr__(self, name: str) -> Any:
        return getattr(logging.getLogger("vllm.extensible_kv"), name)


logger: Any = _Logger()


def format_bytes(num_bytes: int | float) -> str:
    """Return `num_bytes` in GiB, or in MiB where GiB would hide it."""
    if abs(num_bytes) < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
