"""The figures of a start on ``/metrics``: they cross to the front end in the engine core's ready message.

vLLM's own entry point for metrics (``vllm.stat_logger_plugins``) is not used: a plugin there switches
statistics on for every server, also without the flag, and would still have to get its figures across.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from vllm_integration.log import logger

__all__ = ["FIELD", "figures_of", "publish", "wrap_apply_ready_response", "wrap_make_ready_response"]

FIELD = "extensible_kv_cache"
LABELS = ("model_name", "engine", "rank")
# Not "vllm:": vLLM removes what has that prefix from the registry when it makes its own metrics.
GAUGES = {
    "capacity_blocks": "Blocks that the reserved addresses have room for.",
    "capacity_bytes": "Bytes that these blocks would take.",
    "committed_blocks": "Blocks that are backed with memory, and that the scheduler uses.",
    "committed_bytes": "Bytes of these blocks.",
    "physical_bytes": "Bytes that the driver gave for them, in whole granules.",
    "commit_seconds": "Wall time of the last commit, zeroing included.",
}
MEMORY = "memory_bytes"
MEMORY_HELP = "The start-up table: where the requested memory goes, by vLLM's profile and as measured."


def figures_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the part of a start's report that becomes gauges, one entry for each rank."""
    return [{name: rank[name] for name in ("rank", *GAUGES, "table")} for rank in report["ranks"]]


def wrap_make_ready_response(original: Any) -> Any:
    """Send the figures along with `EngineCoreProc`'s ready message; a front end without us ignores them."""

    @functools.wraps(original)
    def _make_ready_response(self: Any) -> Any:
        response = original(self)
        report = getattr(self, "_ekv_report", None)
        return response if report is None else _extended(response, figures_of(report))

    return _make_ready_response


def wrap_apply_ready_response(original: Any) -> Any:
    """Publish the figures in the process that serves ``/metrics``, once for each engine that is ready."""

    @functools.wraps(original)
    def _apply_ready_response(self: Any, payload: bytes) -> None:
        original(self, payload)
        if payload:
            import msgspec

            message = msgspec.msgpack.decode(payload)
            if message.get(FIELD):
                publish(self.vllm_config, message.get("data_parallel_rank", 0), message[FIELD])

    return _apply_ready_response


def publish(vllm_config: Any, engine: int, ranks: list[dict[str, Any]]) -> None:
    """Set the gauges of one engine. Metrics are never worth an engine: a failure is only logged."""
    try:
        model = vllm_config.model_config.served_model_name
        gauges = _gauges()
        for figures in ranks:
            labels = {"model_name": model, "engine": str(engine), "rank": str(figures["rank"])}
            for name in GAUGES:
                gauges[name].labels(**labels).set(figures[name])
            for row in figures["table"]:
                for source in ("stock", "measured"):
                    value = row[f"{source}_bytes"]
                    if value is not None:
                        gauges[MEMORY].labels(**labels, part=row["part"], source=source).set(value)
    except Exception as error:
        logger.warning("Extensible KV cache: no metrics: %s: %s", type(error).__name__, error)


def _extended(response: Any, figures: list[dict[str, Any]]) -> Any:
    kind = dataclasses.make_dataclass(
        type(response).__name__,
        [(FIELD, list, dataclasses.field(default_factory=list))],
        bases=(type(response),),
    )
    values = {field.name: getattr(response, field.name) for field in dataclasses.fields(response)}
    return kind(**values, **{FIELD: figures})


@functools.cache
def _gauges() -> dict[str, Any]:
    # Imported late: in a server with several processes an environment variable decides what a Gauge is.
    from prometheus_client import Gauge

    def gauge(name: str, text: str, labels: tuple[str, ...]) -> Any:
        return Gauge(f"extensible_kv:{name}", text, labels, multiprocess_mode="mostrecent")

    gauges = {name: gauge(name, text, LABELS) for name, text in GAUGES.items()}
    gauges[MEMORY] = gauge(MEMORY, MEMORY_HELP, (*LABELS, "part", "source"))
    return gauges
