"""What a measuring process of `icom bench` is told, what it answers, and how all of them time steps."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from icom.config.bench import MethodName
from icom.config.common import BackendName
from icom.config.finetune import ParallelName


@dataclass(frozen=True)
class Job:
    """What a process is to measure.

    Attributes:
        arch: a key of ARCHITECTURES.
        resolution: pixels.
        batch_size: pictures per step.
        mixed_precision: "no" or "bf16".
        steps: timed ones.
        cache: folder of the latent cache and of the engine's choices.
        method: what is trained.
        backend: as in --backend; None: the reference.
        engine: "auto" or "off".
        reference_backend: where the reference computes.
        enable_cuda_graph: as in `icom train`.
        profile: file for a trace of further steps.
        our_allocator: whether the allocator is told to keep freed memory.
        side_by_side: how many processes measure at a time; they start and end their timed steps together.
        meeting: port of the TCPStore where they wait for each other; only with several.
        data: of --method unet: what its --train_data_dir would be.
        ema: of --method unet: whether the mean of the weights is kept.
        workers: of --method unet: threads that read and prepare pictures.
        gradient_checkpointing: of --method unet.
        parallel: of --method unet: how several processes share the work.
    """

    arch: str
    resolution: int
    batch_size: int
    mixed_precision: str
    steps: int
    cache: str
    backend: BackendName | None = "auto"
    engine: str = "auto"
    reference_backend: BackendName = "cpu"
    enable_cuda_graph: bool = False
    profile: str | None = None
    our_allocator: bool = True
    side_by_side: int = 1
    meeting: int | None = None
    method: MethodName = "textual_inversion"
    data: str = ""
    ema: bool = False
    workers: int = 1
    gradient_checkpointing: bool = False
    parallel: ParallelName = "auto"


@dataclass(frozen=True)
class Measurement:
    """What one process measured. Times in seconds, one value per timed step; memory in 2^30 bytes.

    Attributes:
        seconds: of whole steps.
        peak_gb: highest resident memory; on a GPU its own memory.
        forward: from the text encoder's start (--method unet: the UNet's) to the UNet's end. Of CUDA graphs nothing.
        backward: from there to the rows' gradient (--method unet: to the optimizer's step, clipping and other
            processes' gradients included).
        exchange: from there to the optimizer's step: in a group of processes, waiting for the others and all-reduce.
        bytes_per_step: what each of several processes would send in an optimizer step (--method unet: what the formula
            says that this one sends).
        matmul_tflops, convolution_tflops: the machine's peak in the same dtype, in 10^12 operations per second.
        description: of the backend.
        card: name of the GPU, where there is one.
        group: processes that summed their gradients, this one included.
        losses: of --method unet, and of its reference: of all steps, those that warm up included.
        waiting: of --method unet: share of each step that passed waiting for data.
        sent: of --method unet: bytes that this process's TCP connections took in each step; none on its own.
        attention: of --method unet: shape -> way that was chosen.
        ways: shape -> way -> milliseconds, as measured before the choice.
    """

    seconds: list[float]
    peak_gb: float
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)
    bytes_per_step: int = 0
    matmul_tflops: float = 0.0
    convolution_tflops: float = 0.0
    description: str = ""
    card: str = ""
    group: int = 1
    losses: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    attention: dict[str, str] = field(default_factory=dict)
    ways: dict[str, dict[str, float]] = field(default_factory=dict)


def time_steps(
    step: Callable[[int], object], count: int, warm_up: int, meet: Callable[[str], None] = lambda _: None
) -> list[float]:
    """Call a step again and again.

    Args:
        step: gets its number, from 0.
        count: that are timed.
        warm_up: that come before.
        meet: waits for other processes, before the first timed one and after the last.

    Returns:
        Seconds of each timed step.
    """
    seconds = []
    for index in range(warm_up + count):
        if index == warm_up:
            meet("warm")
        began = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - began)
    meet("done")
    return seconds[warm_up:]


def meeting(job: Job) -> Callable[[str], None]:
    """What makes this process wait until all that are measured side by side have come to the same place."""
    if job.meeting is None:
        return lambda _: None
    # The one that started the processes ends them all when one dies: nobody has to give up before that.
    address = ("127.0.0.1", job.meeting)
    store = torch.distributed.TCPStore(*address, is_master=False, timeout=timedelta(days=1))  # type: ignore[attr-defined]

    def meet(place: str) -> None:
        if store.add(place, 1) == job.side_by_side:
            store.set(f"{place}: all", "")
        store.wait([f"{place}: all"])

    return meet


def peak_gb(device: torch.device) -> float:
    """Highest memory so far, in 2^30 bytes: this process's resident one, or on a GPU its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
