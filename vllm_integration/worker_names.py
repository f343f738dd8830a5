"""Names of worker classes: how ``--worker-cls`` names the extended form of any worker class.

vLLM resolves ``package.module.Class`` by importing ``package.module`` and reading the attribute ``Class``.
The module `vllm_integration.workers` makes the attribute when it is asked for, so that
``vllm_integration.workers.my:module:Worker`` is ``my.module.Worker`` with the extensible cache.
"""

from __future__ import annotations

__all__ = ["PREFIX", "base_name", "extensible_name"]

PREFIX = "vllm_integration.workers."


def extensible_name(worker_cls: str) -> str:
    """Return the qualified name of the extended form of `worker_cls`; extending twice changes nothing."""
    return worker_cls if worker_cls.startswith(PREFIX) else PREFIX + worker_cls.replace(".", ":")


def base_name(attribute: str) -> str:
    """Return the qualified name of the class that ``vllm_integration.workers.<attribute>`` extends."""
    return attribute.replace(":", ".")
