"""What the README shows works as it stands, but for the device and the size."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_pool_example_runs() -> None:
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "commit" in block)
    example, devices = re.subn('"cuda"', '"cpu"', example)
    example, sizes = re.subn(r"commit\(60000\)", "commit(101)", example)
    assert (devices, sizes) == (2, 1)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    pool, cache = names["pool"], names["cache"]
    assert pool.committed_blocks == 101
    assert pool.capacity_blocks == 70000
    assert pool.num_segments == 28
    assert cache[27, 100].abs().sum() == 0
    cache[27, 100] = 1
    assert cache[27, 100].float().mean() == 1
    del names["cache"], names["layer"], cache
    pool.free()


def test_readme_names_make_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)\b", README))
    assert named >= {"demo", "test", "gpu-test"}
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.M))


def test_readme_names_commands_that_exist_and_leaves_out_none_but_the_demo() -> None:
    from allocator.cli import cli

    named = set(re.findall(r"\bextensible-kv ([a-z]+)\b", README))
    assert named | {"demo"} == set(cli.commands)
