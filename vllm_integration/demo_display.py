"""The demo's progress display: one line a stage, alive while the stage runs."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column

from vllm_integration.log import format_bytes
from vllm_integration.stages import STAGES

__all__ = ["StageDisplay"]

WHAT = {
    "load": "load the model, profile",
    "reserve": "reserve addresses for all of it",
    "prefix": "back what warm-up needs",
    "warm-up": "warm up and capture graphs",
    "measure": "run the widest step, measure",
    "commit": "back the rest in place",
    "generate": "generate",
}


class StageDisplay:
    """A listener for `vllm_integration.stages` that shows each stage; a context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.fields[stage]}", table_column=Column(no_wrap=True, min_width=8)),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=30)),
            TextColumn("{task.fields[result]}", table_column=Column(no_wrap=True)),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        for stage in ("load", *STAGES, "generate"):
            fields: dict[str, Any] = {"stage": stage, "result": ""}
            self._tasks[stage] = self._progress.add_task(WHAT[stage], start=False, total=1, **fields)

    def __enter__(self) -> StageDisplay:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __call__(self, stage: str, record: dict[str, Any] | None) -> None:
        """Begin `stage`, or end it with what its record says."""
        if record is None:
            self.begin(stage)
            return
        blocks, size = record["committed_blocks"], format_bytes(record["physical_bytes"])
        result = f"{record['seconds']:7.3f} s  {blocks:,} blocks, {size}"
        if stage == "reserve":
            result = f"{record['seconds']:7.3f} s  {format_bytes(record['reserved_bytes'])} of addresses"
        self._progress.update(self._tasks[stage], completed=1, result=result)

    def begin(self, stage: str) -> None:
        """Show `stage` as running; a stage that runs between two others ends the loading."""
        if stage != "load":
            self._progress.update(self._tasks["load"], completed=1)
        self._progress.start_task(self._tasks[stage])

    def advance(self, stage: str, part: float) -> None:
        """Show that `part` of `stage` is done, between 0 and 1."""
        self._progress.update(self._tasks[stage], completed=min(part, 0.999), result=f"{part:.0%}")

    def stop(self) -> None:
        """End the display and leave its last state on the screen."""
        self._progress.stop()
