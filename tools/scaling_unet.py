"""Compute how training the whole UNet scales over hosts: `python -m tools.scaling_unet` fills docs/scaling.md.

Bytes by the formula that a test holds against the kernel's counters (icom/parallel/traffic.py); steps from what
`icom bench --method unet` measured on one host, spread over hosts as in tools/scaling.py. No network is touched.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from icom.config.bench import SharedName
from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.models.architectures import ARCHITECTURES, ArchitectureName
from icom.parallel.traffic import messages_by_formula, sent_by_formula
from tools.scaling import Network, StepTime, fill, read, simulate

FREE = Network(0.0, float("inf"))


@dataclass(kw_only=True)
class ScalingUnetConfig:
    """Compute bytes, steps and efficiency of 1 to 64 hosts for DDP and both kinds of FSDP."""

    measured: Path = Path("benchmarks/sd15-512-unet.json")
    """What `icom bench --method unet --arch sd15 --json` wrote. Where it is not there, only bytes are computed."""
    arch: ArchitectureName = "sd15"
    """Whose UNet's bytes are computed."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """FSDP gathers weights in it."""
    hosts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """How many hosts, with one process each."""
    cores: int = 8
    """Physical cores of a host; steps shrink in proportion. An m7i.4xlarge has 8."""
    latency: float = 50.0
    """Microseconds from a host's sending a small message to its neighbour's having it (an assumption)."""
    bandwidth: float = 10.0
    """Gbit/s of one TCP connection. Between EC2 instances: 10 in a cluster placement group, 5 outside."""
    seed: int = 0
    """Of the drawn step times."""
    document: Path = Path("docs/scaling.md")
    """Document whose tables are replaced."""

    def __post_init__(self) -> None:
        """Raises: UsageError for impossible numbers."""
        if not self.hosts or min(self.hosts) < 1 or self.cores < 1:
            raise UsageError("--hosts takes one or more numbers from 1 up, --cores one.")
        if self.bandwidth <= 0 or self.latency < 0:
            raise UsageError("--bandwidth has to be above 0, and --latency must not be negative.")


@dataclass(frozen=True)
class UnetPoint:
    """What a number of hosts reaches. Seconds of a step; of each bound, images per second over those of one host.

    Attributes:
        hosts: how many.
        bytes_sent: by each host in a step.
        exchange: seconds that its messages take, one after the other.
        slowest: bound: nothing travels while anything is computed.
        fastest: bound: all that may travels meanwhile: gradients of DDP during the backward pass, weights and gradients
            of FSDP during both.
        efficiency: (at the slowest bound, at the fastest).
        images_per_second: the same.
    """

    hosts: int
    bytes_sent: float
    exchange: float
    slowest: float
    fastest: float
    efficiency: tuple[float, float]
    images_per_second: tuple[float, float]


@dataclass(frozen=True)
class Step:
    """One host's step in seconds, its forward and backward pass, and its pictures."""

    time: StepTime
    forward: float
    backward: float
    images: int


def shapes_of(arch: ArchitectureName) -> tuple[list[tuple[int, ...]], int]:
    """Shapes of all of a UNet's weights, and how many blocks FSDP gathers together (the rest is one more)."""
    import torch

    from icom.models.parts import UNET
    from icom.parallel.sharding import UNITS

    with torch.device("meta"):
        unet = UNET.build(ARCHITECTURES[arch])
    units = sum(type(module).__name__ in UNITS for module in unet.modules())
    return [tuple(parameter.shape) for parameter in unet.parameters()], units + 1


def point(
    config: ScalingUnetConfig, kind: SharedName, hosts: int, step: Step, waited: float, alone: float
) -> UnetPoint:
    """A number of hosts.

    Args:
        config: network and model.
        kind: how they share the work.
        hosts: how many.
        step: of one host.
        waited: seconds of a step of that many hosts if messages took no time: each waits for the slowest.
        alone: the same of one host.
    """
    shapes, units = shapes_of(config.arch)
    numbers = sum(map(math.prod, shapes))
    sent = sent_by_formula(kind, shapes, hosts, 2 if config.mixed_precision == "bf16" else 4)
    messages = messages_by_formula(kind, numbers, units, hosts)
    exchange = messages * config.latency * 1e-6 + sent / (config.bandwidth * 1e9 / 8)
    meanwhile = step.backward if kind == "ddp" else step.forward + step.backward
    bounds = waited + exchange, waited + max(0.0, exchange - meanwhile)
    images = [hosts * step.images / seconds for seconds in bounds]
    efficiency = [alone / seconds for seconds in bounds]
    return UnetPoint(hosts, sent, exchange, *bounds, (efficiency[0], efficiency[1]), (images[0], images[1]))


def measured_step(config: ScalingUnetConfig, measured: dict[str, Any]) -> Step:
    """Of the first row of one process, on hosts with so many cores.

    Raises:
        UsageError: there is none, or it is another model's.
    """
    options = measured.get("options", {})
    here = {"arch": config.arch, "mixed_precision": config.mixed_precision, "method": "unet"}
    if wrong := [name for name, value in here.items() if options.get(name) != value]:
        raise UsageError(f"{config.measured} was measured with another {', '.join(wrong)} than what is computed.")
    rows = [row for row in measured.get("rows", []) if row["processes"] == 1 and row["seconds_per_step"]]
    if not rows:
        raise UsageError(f"{config.measured} has no row of one process: make it without --compare.")
    factor = measured["machine"]["cores_per_process"] / config.cores
    row = rows[0]
    time = StepTime(row["fastest"], row["seconds_per_step"], row["slowest"]).scaled(factor, 1.0)
    return Step(time, factor * row["forward_seconds"], factor * row["backward_seconds"], row["micro_batch"])


def bytes_table(config: ScalingUnetConfig) -> str:
    """Markdown: what each process sends in a step."""
    shapes, _ = shapes_of(config.arch)
    itemsize = 2 if config.mixed_precision == "bf16" else 4
    numbers = sum(map(math.prod, shapes))
    ways = [("ddp", "gloo"), *((kind, over) for over in ("gloo", "nccl") for kind in get_args(SharedName)[1:])]
    lines = [
        f"{config.arch}'s UNet: {numbers / 1e6:.1f} million numbers; weights gathered in "
        f"{'bf16' if itemsize == 2 else 'float32'}, gradients summed in float32; MB per step and process:",
        "",
        "| processes | ddp | shard_grad_op, gloo | full_shard, gloo | shard_grad_op, nccl | full_shard, nccl |",
        "|---|---|---|---|---|---|",
    ]
    for hosts in config.hosts:
        sent = [sent_by_formula(kind, shapes, hosts, itemsize, over) for kind, over in ways]
        lines.append(f"| {hosts} | {' | '.join(f'{count / 1e6:,.0f}' for count in sent)} |")
    return "\n".join(lines) + "\n"


def hosts_table(config: ScalingUnetConfig, measured: dict[str, Any]) -> str:
    """Markdown: steps and efficiency for each way, between both bounds."""
    step, here = measured_step(config, measured), measured["machine"]
    waited = {hosts: simulate(hosts, step.time, 0, FREE, config.seed) for hosts in {1, *config.hosts}}
    lines = [
        f"Hosts with {config.cores} cores (one host's step: measured on {here['cores_per_process']} of {here['cpu']}, "
        f"in proportion), micro-batch {step.images}, {config.latency:g} µs, {config.bandwidth:g} Gbit/s; from: nothing "
        "travels while anything is computed; to: all that may:",
        "",
        "| hosts | parallel | exchange, s | s/step | images/s | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for hosts in config.hosts:
        for kind in get_args(SharedName):
            one = point(config, kind, hosts, step, waited[hosts], waited[1])
            low, high = one.efficiency
            slow, fast = one.images_per_second
            lines.append(
                f"| {hosts} | {kind} | {one.exchange:#.3g} | {one.slowest:#.3g}–{one.fastest:#.3g} | "
                f"{slow:#.3g}–{fast:#.3g} | {low:.0%}–{high:.0%} |"
            )
    return "\n".join(lines) + "\n"


def scaling_unet(config: ScalingUnetConfig) -> None:
    """Compute, print and write the tables.

    Raises:
        UsageError: a measurement of something else.
        IcomError: a file cannot be read or written.
    """
    tables = {"unet-bytes": bytes_table(config)}
    if config.measured.exists():
        tables["unet-hosts"] = hosts_table(config, read(config.measured, "icom bench --method unet --json"))
    else:
        print(f"{config.measured} is not there: no steps are computed.", file=sys.stderr)
    print("\n".join(tables.values()))
    write_atomically(config.document, fill(config.document, tables, "tools.scaling_unet").encode(), "--document")


def main() -> None:
    """Parse the options and compute; exit codes as of `icom`."""
    import tyro

    try:
        scaling_unet(tyro.cli(ScalingUnetConfig, prog="python -m tools.scaling_unet", use_underscores=True))
    except IcomError as error:
        print(f"icom: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
