"""The flag: three ways in, one place where it is kept, and what happens to a configuration that has it.

``vllm serve --enable-extensible-kv-cache``, ``LLM(..., enable_extensible_kv_cache=True)`` and
``additional_config={"extensible_kv_cache": True}`` all end in `additional_config`, which travels to every
process. The command line keeps the flag in a destination of its own until the engine arguments exist, because
a later ``--additional-config '{...}'`` replaces the whole dictionary.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from vllm_integration.config import options_of, switch

__all__ = ["KEYWORD", "wrap_add_cli_args", "wrap_create_engine_config", "wrap_from_cli_args", "wrap_init"]

KEYWORD = "enable_extensible_kv_cache"
HELP = (
    "Reserve the addresses of the KV cache before warm-up and take its memory after it, from what is then "
    'really free. Options go into --additional-config \'{"extensible_kv_cache": {"margin_bytes": ...}}\'.'
)


def wrap_init(original: Any) -> Any:
    """Let the engine arguments take the keyword; it ends in `additional_config`."""

    @functools.wraps(original)
    def __init__(
        self: Any, *args: Any, enable_extensible_kv_cache: bool | None = None, **kwargs: Any
    ) -> None:
        original(self, *args, **kwargs)
        if enable_extensible_kv_cache is not None:
            switch(self, bool(enable_extensible_kv_cache))

    return __init__


def wrap_add_cli_args(original: Any) -> Any:
    """Add the flag to the parser of ``vllm serve`` and of everything else that takes engine arguments."""

    @functools.wraps(original.__func__)
    def add_cli_args(parser: Any) -> Any:
        parser = original.__func__(parser)
        if not any(action.dest == KEYWORD for action in parser._actions):
            group = parser.add_argument_group(title="ExtensibleKVCache", description="Plugin extensible-kv.")
            group.add_argument(
                "--" + KEYWORD.replace("_", "-"),
                action=argparse.BooleanOptionalAction,
                default=None,
                help=HELP,
            )
        return parser

    return staticmethod(add_cli_args)


def wrap_from_cli_args(original: Any) -> Any:
    """Merge the flag's own destination into `additional_config`, whatever else was set there."""

    @functools.wraps(original.__func__)
    def from_cli_args(cls: Any, args: Any) -> Any:
        engine_args = original.__func__(cls, args)
        flag = getattr(args, KEYWORD, None)
        if flag is not None:
            switch(engine_args, bool(flag))
        return engine_args

    return classmethod(from_cli_args)


def wrap_create_engine_config(original: Any) -> Any:
    """Prepare a configuration that has the switch on: check vLLM, choose the worker class."""

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(self, *args, **kwargs)
        if options_of(vllm_config) is not None:
            from vllm_integration import plugin

            # Each API server makes its own configuration; one of them is enough to hear about it.
            plugin.activate(vllm_config, quiet=getattr(self, "_api_process_rank", 0) > 0)
        return vllm_config

    return create_engine_config
