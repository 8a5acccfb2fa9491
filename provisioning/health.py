"""Whether the nodes of a cluster can train together: every problem of every node, named at once."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from icom import names
from icom.errors import IcomError, Stopped
from icom.parallel.alike import differences, usual
from provisioning.cluster import Node
from provisioning.on_node import MARK, PROFILE, Facts, read_facts
from provisioning.script import script
from provisioning.transport import Transport

AMX_FLAGS = frozenset(("amx_tile", "amx_bf16", "amx_int8"))
FIRST_GENERATION_WITH_AMX = 7
CLOCK_SECONDS = 1.0
"""How far clocks may differ. EC2's own time service keeps them within milliseconds; by a second, nothing keeps this
one, and it will go on drifting: make rebuilds or skips what it should not, lines of logs change places, and at five
minutes AWS refuses what it signed."""
ALL_REDUCE_PORT = 29499
"""Not the trainings' own: one may be running, and the cluster be healthy."""
ALL_REDUCE_SECONDS = 240
TIMED_OUT = 124
"""Exit code of `timeout`."""
MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Clock:
    """A node's clock against this computer's.

    Attributes:
        ahead: seconds.
        within: seconds; the truth is no farther from `ahead` than that, half of the round trip.
    """

    ahead: float
    within: float


@dataclass(frozen=True)
class NodeProblem:
    """What is wrong with a node, and what to do."""

    node: Node
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.node.label}: {self.what}\n    → {self.fix}"


def has_amx(instance_type: str) -> bool:
    """Whether Intel CPUs of this type have AMX: from Sapphire Rapids on, which came with EC2's 7th generation.

    In a name such as m7i-flex.large the family's letters come first, then the generation, then whose CPU it is: i
    Intel, a AMD, g AWS.
    """
    family = re.match(r"[a-z]+(\d+)([a-z]*)", instance_type)
    if not family:
        return False
    return int(family[1]) >= FIRST_GENERATION_WITH_AMX and family[2].startswith("i")


def check_health(
    transports: Mapping[str, Transport],
    nodes: tuple[Node, ...],
    instance_type: str,
    gpus: int,
    say: Callable[[str], None],
) -> None:
    """Look at all nodes at once, and let them sum a number through mpirun.

    Args:
        transports: to every node, by its id; `give_environment` has served them.
        nodes: all of the cluster, master first.
        instance_type: of all of them.
        gpus: that each has.
        say: told what was found.

    Raises:
        IcomError: something is wrong: every problem, with its node and what to do.
    """
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        asked = [pool.submit(_ask, transports[node.id], node, nodes) for node in nodes]
        answers = dict(zip(nodes, [future.result() for future in asked], strict=True))
    facts = {node: answer[0] for node, answer in answers.items() if not isinstance(answer, NodeProblem)}
    clocks = {node: answer[1] for node, answer in answers.items() if not isinstance(answer, NodeProblem)}
    alone = [answer for answer in answers.values() if isinstance(answer, NodeProblem)]
    alone += [*_packages(facts), *_interfaces(facts, nodes), *_gpus(facts, gpus)]
    problems = [*alone, *_amx(facts, instance_type), *_clocks(clocks)]
    if not alone:  # else it would fail for the reasons that are known already
        outcome = _all_reduce(transports[nodes[0].id], nodes)
        if isinstance(outcome, NodeProblem):
            problems.append(outcome)
        else:
            say(outcome)
    if problems:
        many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise IcomError(f"{many} on the nodes:\n" + "\n".join(f"  {p}" for p in _in_order(problems, nodes)))
    spread = max(clock.ahead for clock in clocks.values()) - min(clock.ahead for clock in clocks.values())
    doubt = max(clock.within for clock in clocks.values())
    amx = ", AMX" if has_amx(instance_type) else ""
    say(f"healthy: {len(nodes)} nodes, the same packages{amx}, clocks within {spread + 2 * doubt:.2f} s")


def _ask(transport: Transport, node: Node, nodes: tuple[Node, ...]) -> tuple[Facts, Clock] | NodeProblem:
    """One step on one node: its clock, its facts, its clock again."""
    look = script("facts", MARK, PROFILE, *(names.address(other.private_ip) for other in nodes if other != node))
    began = time.time()
    try:
        said = transport.run(look)
    except Stopped:
        raise
    except IcomError as error:
        return NodeProblem(node, _why(error, node), "Repair that, there, or tear the cluster down")
    ended = time.time()
    try:
        first, answer, last = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
        node_began, node_ended = float(first), float(last)
        facts = read_facts(answer)
    except (ValueError, TypeError) as error:
        return NodeProblem(node, f"its answer is none ({error})", "Repair icom there, or tear the cluster down")
    # As NTP does: what passed on the node is no doubt, only the way there and back.
    ahead = ((node_began - began) + (node_ended - ended)) / 2
    within = ((ended - began) - (node_ended - node_began)) / 2
    return facts, Clock(ahead, within)


def _packages(facts: Mapping[Node, Facts]) -> Iterator[NodeProblem]:
    install = "There, in ~/icom: make setup-master"
    for node, found in facts.items():
        for package, why in found.broken.items():
            yield NodeProblem(node, f"{package} cannot be imported ({why})", install)
    versions = {node: found.versions for node, found in facts.items()}
    for one in differences(versions, usual(versions.values())):
        if one.found:
            yield NodeProblem(one.machine, f"{one.name} {one.found}, but {one.expected} on the others", install)


def _interfaces(facts: Mapping[Node, Facts], nodes: tuple[Node, ...]) -> Iterator[NodeProblem]:
    roles = {str(node.private_ip): node.role for node in nodes}
    ways = [name for found in facts.values() for name in found.interfaces.values() if name]
    common = usual({"interface": name} for name in ways).get("interface")
    for node, found in facts.items():
        for address, name in found.interfaces.items():
            if name is None:
                yield NodeProblem(node, f"no route to {roles[address]} ({address})", "Put both in one VPC's subnets")
        for name in dict.fromkeys(name for name in found.interfaces.values() if name):
            if name != common:
                what = f"reaches the others through the interface {name}, but {common} is what the others use"
                yield NodeProblem(node, what, "mpirun wants one name everywhere: rename it there (ip link, netplan)")


def _amx(facts: Mapping[Node, Facts], instance_type: str) -> Iterator[NodeProblem]:
    for node, found in facts.items() if has_amx(instance_type) else ():
        missing = sorted(AMX_FLAGS.difference(found.cpu_flags))
        if missing:
            what = f"{instance_type} has AMX, but the kernel ({found.kernel}) shows no {', '.join(missing)}"
            yield NodeProblem(node, what, "It needs Linux 5.16 or newer: take another image (--ami)")


def _gpus(facts: Mapping[Node, Facts], gpus: int) -> Iterator[NodeProblem]:
    for node, found in facts.items():
        if found.gpus < gpus:
            fix = "See there: nvidia-smi; PyTorch's CUDA has to suit the driver of the image (--ami)"
            yield NodeProblem(node, f"it has {gpus} GPUs, of which PyTorch can use {found.gpus}", fix)


def _clocks(clocks: Mapping[Node, Clock]) -> Iterator[NodeProblem]:
    if not clocks:
        return
    middle = statistics.median_low(clock.ahead for clock in clocks.values())
    usual, reference = next((node, clock) for node, clock in clocks.items() if clock.ahead == middle)
    for node, clock in clocks.items():
        apart, within = clock.ahead - middle, clock.within + reference.within
        if abs(apart) - within > CLOCK_SECONDS:
            where = "ahead of" if apart > 0 else "behind"
            what = f"its clock is {abs(apart):.1f} s (± {within:.1f}) {where} that of {usual.role}"
            yield NodeProblem(node, what, "Let chrony set it: sudo systemctl restart chronyd, or chrony")


def _all_reduce(master: Transport, nodes: tuple[Node, ...]) -> str | NodeProblem:
    """What rank 0 said."""
    count = len(nodes)
    mpirun = f"mpirun -f ~/hosts -n {count} -ppn 1 python -m icom.launch.all_reduce"
    fix = f"All ports have to be open among the nodes. To see it again: icom ssh, cd icom, {mpirun}"
    try:
        sum_over_all = script("all_reduce", PROFILE, str(count), str(ALL_REDUCE_PORT), str(ALL_REDUCE_SECONDS))
        said = master.run(sum_over_all)
    except Stopped:
        raise
    except IcomError as error:
        return NodeProblem(nodes[0], f"no all-reduce: {_why(error, nodes[0])}", fix)
    found = re.search(r"all-reduce of (\d+) process.*", said)
    if not found or int(found[1]) != count:
        return NodeProblem(nodes[0], f"mpirun made no group of {count} processes, but said: {said.strip()}", fix)
    return found[0]


def _why(error: IcomError, node: Node) -> str:
    """What a step said, but for the node's name."""
    why = str(error).removeprefix(f"{node.label}: ")
    return why.replace(f"exit code {TIMED_OUT} of", f"not done within {ALL_REDUCE_SECONDS} s")


def _in_order(problems: list[NodeProblem], nodes: tuple[Node, ...]) -> list[NodeProblem]:
    return sorted(problems, key=lambda problem: nodes.index(problem.node))
