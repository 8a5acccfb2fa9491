"""Compute how training scales over hosts: `python -m tools.scaling` fills docs/scaling.md and draws docs/scaling.png.

A measured step, spread over hosts by a model that docs/scaling.md writes out: every host takes a step's time from the
measured distribution, then all sum their gradients around a ring. No network is touched. `python -m tools.allreduce`
holds the ring's cost against real all-reduces.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.models.architectures import ARCHITECTURES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RUNS, STEPS = 1000, 20
"""How many runs of how many steps are averaged: a mean is good to a twentieth of a per cent."""

OURS = "rows, icom's step"
OUR_STEP_WHOLE_TABLE = "whole table, icom's step"
USUAL = "whole table, the usual script's step"


@dataclass(kw_only=True)
class ScalingConfig:
    """Compute steps, images per second and efficiency of 1 to 64 hosts from one host's measured step."""

    measured: Path = Path("benchmarks/sd15-512-2cores.json")
    """What `icom bench --compare reference --json` wrote: steps of icom and of the usual script, with their spread."""
    hosts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """How many hosts, with one process each."""
    cores: tuple[int, ...] = (8, 2)
    """Physical cores of a host, a table for each; steps shrink in proportion. An m7i.4xlarge has 8."""
    latency: float = 50.0
    """Microseconds from a host's sending a small message to its neighbour's having it (an assumption)."""
    bandwidth: float = 10.0
    """Gbit/s of one TCP connection. Between EC2 instances: 10 in a cluster placement group, 5 outside."""
    spread: float = 1.0
    """1: steps spread over hosts as they did over the measured processes; 0: every step takes the median."""
    seed: int = 0
    """Of the drawn step times."""
    allreduce: Path = Path("benchmarks/allreduce.json")
    """What `python -m tools.allreduce` wrote: real all-reduces, to put beside the model's."""
    ranks: Path = Path("benchmarks/sd15-512-ranks.json")
    """What `icom bench --ranks 1,2 --json` wrote: processes on one machine."""
    document: Path = Path("docs/scaling.md")
    """Document whose tables are replaced; the plot goes beside it as PNG."""

    def __post_init__(self) -> None:
        """Raises: UsageError for impossible numbers."""
        for name in ("hosts", "cores"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise UsageError(f"--{name} takes one or more numbers from 1 up.")
        if self.bandwidth <= 0:
            raise UsageError(
                "--bandwidth has to be above 0 Gbit/s (`inf` is a network that costs nothing but latency)."
            )
        for name in ("latency", "spread"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name} must not be negative.")


@dataclass(frozen=True)
class Network:
    """Seconds that a small message takes from host to host, and bytes per second of one connection."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one host: half of the steps between fastest and median, half between median and slowest."""

    fastest: float
    median: float
    slowest: float

    def quantile(self, share: NDArray[np.float64]) -> NDArray[np.float64]:
        """The time that `share` of all steps do not exceed; straight between the three that were measured."""
        import numpy as np

        return np.interp(share, [0.0, 0.5, 1.0], [self.fastest, self.median, self.slowest])

    def scaled(self, factor: float, spread: float) -> StepTime:
        """All times multiplied by `factor`, and their distance from the median by `spread`."""
        ends = (self.median + spread * (end - self.median) for end in (self.fastest, self.slowest))
        fastest, slowest = (factor * end for end in ends)
        return StepTime(fastest, factor * self.median, slowest)


@dataclass(frozen=True)
class Point:
    """What a number of hosts reaches.

    Attributes:
        hosts: how many.
        seconds: of a step.
        images_per_second: of all hosts.
        efficiency: images per second over as many times those of one host.
        network: what the efficiency would be if all hosts' steps took the median.
        bytes_sent: by each host in a step.
    """

    hosts: int
    seconds: float
    images_per_second: float
    efficiency: float
    network: float
    bytes_sent: float


def ring_rounds(hosts: int) -> int:
    """Messages that follow each other in a ring all-reduce: hosts - 1 to sum, hosts - 1 to spread the sums."""
    return 2 * (hosts - 1)


def allreduce_seconds(hosts: int, payload: int, network: Network) -> float:
    """Of a ring all-reduce of `payload` bytes that all hosts enter at the same time; the additions are not counted."""
    return ring_rounds(hosts) * (network.latency + payload / hosts / network.bandwidth)


def simulate(hosts: int, step: StepTime, payload: int, network: Network, seed: int) -> float:
    """Mean seconds of an optimizer step.

    Each host starts its next step when it has its sum, not when all have; a host sends a part of the gradient on when
    it has both its own and its neighbour's.

    Args:
        hosts: how many.
        step: of one host without talking.
        payload: bytes that are summed.
        network: between any two hosts.
        seed: of the step times.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    message = allreduce_seconds(hosts, payload, network) / max(1, ring_rounds(hosts))
    now = np.zeros((RUNS, hosts))
    for _ in range(STEPS):
        now += step.quantile(rng.random(now.shape))
        for _ in range(ring_rounds(hosts)):
            now = np.maximum(now, np.roll(now, 1, axis=1)) + message
    return float(now.max(axis=1).mean() / STEPS)


def points(
    hosts: tuple[int, ...], step: StepTime, payloads: list[int], network: Network, batch: int, seed: int
) -> list[Point]:
    """A point for each number of hosts, whose payload in bytes stands at the same place of `payloads`."""
    alone = simulate(1, step, 0, network, seed)
    result = []
    for count, payload in zip(hosts, payloads, strict=True):
        seconds = simulate(count, step, payload, network, seed)
        exchange = allreduce_seconds(count, payload, network)
        result.append(
            Point(
                hosts=count,
                seconds=seconds,
                images_per_second=count * batch / seconds,
                efficiency=alone / seconds,
                network=step.median / (step.median + exchange),
                bytes_sent=ring_rounds(count) * payload / count,
            )
        )
    return result


def row_bytes(arch: str, hosts: int) -> int:
    """What icom sums in a step: the row's gradient, the loss, and a float of each process for its signals."""
    import torch

    from icom.training.step import message

    return sum(part.nbytes for part in message([torch.zeros(_width(arch))], torch.zeros(()), torch.zeros(hosts)))


def table_bytes(arch: str) -> int:
    """What the usual script sums: the float32 gradient of the token table with the placeholder's row."""
    vocabulary: int = ARCHITECTURES[arch].text_encoder["vocab_size"]
    return 4 * (vocabulary + 1) * _width(arch)


def _width(arch: str) -> int:
    width: int = ARCHITECTURES[arch].text_encoder["hidden_size"]
    return width


def scaling(config: ScalingConfig) -> None:
    """Compute, print, and write tables and plot.

    Raises:
        UsageError: a measurement without the usual script's.
        IcomError: a file cannot be read or written.
    """
    measured = read(config.measured, "icom bench --compare reference --json")
    try:
        computed = {cores: curves(config, measured, cores) for cores in config.cores}
    except KeyError as error:
        raise UsageError(
            f"{config.measured} has no {error}: make it with `icom bench --compare reference --json {config.measured}`."
        ) from error
    tables = {
        "hosts": hosts_table(config, measured, computed),
        "allreduce": allreduce_table(read(config.allreduce, "python -m tools.allreduce --output")),
        "ranks": ranks_table(read(config.ranks, "icom bench --ranks 1,2 --json")),
    }
    print("\n".join(tables.values()))
    write_atomically(config.document, fill(config.document, tables, "tools.scaling").encode(), "--document")
    write_atomically(config.document.with_suffix(".png"), _plot(config, computed), "--document")


def read(path: Path, made_by: str) -> dict[str, Any]:
    """What a measurement's JSON file holds.

    Raises:
        IcomError: it cannot be read.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise IcomError(f"Cannot read {path}, which `{made_by} {path}` writes: {error}") from error
    return content


def curves(config: ScalingConfig, measured: dict[str, Any], cores: int) -> dict[str, list[Point]]:
    """The three ways to train, by name, on hosts with so many cores.

    Args:
        config: hosts, network, spread, seed.
        measured: what `icom bench --compare reference` wrote.
        cores: per host.

    Raises:
        KeyError: `measured` lacks something.
    """
    from icom.bench import command

    network = Network(config.latency * 1e-6, config.bandwidth * 1e9 / 8)
    options, faster = measured["options"], cores / measured["machine"]["cores"]

    def step(contender: str) -> StepTime:
        row = measured["contenders"][contender]
        time = StepTime(row["fastest"], row["seconds_per_step"], row["slowest"])
        return time.scaled(1 / faster, config.spread)

    arch, batch = options["arch"], options["batch_size"]
    rows = [row_bytes(arch, hosts) for hosts in config.hosts]
    table = [table_bytes(arch)] * len(config.hosts)
    ways = {OURS: (command.OURS, rows), OUR_STEP_WHOLE_TABLE: (command.OURS, table), USUAL: (command.STOCK, table)}
    return {
        name: points(config.hosts, step(contender), payloads, network, batch, config.seed)
        for name, (contender, payloads) in ways.items()
    }


def hosts_table(config: ScalingConfig, measured: dict[str, Any], computed: dict[int, dict[str, list[Point]]]) -> str:
    """Markdown: what the model says."""
    lines = []
    for cores, ways in computed.items():
        known = cores == measured["machine"]["cores"]
        origin = (
            "as measured" if known else f"the measured steps on {measured['machine']['cores']} cores, in proportion"
        )
        lines += [
            f"**Hosts with {cores} cores** (one host's step: {origin}), {config.latency:g} µs, {config.bandwidth:g} "
            "Gbit/s:",
            "",
            "| hosts | summed | s/step | images/s | efficiency | if all steps took the median | sent per host |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in zip(*ways.values(), strict=True):
            for name, point in zip(ways, row, strict=True):
                lines.append(
                    f"| {point.hosts} | {name} | {point.seconds:#.3g} | {point.images_per_second:#.3g} | "
                    f"{point.efficiency:.1%} | {point.network:.1%} | {_size(point.bytes_sent)} |"
                )
        lines.append("")
    return "\n".join(lines)


def _size(count: float) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.1f} KB"


def allreduce_table(measured: dict[str, Any]) -> str:
    """Markdown: real all-reduces beside what the model says for the shaped bandwidth and the measured latency."""
    lines = [
        f"{_machine(measured)}; median (range) of {measured['repeats']}:",
        "",
        "| hosts | Gbit/s | latency | summed | computed | measured | measured / computed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        network = Network(row["latency_seconds"], row["gbits"] * 1e9 / 8)
        computed = allreduce_seconds(row["hosts"], row["bytes"], network)
        span = f"{_ms(row['fastest'])}–{_ms(row['slowest'])}"
        lines.append(
            f"| {row['hosts']} | {row['gbits']:g} | {1e6 * row['latency_seconds']:.0f} µs | {_size(row['bytes'])} | "
            f"{_ms(computed)} ms | {_ms(row['seconds'])} ms ({span}) | {row['seconds'] / computed:.2f} |"
        )
    return "\n".join(lines) + "\n"


def ranks_table(measured: dict[str, Any]) -> str:
    """Markdown: processes on one machine, with equal cores each."""
    options = measured["options"]
    lines = [
        f"{_machine(measured)}, {measured['machine']['cores_per_rank']} per rank; {options['arch']} at "
        f"{options['resolution']} px; median (range) of {options['rounds']} rounds of {options['steps']} steps:",
        "",
        "| | s/step | images/s | efficiency | of as many alone | waits per step | the last to come |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in measured["contenders"].items():
        step = f"{row['seconds_per_step']:.2f} ({row['fastest']:.2f}–{row['slowest']:.2f})"
        shares = [_share(row, key) for key in ("efficiency", "of_alone")]
        waits = [f"{_ms(row[key])} ms" if key in row else "" for key in ("waiting_seconds", "exchange_seconds")]
        images = f"{row['images_per_second']:.3f}"
        lines.append("| " + " | ".join([name, step, images, *shares, *waits]) + " |")
    return "\n".join(lines) + "\n"


def _machine(measured: dict[str, Any]) -> str:
    here = measured["machine"]
    return f"{here['cpu']}, {here['cores']} cores, PyTorch {here['torch']}"


def _share(row: dict[str, Any], key: str) -> str:
    if key not in row:
        return ""
    low, high = row[f"{key}_range"]
    return f"{row[key]:.1%} ({low:.1%}–{high:.1%})"


def _ms(seconds: float) -> str:
    """Milliseconds with three digits, or all that stand before the point."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def fill(document: Path, tables: dict[str, str], writer: str) -> str:
    """The document with what stands between each table's marks replaced.

    Args:
        document: has a line before and one after each table.
        tables: name -> Markdown.
        writer: the module that the line before names.

    Raises:
        IcomError: it cannot be read, or lacks a mark.
    """
    try:
        text = document.read_text()
    except OSError as error:
        raise IcomError(f"Cannot read --document {document}: {error}") from error
    for name, table in tables.items():
        start, end = f"<!-- {name}: written by python -m {writer} -->", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise IcomError(f"{document} needs the lines `{start}` and `{end}`, once each.")
        text = f"{text.split(start)[0]}{start}\n\n{table}\n{end}{text.split(end)[1]}"
    return text


def _plot(config: ScalingConfig, computed: dict[int, dict[str, list[Point]]]) -> bytes:
    """PNG: efficiency over hosts, a panel for each number of cores; dashed: if no host were slower than another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(computed), 4), layout="constrained")
    panels = figure.subplots(1, len(computed), sharey=True, squeeze=False)[0]
    for axes, (cores, ways) in zip(panels, computed.items(), strict=True):
        for colour, (name, way) in zip(("tab:blue", "tab:orange", "tab:red"), ways.items(), strict=True):
            hosts = [point.hosts for point in way]
            axes.plot(hosts, [100 * point.efficiency for point in way], "o-", color=colour, label=name)
            axes.plot(hosts, [100 * point.network for point in way], "--", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(config.hosts), [str(count) for count in config.hosts])
        axes.set(xlabel="hosts", title=f"{cores} cores per host", ylim=(0, 105))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("efficiency, % (computed)")
    panels[0].legend(frameon=False, loc="lower left", fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def main() -> None:
    """Parse the options and compute; exit codes as of `icom`."""
    import tyro

    try:
        scaling(tyro.cli(ScalingConfig, prog="python -m tools.scaling", use_underscores=True))
    except IcomError as error:
        print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
