"""The vLLM plugin: a KV cache that reserves its addresses first and takes its memory after warm-up.

vLLM loads `register` through the entry point group ``vllm.general_plugins`` in every process. Importing this
package does the same, which makes ``LLM(..., enable_extensible_kv_cache=True)`` work before vLLM has loaded
any plugin. Without the switch nothing changes: each wrapper looks at the switch first and calls the original.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

__all__ = ["register"]


def register() -> None:
    """Prepare this process; safe to call any number of times, in any process, before or after a fork."""
    from vllm_integration import plugin

    plugin.register()


def _register_on_import() -> None:
    # When vLLM itself loads its plugins it calls `register` next, in processes that need no flag as well.
    plugins = sys.modules.get("vllm.plugins")
    if not getattr(plugins, "plugins_loaded", False) and find_spec("vllm") is not None:
        import_module("vllm.engine.arg_utils")
        register()


_register_on_import()
