"""What a results file must look like: the checks behind `allocator.results`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from allocator.errors import EkvError

__all__ = ["ResultsError", "Value", "check_record", "passes", "validate"]

Value = bool | int | float | str

_HOLDS = {
    "lower": lambda value, limit: value <= limit,
    "higher": lambda value, limit: value >= limit,
    "equal": lambda value, limit: value == limit,
}
_FILE_FIELDS = ("date", "command", "hardware", "versions", "commit", "records")
_RECORD_FIELDS = ("name", "value", "unit", "limit", "better", "passed", "repeats", "spread", "note")
_ABSOLUTE_PATH = re.compile(r"(?:^|[\s'\"=:,(])/[\w.-]+/")


class ResultsError(EkvError, ValueError):
    """A results file or record breaks the schema; the message starts with the field."""


def validate(data: Any) -> None:
    """Raise `ResultsError` that names the first field of `data` that breaks the schema."""
    _check_fields(data, _FILE_FIELDS, "file")
    for field in ("date", "command", "hardware", "commit"):
        _check_text(data[field], f"file.{field}")
    try:
        date = datetime.fromisoformat(data["date"])
    except ValueError as error:
        raise ResultsError(f"file.date: {error}") from None
    if date.tzinfo is None:
        raise ResultsError(f"file.date: {data['date']} has no time zone")
    versions = data["versions"]
    if not isinstance(versions, Mapping) or "python" not in versions:
        raise ResultsError(f"file.versions: expected names and versions, python among them, got {versions!r}")
    for name, version in versions.items():
        _check_text(name, "file.versions")
        _check_text(version, f"file.versions.{name}")
    records = data["records"]
    if not isinstance(records, list) or not records:
        raise ResultsError(f"file.records: expected a list of records, got {records!r}")
    for index, item in enumerate(records):
        check_record(item, f"records[{index}]")
    names = [item["name"] for item in records]
    for name in names:
        if names.count(name) > 1:
            raise ResultsError(f"file.records: {names.count(name)} records have the name {name!r}")


def passes(value: Value, limit: Value | None, better: str) -> bool | None:
    """Return whether `value` keeps `limit`, None where there is no limit."""
    if limit is None or better not in _HOLDS:
        return None
    if isinstance(value, str) != isinstance(limit, str):
        raise ResultsError(f"record.limit: {limit!r} cannot be compared with the value {value!r}")
    return bool(_HOLDS[better](value, limit))


def _check_fields(data: Any, fields: Sequence[str], where: str) -> None:
    if not isinstance(data, Mapping):
        raise ResultsError(f"{where}: expected an object, got {type(data).__name__}")
    for field in fields:
        if field not in data:
            raise ResultsError(f"{where}.{field}: missing")
    for field in data:
        if field not in fields:
            raise ResultsError(f"{where}.{field}: not a field of the schema")


def check_record(item: Any, where: str) -> None:
    """Raise `ResultsError` that names the first field of one record that breaks the schema."""
    _check_fields(item, _RECORD_FIELDS, where)
    _check_text(item["name"], f"{where}.name")
    _check_text(item["unit"], f"{where}.unit", empty=True)
    _check_text(item["note"], f"{where}.note", empty=True)
    if item["better"] not in _HOLDS:
        raise ResultsError(f"{where}.better: expected one of {', '.join(_HOLDS)}, got {item['better']!r}")
    for field in ("value", "limit", "spread"):
        value = item[field]
        if value is None and field != "value":
            continue
        if isinstance(value, str) and item["better"] == "equal" and field != "spread":
            _check_text(value, f"{where}.{field}")
        elif not isinstance(value, (bool, int, float)) or not math.isfinite(value):
            raise ResultsError(f"{where}.{field}: expected a finite number, got {value!r}")
    if item["spread"] is not None and item["spread"] < 0:
        raise ResultsError(f"{where}.spread: {item['spread']} is negative")
    if type(item["repeats"]) is not int or item["repeats"] < 1:
        raise ResultsError(f"{where}.repeats: expected a number from 1 on, got {item['repeats']!r}")
    expected = passes(item["value"], item["limit"], item["better"])
    if item["passed"] is not expected:
        raise ResultsError(f"{where}.passed: {item['passed']!r}, but value and limit say {expected!r}")


def _check_text(value: Any, where: str, *, empty: bool = False) -> None:
    if not isinstance(value, str) or not (value or empty):
        raise ResultsError(f"{where}: expected text, got {value!r}")
    if _ABSOLUTE_PATH.search(value):
        raise ResultsError(f"{where}: {value!r} holds a path of one machine")
