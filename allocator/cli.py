"""The `extensible-kv` command line."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import click
from rich.table import Table
from rich.text import Text

from allocator import results
from allocator.errors import EkvError, PoolValueError
from allocator.pool_map import MapRow, format_bytes, rows_of, snapshot_in, summary_of

__all__ = ["main"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "bold red")}
_BAR_CELLS = 40
DEMO_MODULE = "vllm_integration.demo"


class _Bytes(click.ParamType):
    """A size such as 4096, 64MiB or 1.5G; all units are binary."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", str(value).strip(), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is no size, such as 64MiB", param, ctx)
        return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; expected errors are one line on standard error and exit status 1."""
    try:
        cli.main(args=arguments, prog_name="extensible-kv")
    except (EkvError, MemoryError) as error:
        click.echo(f"extensible-kv: {error}", err=True)
        sys.exit(1)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Reserve the addresses of a KV cache first, and take its memory after warm-up."""


@cli.command()
@click.option("--device", help="Such as cuda:1 or cpu. Default: the current GPU, or the CPU.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
@click.option("--no-vllm", is_flag=True, help="Leave out vLLM, which takes seconds to import.")
def doctor(device: str | None, as_json: bool, no_vllm: bool) -> None:
    """Find out what works here, by trying.

    Exit status 1 when something stands against an extensible KV cache.
    """
    from allocator.doctor import diagnose

    diagnosis = diagnose(device, with_vllm=not no_vllm)
    if as_json:
        click.echo(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in diagnosis.findings:
            mark, style = _MARKS[finding.level]
            table.add_row(Text(mark, style), finding.name, Text(finding.value), Text(finding.advice, "dim"))
        console = results.wide_console()
        console.print(table)
        verdict = (
            "An extensible KV cache works here." if diagnosis.works else "Something stands against it: see ✗."
        )
        console.print(f"\n{verdict}", style="green" if diagnosis.works else "bold red")
    sys.exit(0 if diagnosis.works else 1)


@cli.command("map")
@click.argument("snapshot", type=click.File(encoding="utf-8"))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Draw it into this PNG or SVG."
)
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Of an engine's workers.")
def map_command(snapshot: TextIO, output: Path | None, rank: int) -> None:
    """Show where the memory of a pool lies.

    SNAPSHOT is what json.dump(pool.snapshot(), file) wrote, the report of an engine (option "report"), or
    what its server answers to a /collective_rpc of ekv_snapshot. "-" is standard input.
    """
    if output is not None and output.suffix not in (".png", ".svg"):
        raise click.BadParameter(f"{output.name} ends neither in .png nor in .svg", param_hint="--output")
    try:
        data = json.load(snapshot)
    except ValueError as error:
        raise click.ClickException(f"{snapshot.name} is not JSON: {error}") from None
    try:
        data = snapshot_in(data, rank)
        rows, summary = rows_of(data), summary_of(data)
    except PoolValueError as error:
        raise click.ClickException(f"{snapshot.name}: {error}") from None
    console = results.wide_console()
    console.print(summary, highlight=False)
    console.print(_map_table(rows))
    console.print("[cyan]█[/] committed  [blue]▒[/] backed only  [dim]░[/] addresses only", highlight=False)
    if output is not None:
        from allocator.plots import plot_pool_map

        plot_pool_map(data, output)
        console.print(f"drawn into {output}", highlight=False)


@cli.command()
@click.option("--device", help="Such as cuda:1 or cpu. Default: the current GPU, or the CPU.")
@click.option(
    "--size", type=_Bytes(), help="Bytes of the cache. Default: 1GiB, or an eighth of what is free."
)
@click.option("--segments", type=click.IntRange(1), default=28, show_default=True, help="Layers.")
@click.option("--blocks", type=click.IntRange(2), default=1024, show_default=True, help="Blocks of each.")
@click.option("--chunk", type=_Bytes(), default=0, help="Largest chunk. Default: one for each segment.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--rest", type=click.FloatRange(0), help="Seconds before each timed commit. Default: 2 on a GPU."
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the results as JSON.")
def bench(
    device: str | None,
    size: int | None,
    segments: int,
    blocks: int,
    chunk: int,
    repeats: int,
    rest: float | None,
    output: Path | None,
) -> None:
    """Time a pool against PyTorch's own allocation.

    Both of the same bytes, in turns, in this process.
    """
    from allocator import bench as benchmarks
    from allocator.torch_routing import resolve_device

    try:
        torch_device = resolve_device(device)
    except (RuntimeError, AssertionError, PoolValueError) as error:
        raise click.BadParameter(str(error).splitlines()[0], param_hint="--device") from None
    if rest is None:
        rest = 2.0 if torch_device.type == "cuda" else 0.0
    records = benchmarks.run(
        torch_device,
        size_bytes=benchmarks.default_size_bytes(torch_device) if size is None else size,
        num_segments=segments,
        num_blocks=blocks,
        max_chunk_bytes=chunk,
        repeats=repeats,
        rest_seconds=rest,
    )
    data = results.build(records)
    results.print_table(data)
    if output is not None:
        results.write(output, data)
        click.echo(f"written to {output}")
    if results.failed(data):
        raise click.ClickException(f"failed: {', '.join(results.failed(data))}")


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Start vLLM with an extensible KV cache.

    Takes the options of `python -m vllm_integration.demo`; --help shows them.
    """
    # by name: this package stands below the integration and works without it
    command = importlib.import_module(DEMO_MODULE).main
    sys.exit(command(list(arguments), prog_name="extensible-kv demo"))


def _map_table(rows: Sequence[MapRow]) -> Table:
    """One line for each run of segments that look alike."""
    table = Table(box=None, pad_edge=False)
    for header, justify in (("segment", "right"), ("size", "right"), ("", "left"), ("chunks", "right")):
        table.add_column(header, justify=justify)  # type: ignore[arg-type]
    table.add_column("shared granules", justify="right")
    groups: list[list[MapRow]] = []
    for row in rows:
        if groups and _look(groups[-1][0]) == _look(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    several = len({row.reservation for row in rows}) > 1
    for group in groups:
        first, last = group[0], group[-1]
        name = str(first.index) if first is last else f"{first.index}–{last.index}"
        table.add_row(
            f"{first.reservation}: {name}" if several else name,
            format_bytes(first.size_bytes),
            _bar(first),
            str(len(first.backed)),
            str(len(first.straddled)),
        )
    return table


def _look(row: MapRow) -> tuple[object, ...]:
    return (row.reservation, row.size_bytes, _bar(row).plain, len(row.backed), len(row.straddled))


def _bar(row: MapRow) -> Text:
    bar = Text()
    for cell in range(_BAR_CELLS):
        middle = (cell + 0.5) * row.size_bytes / _BAR_CELLS
        if middle < row.committed_bytes:
            bar.append("█", "cyan")
        elif any(start <= middle < end for start, end in row.backed):
            bar.append("▒", "blue")
        else:
            bar.append("░", "dim")
    return bar


if __name__ == "__main__":
    main()
