"""`extensible-kv doctor` item by item: on stub drivers, in containers made of files, beside other vLLMs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from c_build import compile_c
from click.testing import CliRunner
from driver_rig import BOTH, MIB, SYMBOLS
from stub_lab import GRANULE, Stub, in_child

from allocator import doctor, torch_routing
from allocator.cli import cli
from allocator.limits import Limits
from allocator.settings import ALLOC_CONF, OWN, UNCACHED
from tests.pools import run_python
from tests.test_limits import container

GIB = 1 << 30
TORCH = ("torch", "allocator")
ON_STUB = in_child(preload=TORCH)
ON_LARGE_STUB = in_child(preload=TORCH, options=f"total_memory={64 * GIB}")


def diagnose_stub(driver: str = "cuda", allocator: str = "native", **options: Any) -> doctor.Diagnosis:
    """Diagnose the stub's device, with a PyTorch that would see it: the only parts that are not real."""
    from allocator import probing

    for module in (probing, torch_routing):
        module.resolve_device = lambda device: torch.device("cuda", 0)
    torch.version.hip = "7.0" if driver == "hip" else None
    torch.cuda.get_allocator_backend = lambda: allocator
    return doctor.diagnose(with_vllm=False, root=Path("/nonexistent"), **options)


def of(diagnosis: doctor.Diagnosis, name: str) -> tuple[str, str, str]:
    """Return value, level and advice of the one finding of that name."""
    (found,) = [finding for finding in diagnosis.findings if finding.name == name]
    return found.value, found.level, found.advice


@BOTH
@ON_LARGE_STUB
def test_doctor_names_every_item_of_a_device(driver):
    diagnosis = diagnose_stub(driver)
    assert diagnosis.works
    assert of(diagnosis, "device") == ("cuda:0", "ok", "")
    assert of(diagnosis, "driver") == (driver, "ok", "")
    assert of(diagnosis, "PyTorch's allocator") == ("native", "ok", "")
    assert of(diagnosis, "virtual memory") == ("works", "ok", "")
    assert of(diagnosis, "memory") == ("64 GiB free of 64 GiB", "ok", "")
    assert of(diagnosis, "granularity")[0] == "16 KiB, recommended 16 KiB, shareable 16 KiB"
    assert of(diagnosis, "largest reservation")[1:] == ("ok", "")
    assert of(diagnosis, "EKV_CUDA_LIBRARY")[1:] == (
        "note",
        "changes this package: unset it unless you mean it",
    )
    assert of(diagnosis, "limits")[1] == "ok"
    facts = json.loads(json.dumps(diagnosis.as_dict()))
    assert facts["works"] and facts["device"] == "cuda:0" and facts["driver"] == driver
    assert facts["probe"]["granularity"] == facts["probe"]["shareable_granularity"] == GRANULE
    assert facts["total_bytes"] == 64 * GIB <= facts["reservation_limit_bytes"]
    assert facts["torch_allocator"] == "native"
    assert not any(Stub(driver).live().values())


@ON_STUB
def test_doctor_names_each_granularity():
    stub = Stub("cuda")
    stub.option("recommended_factor", 2)
    stub.option("fabric_code", 0)
    stub.option("fabric_granularity_factor", 4)
    assert of(diagnose_stub(), "granularity")[0] == "16 KiB, recommended 32 KiB, shareable 64 KiB"


@ON_STUB
def test_doctor_names_the_handle_kind_that_was_really_obtained_and_why_not_a_better_one():
    stub = Stub("cuda")
    stub.option("fabric_code", 0)
    assert of(diagnose_stub(), "shareable handles") == ("fabric", "ok", "")
    stub.option("fabric_code", 800)
    for expected, codes in (("fd+rdma", ["800"]), ("fd", ["800", "801"])):
        diagnosis = diagnose_stub()
        kind, level, advice = of(diagnosis, "shareable handles")
        assert (kind, level) == (expected, "ok")
        # An error code beside a check mark would alarm: it is for machines.
        assert "fabric handles" in advice and "--json" in advice and "(80" not in advice
        assert re.findall(r"\((80\d)\)", diagnosis.as_dict()["probe"]["handle_reason"]) == codes
        stub.option("rdma_code", 801)


@ON_STUB
def test_doctor_without_any_shareable_handle_says_what_cannot_work():
    stub = Stub("cuda")
    stub.set_attribute(110, 0, 0)
    for kind_tried in (2, 3):  # the trial of a descriptor; fabric has failed before it creates anything
        stub.fail_clear()
        stub.fail_nth("cuMemCreate", kind_tried, 801, 0)
        found = of(diagnose_stub(), "shareable handles")
        if found[0] == "none":
            break
    stub.fail_clear()
    kind, level, advice = found
    assert (kind, level) == ("none", "note")
    assert "connectors that register memory" in advice and "(801)" in advice


@ON_STUB
def test_doctor_rdma_query_refused_is_no_problem_and_says_no():  # case 35
    Stub("cuda").set_attribute(110, 0, 1)
    diagnosis = diagnose_stub()
    value, level, advice = of(diagnosis, "GPUDirect RDMA")
    assert (value, level) == ("no", "ok") and "update the driver" in advice
    assert of(diagnosis, "shareable handles")[0] == "fd"
    assert diagnosis.works


@ON_STUB
def test_doctor_rdma_of_a_device_that_has_it():
    Stub("cuda").set_attribute(110, 1, 0)
    assert of(diagnose_stub(), "GPUDirect RDMA") == ("yes", "ok", "")


@BOTH
@ON_STUB
def test_doctor_no_virtual_memory_is_a_problem(driver):  # case 36
    Stub(driver).set_attribute(SYMBOLS[driver]["vmm"], 0, 0)
    diagnosis = diagnose_stub(driver)
    value, level, advice = of(diagnosis, "virtual memory")
    assert (value, level) == ("unavailable", "problem")
    assert "no virtual memory management" in advice and "vLLM keeps its normal cache" in advice
    assert not diagnosis.works and not diagnosis.as_dict()["works"]


@BOTH
@ON_LARGE_STUB
def test_doctor_small_reservations_are_noted(driver):  # case 37
    Stub(driver).option("max_reserve_bytes", 8 * GIB)
    diagnosis = diagnose_stub(driver)
    value, level, advice = of(diagnosis, "largest reservation")
    assert (value, level) == ("8 GiB or more", "note") and "smaller; raise `ulimit -v`" in advice
    assert diagnosis.facts["reservation_limit_bytes"] == 8 * GIB and diagnosis.works


@ON_STUB
def test_doctor_no_reservation_of_use_is_a_problem():
    Stub("cuda").option("max_reserve_bytes", MIB)
    diagnosis = diagnose_stub()
    value, level, advice = of(diagnosis, "largest reservation")
    assert (value, level) == ("none", "problem") and "ulimit -v" in advice
    assert not diagnosis.works


@ON_STUB
def test_doctor_foreign_pluggable_allocator_is_a_problem():
    diagnosis = diagnose_stub(allocator="pluggable")
    value, level, advice = of(diagnosis, "PyTorch's allocator")
    assert (value, level) == ("another pluggable one", "problem")
    assert "change_current_allocator" in advice and "allocator.pluggable_allocator()" in advice
    assert not diagnosis.works
    torch_routing._allocator = object()  # somebody has asked for ours, to make it the current one
    assert of(diagnose_stub(allocator="pluggable"), "PyTorch's allocator") == ("pluggable", "ok", "")


@pytest.mark.gpu
def test_doctor_gpu_foreign_pluggable_allocator_is_a_problem(tmp_path: Path) -> None:
    source = tmp_path / "foreign.c"
    source.write_text(
        "#include <stddef.h>\n#include <sys/types.h>\n#pragma GCC visibility push(default)\n"
        "void *foreign_malloc(ssize_t size, int device, void *stream);\n"
        "void foreign_free(void *address, ssize_t size, int device, void *stream);\n"
        "void *foreign_malloc(ssize_t size, int device, void *stream)\n"
        "{ (void)size; (void)device; (void)stream; return NULL; }\n"
        "void foreign_free(void *address, ssize_t size, int device, void *stream)\n"
        "{ (void)address; (void)size; (void)device; (void)stream; }\n"
    )
    library = compile_c("libforeign.so", [source], ("-fPIC", "-shared"), [])
    code = f"""
import torch
from allocator.cli import main
foreign = torch.cuda.memory.CUDAPluggableAllocator({str(library)!r}, "foreign_malloc", "foreign_free")
torch.cuda.memory.change_current_allocator(foreign)
main(["doctor", "--json", "--no-vllm", "--device", "cuda"])
"""
    done = run_python(code)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert [f["name"] for f in report["findings"] if f["level"] == "problem"] == ["PyTorch's allocator"]


def test_doctor_on_the_host_shares_by_descriptor_and_has_nothing_to_add() -> None:
    diagnosis = doctor.diagnose("cpu", with_vllm=False)
    assert of(diagnosis, "shareable handles") == ("fd", "ok", "")
    assert "EOPNOTSUPP (95)" in diagnosis.as_dict()["probe"]["handle_reason"]


def test_doctor_reports_limits_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{5 * GIB}\n"}
    diagnosis = doctor.diagnose("cpu", with_vllm=False, root=container(tmp_path, files))
    assert of(diagnosis, "container memory limit")[:2] == ("5 GiB", "note")
    assert of(diagnosis, "PYTORCH_ALLOC_CONF")[1] == "note"
    assert diagnosis.facts["limits"] == asdict(Limits(container_bytes=5 * GIB))
    assert not {"limits", "settings"} & {finding.name for finding in diagnosis.findings}
    assert diagnosis.works


def test_doctor_without_limits_and_settings_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ALLOC_CONF, *UNCACHED, *OWN, "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    diagnosis = doctor.diagnose("cpu", with_vllm=False, root=container(tmp_path, {}))
    assert of(diagnosis, "settings") == ("none in conflict", "ok", "")
    assert of(diagnosis, "limits") == ("none that matters", "ok", "")


def test_doctor_without_vllm_exits_with_status_1_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "describe_versions", lambda: {"python": "3"})
    done = CliRunner().invoke(cli, ["doctor", "--json", "--device", "cpu"])
    report = json.loads(done.stdout)
    assert (done.exit_code, report["works"], report["vllm"]["version"]) == (1, False, None)
    (finding,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert finding["name"] == "vLLM" and "install" in finding["advice"] and "--no-vllm" in finding["advice"]
    assert CliRunner().invoke(cli, ["doctor", "--no-vllm", "--device", "cpu"]).exit_code == 0


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.99.0", "vLLM 0.99.0 is not one of the releases this plugin was tested with (0.29 to 0.33)"),
        ("0.32.0", "vLLM 0.32.0 does not match: "),
    ],
)
def test_doctor_vllm_of_another_version_or_with_other_hooks_exits_with_status_1(
    tmp_path: Path, version: str, reason: str
) -> None:
    """A package of that name and version in front of what is installed, with none of vLLM's functions."""
    for name, text in {
        "vllm/__init__.py": "",
        "vllm/engine/__init__.py": "",
        "vllm/engine/arg_utils.py": "",
        "vllm/version.py": f"__version__ = {version!r}\n",
        f"vllm-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = (str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]))
    code = "from allocator.cli import main; main(['doctor', '--json', '--device', 'cpu'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["works"]) == (1, False), done.stderr
    assert report["vllm"]["version"] == version and report["vllm"]["supported"] is False
    (finding,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert (finding["name"], finding["value"]) == ("vLLM", version)
    assert reason in finding["advice"]
