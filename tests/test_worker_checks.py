"""What a worker finds out by trying, and what it reads off vLLM's plan, without an engine."""

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from pools import run_python

# In GiB: what is wanted, the least, and what is found where 4 GiB of addresses are left.
ADDRESSES = [
    (3, 1, 3),
    (8, 1, 8 * 27 / 64),  # three steps of a quarter each
    (8, 3.5, 3.5),  # the third step is cut to the least
    (8, 5, 0),
    (3, 5, 3),
    (0, 0, 0),
]
RESERVABLE = """
import resource, torch
from allocator.shim import lib
from vllm_integration.worker_checks import reservable_bytes
GIB = 1 << 30
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 4 * GIB, used + 4 * GIB))
for wanted, least, _ in {cases}:
    print(reservable_bytes(torch.device("cpu"), int(wanted * GIB), int(least * GIB)) / GIB)
print(lib.ekv_num_reservations())
"""


def test_addresses_are_looked_for_from_what_is_wanted_down_to_the_least() -> None:
    """Case 37."""
    process = run_python(RESERVABLE.format(cases=ADDRESSES))
    assert process.returncode == 0, process.stderr
    found = [float(number) for number in process.stdout.split()]
    assert found == [*(found for _, _, found in ADDRESSES), 0]


AGREE = """
import sys
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm_integration.worker_checks import agreed, agreed_least
rank = int(sys.argv[1])
with set_current_vllm_config(VllmConfig()):
    parallel_state.init_distributed_environment(2, rank, sys.argv[2], rank, "gloo")
parallel_state._DP = parallel_state.get_world_group()  # as where each engine has one worker
print(agreed(None), agreed("second" if rank else None), agreed(f"of {rank}"), agreed_least(5 - 2 * rank))
parallel_state.destroy_distributed_environment()
"""


@pytest.mark.vllm
def test_ranks_of_several_engines_agree_on_one_reason_and_the_least(
    tmp_path: Path, engine_env: dict[str, str]
) -> None:
    command = [sys.executable, "-c", AGREE]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), f"file://{tmp_path}/ranks"],
            env=engine_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert out.splitlines()[-1] == "None second of 0 3"
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def layout_reason(vllm_config: Any, spec: Any, connector: str | None, change: Any = None) -> str | None:
    from vllm.config import KVTransferConfig
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.gpu_worker import Worker  # noqa: F401  (registers the cache specs)

    from vllm_integration import connectors, worker_checks

    if connector:
        vllm_config.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    specs = spec if isinstance(spec, dict) else {"model.layers.0.attn": spec}
    (planned,) = get_kv_cache_configs(vllm_config, [specs], [16 << 20])
    if change:
        change(planned)
    worker = types.SimpleNamespace(vllm_config=vllm_config, cache_config=vllm_config.cache_config)
    worker._ekv = types.SimpleNamespace(registered=connectors.registers_memory(vllm_config))
    return worker_checks.layout_reason(worker, planned)


def _spec(name: str, **more: Any) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface

    sizes = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    return getattr(kv_cache_interface, name)(**sizes | more)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "connector", "named"),
    [
        ("SinkFullAttentionSpec", "NixlConnector", True),
        ("SinkFullAttentionSpec", "OffloadingConnector", False),
        ("SinkFullAttentionSpec", None, False),
        ("FullAttentionSpec", "NixlConnector", False),
    ],
)
@pytest.mark.parametrize("rocm", [False, True])
def test_sinks_do_not_survive_being_taken_in_one_piece(
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    connector: str | None,
    named: bool,
    rocm: bool,
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: rocm)
    more = {"sink_len": 128} if name.startswith("Sink") else {}
    reason = layout_reason(vllm_config, _spec(name, **more), connector)
    assert (reason is not None and "NixlConnector needs memory in one piece" in reason) is named
    assert named or reason is None


@pytest.mark.vllm
def test_views_that_reach_beyond_the_cache_are_named(vllm_config: Any) -> None:
    def halve(planned: Any) -> None:
        for tensor in planned.kv_cache_tensors:
            tensor.size //= 2

    reason = layout_reason(vllm_config, _spec("FullAttentionSpec"), None, halve)
    assert reason is not None and "the layers do not agree on where the blocks are" in reason


@pytest.mark.vllm
def test_cache_that_lays_itself_out_is_named(vllm_config: Any) -> None:
    from vllm.v1.kv_cache_interface import HiSparseResidentSpec

    def change(planned: Any) -> None:
        planned.kv_cache_groups[0].kv_cache_spec = HiSparseResidentSpec(block_size=128, page_size=4096)

    reason = layout_reason(vllm_config, _spec("FullAttentionSpec"), None, change)
    assert reason == "HiSparseResidentSpec lays out the cache by itself"


@pytest.mark.vllm
def test_plan_without_tensors_has_nothing_to_disagree_on(vllm_config: Any) -> None:
    def empty(planned: Any) -> None:
        planned.kv_cache_tensors, planned.kv_cache_groups = [], []

    assert layout_reason(vllm_config, _spec("FullAttentionSpec"), None, empty) is None


@pytest.mark.vllm
def test_one_layer_in_several_pieces_is_enough(vllm_config: Any) -> None:
    """With a single head a layer is in one piece in every layout."""
    heads = _spec("FullAttentionSpec")
    one = _spec("FullAttentionSpec", num_kv_heads=1, head_size=128)
    vllm_config.cache_config.kv_cache_layout = "LHBNC"
    assert layout_reason(vllm_config, {"layers.0": one, "layers.1": one}, "NixlConnector") is None
    reason = layout_reason(vllm_config, {"layers.0": one, "layers.1": heads}, "NixlConnector")
    assert reason is not None and "LHBNC has it in several" in reason
