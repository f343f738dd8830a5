"""The scales of an fp8 cache over a sleep: vLLM's own GPU worker and buffers, with the plugin in front of it.

What stands in is vLLM's memory pool for the weights, of which a sleep of level 2 loses the content.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pools import assert_filled, fill, make_pool

pytestmark = pytest.mark.vllm

SCALES = {"_q_scale": 0.25, "_k_scale": 0.5, "_v_scale": 0.125}


class Attention(torch.nn.Module):
    """A layer with a weight, and with scales as vLLM's attention layers have them: buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        for name, value in SCALES.items():
            self.register_buffer(name, torch.tensor(value))


class LosingPool:
    """Gives the memory of weights and buffers back at level 2 for good, at level 1 for the time asleep."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.kept = model, {}

    def suspend(self, level: int) -> None:
        tensors = self.model.state_dict()
        self.kept = {name: t.clone() for name, t in tensors.items()} if level == 1 else {}
        for tensor in tensors.values():
            tensor.fill_(float("nan"))

    def resume(self, tags: list[str] | None) -> None:
        if tags is None or "weights" in tags:
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(self.kept.get(name, torch.tensor(float("nan"))))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_integration.worker import extend

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1 << 30, 1 << 31))
    pool, view = make_pool("cpu")
    pool.commit(40)
    fill(view, 0, 40)
    made = object.__new__(extend(Worker))
    model = Attention()
    model_config = SimpleNamespace(enable_nccl_comm_suspend=False, sleep_preserve_parameter_names=())
    vars(made).update(
        rank=0,
        view=view,
        device=torch.device("cpu"),
        _ekv=SimpleNamespace(pool=pool, step_memory=None),
        _sleep_mode_backend=LosingPool(model),
        _sleep_saved_buffers={},
        _sleep_saved_parameters={},
        _sleep_saved_draft_buffers={},
        vllm_config=SimpleNamespace(model_config=model_config, speculative_config=None),
        model_config=model_config,
        model_runner=SimpleNamespace(model=model, get_model=lambda: model),
    )
    monkeypatch.setattr(type(made), "get_draft_model", lambda self: None, raising=False)
    monkeypatch.setattr(type(made), "synchronize_device", lambda self: None, raising=False)
    return made


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tags", [(None,), (["weights"], ["kv_cache"]), (["kv_cache"], ["weights"])])
def test_scales_are_back_when_the_cache_is(worker: Any, level: int, tags: tuple[list[str] | None]) -> None:
    """After level 2 weights are loaded again, and nobody loads the scales; the cache is zeroed."""
    model, pool = worker.model_runner.model, worker._ekv.pool
    for _ in range(2):
        fill(worker.view, 0, 40)
        worker.sleep(level)
        assert pool.physical_bytes == 0
        assert model._k_scale.isnan()
        for some in tags:
            worker.wake_up(some)
        assert {name: float(getattr(model, name)) for name in SCALES} == SCALES
        assert bool(model.weight.isnan().all()) == (level == 2)
        model.weight.fill_(1)
        assert pool.committed_blocks == 40
        assert not worker.view[:, :40].any()


def test_neighbour_that_takes_memory_meanwhile_does_not_fail_the_sleep(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads what the device has free before and after its own part, which may free nothing."""
    free = iter([1 << 30, (1 << 30) - (2 << 20)])
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(free), 1 << 31))
    worker.sleep(1)
    assert next(free, None) is None
    assert worker._ekv.pool.physical_bytes == 0
    worker.wake_up(None)
    assert worker._ekv.pool.committed_blocks == 40


def test_other_assertions_of_vllms_sleep_fail_it(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def suspend(level: int) -> None:
        raise AssertionError("in the pool of the weights")

    monkeypatch.setattr(worker._sleep_mode_backend, "suspend", suspend)
    with pytest.raises(AssertionError, match="in the pool of the weights"):
        worker.sleep(1)
    assert worker._ekv.pool.committed_blocks == 40
    assert_filled(worker.view, 0, 40)
