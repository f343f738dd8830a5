"""The demo as a user runs it, and that the stages it shows are the ones a start goes through."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_integration.stages import STAGES, Stages, listen


class _Pool:
    committed_blocks, physical_bytes, reserved_bytes = 3, 6 << 20, 1 << 30


@pytest.mark.vllm
def test_demo_on_this_machine_ends_with_table_and_pictures(
    engine_env: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "vllm_integration.demo", "--output", str(tmp_path)]
    command += ["--max-tokens", "8", "--num-prompts", "2", "--max-model-len", "256"]
    done = subprocess.run(command, env=engine_env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (headers,) = re.findall(r"^┃ (stage .*) ┃$", done.stdout, re.M)
    assert len(headers.split("┃")) == 5 and all(map(str.strip, headers.split("┃")))
    rows = re.findall(r"^│ (\S+)\s+│\s+([\d,]+) │\s+([\d,]+) │\s+\S+ \S+ │\s+([\d.]+) │$", done.stdout, re.M)
    assert [row[0] for row in rows] == [*STAGES, "generate"]
    blocks, sizes = ([int(row[i].replace(",", "")) for row in rows] for i in (1, 2))
    assert blocks[0] == sizes[0] == 0
    assert 2 <= blocks[1] == blocks[2] == blocks[3] < blocks[4] == blocks[5]
    assert 0 < sizes[1] == sizes[3] < sizes[4] == sizes[5]
    for name in ("stages.png", "pool-map.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert f"{blocks[4]} blocks" in (tmp_path / "engine.log").read_text()


@pytest.mark.vllm
def test_demo_that_cannot_start_says_why_and_fails(engine_env: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "vllm_integration.demo",
        "--output",
        str(tmp_path),
        "--model",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=engine_env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert f"{tmp_path / 'engine.log'} says why" in done.stdout.replace("\n", "")


@pytest.mark.vllm
def test_demo_that_cannot_write_its_model_says_why_and_fails(
    engine_env: dict[str, str], tmp_path: Path
) -> None:
    """A full disk, here a limit on the size of files: the reason is in the log of another process."""
    command = ["prlimit", f"--fsize={1 << 20}", sys.executable, "-m", "vllm_integration.demo"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, env=engine_env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert f"{tmp_path / 'engine.log'} says why" in done.stdout.replace("\n", "")
    assert "File too large" in done.stdout.replace("\n", "")


def test_stage_records_pool_as_it_is_at_the_end() -> None:
    stages, pools, heard = Stages(), [], []
    with listen(lambda name, record: heard.append((name, record))), stages.stage("reserve", lambda: pools[0]):
        pools.append(_Pool())
    (record,) = stages.records
    assert record["committed_blocks"] == 3
    assert record["physical_bytes"] == 6 << 20
    assert record["seconds"] > 0
    assert heard == [("reserve", None), ("reserve", record)]


def test_stage_that_raises_is_not_recorded() -> None:
    stages = Stages()
    with pytest.raises(ValueError, match="no"), stages.stage("commit", _Pool):
        raise ValueError("no")
    assert stages.records == []
