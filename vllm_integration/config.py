"""The switch and its options, as they travel to every process in ``VllmConfig.additional_config``.

``additional_config["extensible_kv_cache"]`` is one of

- missing, ``False`` or ``None``: off, and vLLM does what it always does;
- ``True``: on, with the default options;
- a dictionary of options: on, unless it holds ``"enabled": False``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["DEFAULT_MARGIN_BYTES", "SWITCH", "Options", "options_of", "switch", "switched"]

SWITCH = "extensible_kv_cache"
DEFAULT_MARGIN_BYTES = 150 << 20
_NOT_A_SWITCH = f"additional_config[{SWITCH!r}] must be true, false or a dictionary of options, got {{!r}}"


@dataclass(frozen=True)
class Options:
    """What can be set beside the switch.

    Parameters
    ----------
    margin_bytes : int
        Bytes of the budget that stay unused, for what the widest step's second run may need beyond its first:
        fragmentation of PyTorch's cache, and libraries that allocate late. Not subtracted from an explicit
        size. 0 or more, default 150 MiB.
    max_chunk_bytes : int or None
        Largest physical allocation, in bytes; also the unit of shrinking. None takes the allocator's default.
    warmup_blocks : int or None
        Blocks that are backed during warm-up, at least 2. None derives it from what warm-up touches.
    report : str or None
        Path of a JSON file that the engine core writes once it is ready, see `report.build`. Engines of data
        parallelism after the first add ``.engine1`` and so on to the name.
    sleep_backup : str or None
        ``"cpu"``: a sleep of level 1 keeps the content of cached blocks in host memory, so that prefix-cache
        hits survive it. None: the content is gone, as vLLM's own sleep has it.
    host_staged_transfers : bool
        Have an extensible cache also where that makes NIXL copy blocks between two processes of one host
        through host memory, see `connectors.staging_reason`. False: vLLM's normal cache is used there.
    enabled : bool
        False is the same as leaving the switch out.
    """

    margin_bytes: int = DEFAULT_MARGIN_BYTES
    max_chunk_bytes: int | None = None
    warmup_blocks: int | None = None
    report: str | None = None
    sleep_backup: str | None = None
    host_staged_transfers: bool = False
    enabled: bool = True

    def __post_init__(self) -> None:
        _check_int("margin_bytes", self.margin_bytes, 0)
        _check_int("max_chunk_bytes", self.max_chunk_bytes, 1, optional=True)
        _check_int("warmup_blocks", self.warmup_blocks, 2, optional=True)
        if self.report is not None and (not isinstance(self.report, str) or not self.report):
            raise ValueError(f"{SWITCH}: report must be a path, got {self.report!r}")
        if self.sleep_backup not in (None, "cpu"):
            raise ValueError(f'{SWITCH}: sleep_backup must be "cpu" or null, got {self.sleep_backup!r}')
        for name in ("host_staged_transfers", "enabled"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{SWITCH}: {name} must be true or false, got {value!r}")


def options_of(vllm_config: Any) -> Options | None:
    """Return the options that `vllm_config` asks for, or None when the switch is off.

    Raises
    ------
    ValueError
        An option that does not exist, or a value it cannot have.
    """
    additional = getattr(vllm_config, "additional_config", None)
    value = additional.get(SWITCH) if isinstance(additional, Mapping) else None
    if value is None or value is False:
        return None
    if value is True:
        return Options()
    if not isinstance(value, Mapping):
        raise ValueError(_NOT_A_SWITCH.format(value))
    known = [field.name for field in fields(Options)]
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ValueError(f"{SWITCH}: unknown options {', '.join(unknown)}; known are {', '.join(known)}")
    options = Options(**value)
    return options if options.enabled else None


def switched(additional: Any, on: bool) -> dict[str, Any]:
    """Return a copy of the dictionary `additional` with the switch set to `on`; options in it stay.

    Off goes over anything. Raises `ValueError` where on meets a switch that is off, or is none.
    """
    if additional is not None and not isinstance(additional, Mapping):
        raise ValueError(f"additional_config must be a dictionary to carry {SWITCH!r}, got {additional!r}")
    result = dict(additional or {})
    options = result.get(SWITCH)
    if on and (options is False or (isinstance(options, Mapping) and options.get("enabled") is False)):
        raise ValueError(
            f"enable_{SWITCH} is set, and additional_config[{SWITCH!r}]={options!r} switches it off: drop one"
        )
    if options is not None and not isinstance(options, bool | Mapping):
        raise ValueError(_NOT_A_SWITCH.format(options))
    if isinstance(options, Mapping):
        if isinstance(options.get("enabled", on), bool):  # else it stays, to be refused by its name
            result[SWITCH] = {**options, "enabled": on}
    else:
        result[SWITCH] = on
    return result


def switch(config: Any, on: bool) -> None:
    """Set the switch in `config.additional_config`, on a copy: a caller's dictionary is never written to."""
    config.additional_config = switched(config.additional_config, on)


def _check_int(name: str, value: Any, minimum: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{SWITCH}: {name} must be an integer of at least {minimum}, got {value!r}")
