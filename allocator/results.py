"""The one schema of benchmark results: build, check, write, read and print them.

A file is one run: where and when it ran, and a list of records. A record is one number with its unit and,
where there is one, the limit it has to keep. Needs the standard library only; `rich` makes the table nicer
where it is installed.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from allocator.machine import describe_commit, describe_hardware, describe_versions
from allocator.results_schema import ResultsError, Value, check_record, passes, validate

__all__ = [
    "ResultsError",
    "build",
    "failed",
    "from_samples",
    "print_table",
    "read",
    "record",
    "validate",
    "wide_console",
    "write",
]

_SIGNS = {"lower": "≤", "higher": "≥", "equal": "="}


def record(
    name: str,
    value: Value,
    unit: str,
    *,
    limit: Value | None = None,
    better: str = "lower",
    repeats: int = 1,
    spread: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Return one record; `passed` follows from the value and the limit, and is None without a limit.

    Parameters
    ----------
    name : str
        What was measured, unique in its file.
    value : int, float, bool or str
        The result in `unit`; of several repeats, their median. Text only where `better` is "equal".
    unit : str
        Such as "ms", "bytes" or "blocks"; empty for a plain truth or ratio.
    limit : same as value, optional
        The value passes at the limit or on its better side.
    better : {"lower", "higher", "equal"}
        Which side that is.
    repeats : int
        How often it was measured, at least 1.
    spread : float, optional
        Largest minus smallest repeat, in `unit`.
    note : str
        What a reader must know, such as what was not measured.
    """
    fields = {
        "name": name,
        "value": value,
        "unit": unit,
        "limit": limit,
        "better": better,
        "passed": passes(value, limit, better),
        "repeats": repeats,
        "spread": spread,
        "note": note,
    }
    check_record(fields, "record")
    return fields


def from_samples(name: str, samples: Sequence[float], unit: str, **fields: Any) -> dict[str, Any]:
    """Return the record of repeated measurements: median, number and spread of `samples`."""
    if not samples:
        raise ResultsError(f"record.value: {name} has 0 samples")
    spread = max(samples) - min(samples) if len(samples) > 1 else None
    return record(name, statistics.median(samples), unit, repeats=len(samples), spread=spread, **fields)


def build(
    records: Sequence[Mapping[str, Any]], *, command: str | None = None, hardware: str | None = None
) -> dict[str, Any]:
    """Return a checked results file of `records`, with clock, machine, versions and commit filled in.

    `command` defaults to this process's command line, with absolute paths cut to their last part.
    """
    data = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _portable(sys.argv) if command is None else command,
        "hardware": describe_hardware() if hardware is None else hardware,
        "versions": describe_versions(),
        "commit": describe_commit(),
        "records": [dict(item) for item in records],
    }
    validate(data)
    return data


def write(path: str | Path, data: Mapping[str, Any]) -> None:
    """Check `data` and write it as JSON; the file is unchanged when the check fails."""
    validate(data)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def read(path: str | Path) -> dict[str, Any]:
    """Return the checked content of a results file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultsError(f"file: {Path(path).name} is not JSON: {error}") from None
    validate(data)
    return data


def failed(data: Mapping[str, Any]) -> list[str]:
    """Return the names of the records that break their limit."""
    return [item["name"] for item in data["records"] if item["passed"] is False]


def print_table(data: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print a results file for people, to standard output by default."""
    rows = [_row(item) for item in data["records"]]
    headers = ("what", "value", "unit", "limit", "", "n", "spread", "note")
    title = f"{data['command']}\n{data['date']}, {data['hardware']}, commit {_short(data['commit'])}"
    try:
        from rich import box
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [headers, *rows]
        ]
        print(title, *(line.rstrip() for line in lines), sep="\n", file=file or sys.stdout)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in headers:
        right = header in ("value", "limit", "n", "spread")
        table.add_column(header, justify="right" if right else "left", overflow="fold")
    colours = {True: "green", False: "bold red", None: ""}
    for row, item in zip(rows, data["records"], strict=True):
        table.add_row(*row, style=colours[item["passed"]])
    console = wide_console(file)
    console.print(title, markup=False, highlight=False)
    console.print(table)


def wide_console(file: TextIO | None = None) -> Any:
    """Return a `rich.console.Console` that does not wrap at 80 columns where the output is no terminal."""
    from rich.console import Console

    known = (file or sys.stdout).isatty() or "COLUMNS" in os.environ
    return Console(file=file, width=None if known else 140)


def _row(item: Mapping[str, Any]) -> tuple[str, ...]:
    limit = "" if item["limit"] is None else f"{_SIGNS[item['better']]} {_number(item['limit'])}"
    passed = {True: "ok", False: "FAILED", None: ""}[item["passed"]]
    spread = "" if item["spread"] is None else _number(item["spread"])
    value, repeats = _number(item["value"]), str(item["repeats"])
    return (item["name"], value, item["unit"], limit, passed, repeats, spread, item["note"])


def _short(commit: str) -> str:
    name, dash, state = commit.partition("-")
    return f"{name[:12]}{dash}{state}"


def _number(value: Value) -> str:
    if isinstance(value, (bool, str)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.4g}"


def _portable(arguments: Sequence[str]) -> str:
    cut = [Path(text).name if Path(text).is_absolute() else text for text in arguments]
    return shlex.join(cut)
