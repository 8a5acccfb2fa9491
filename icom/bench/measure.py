"""What one process of `icom bench` measures: the steps of one contender, and what the machine can do at its best.

Every measurement has a process of its own, because allocator settings, packed weights and IPEX act on a whole process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from icom import backends
from icom.bench.reference import ReferenceTrainer
from icom.config.common import BackendName
from icom.config.train import TrainConfig
from icom.data.captions import TEMPLATES
from icom.data.images import Transform, list_pictures, pixels, read_picture
from icom.data.sampling import SampleStream, gaussian_noise
from icom.engine import operators
from icom.engine.memory import keep_freed_memory
from icom.methods.embedding import captions_to_ids, placeholder_tokens
from icom.models import loading
from icom.models.architectures import ARCHITECTURES
from icom.models.parts import TEXT_ENCODER, UNET
from icom.parallel.group import joined
from icom.parallel.place import choose_collectives, find_place
from icom.signals import own_process

if TYPE_CHECKING:
    from icom.training.run import Run

WARM_UP = 3
"""Steps that are not counted: weights get packed, attention is chosen, the heap grows to its size."""
REFERENCE_WARM_UP = 1


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
        backend: as in --backend; None: the reference.
        engine: "auto" or "off".
        our_allocator: whether the allocator is told to keep freed memory.
        side_by_side: how many processes measure at a time; they start and end their timed steps together.
        meeting: port of the TCPStore where they wait for each other; only with several.
    """

    arch: str
    resolution: int
    batch_size: int
    mixed_precision: str
    steps: int
    cache: str
    backend: BackendName | None = "auto"
    engine: str = "auto"
    our_allocator: bool = True
    side_by_side: int = 1
    meeting: int | None = None


@dataclass(frozen=True)
class Measurement:
    """What one process measured. Times in seconds, one value per timed step; memory in 2^30 bytes.

    Attributes:
        seconds: of whole steps.
        peak_gb: highest resident memory; on a GPU its own memory.
        forward: from the text encoder's start to the UNet's end.
        backward: from there to the rows' gradient.
        exchange: from there to the optimizer's step: in a group of processes, waiting for the others and all-reduce.
        bytes_per_step: what each of several processes would send in an optimizer step.
        matmul_tflops, convolution_tflops: the machine's peak in the same dtype, in 10^12 operations per second.
        description: of the backend.
        group: processes that summed their gradients, this one included.
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
    group: int = 1


def measure(job: Job) -> Measurement:
    """Build the model, warm up, time the steps, and then the machine's peak."""
    if job.our_allocator:
        keep_freed_memory()
    loading.quiet_libraries()
    options = TrainConfig(
        train_data_dir="bundled",
        placeholder_token="<bench>",
        initializer_token="toy",
        resolution=job.resolution,
        train_batch_size=job.batch_size,
        learning_rate=1e-3,
        max_train_steps=job.steps + WARM_UP,
        seed=0,
        mixed_precision=job.mixed_precision,  # type: ignore[arg-type]
        report_to="none",
        cache_dir=job.cache,
    )
    return _measure_reference(options, job) if job.backend is None else _measure_ours(options, job, job.backend)


def _measure_ours(options: TrainConfig, job: Job, name: BackendName) -> Measurement:
    from accelerate import Accelerator

    from icom.training.run import prepare
    from icom.training.step import message, optimizer_step

    place = find_place(os.environ)
    backend, _ = backends.resolve(name, job.mixed_precision, job.engine, cache_dir=job.cache, place=place)
    model = loading.load(loading.find(f"random:{job.arch}"), backend.dtype)
    with joined(place) as group:
        group.connect(choose_collectives("auto", backend.process_group)[0])
        accelerator = Accelerator(cpu=backend.device.type == "cpu", mixed_precision=job.mixed_precision)
        run = prepare(options, backend, accelerator, model, list_pictures("bundled"), group)
        marks = _marks(run)
        meet = _meeting(job)
        seconds = _time_steps(lambda index: optimizer_step(run, index * run.samples_per_step), job.steps, WARM_UP, meet)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if backend.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(backend.device) / 2**30
    starts, middles, ends, steps = (marks[name][-job.steps :] for name in ("start", "middle", "end", "step"))
    # Beside other processes it would be no peak.
    matmul, convolution = (0.0, 0.0) if job.side_by_side > 1 else peaks(backend.device, backend.dtype)
    return Measurement(
        seconds,
        peak,
        [middle - start for start, middle in zip(starts, middles, strict=True)],
        [end - middle for middle, end in zip(middles, ends, strict=True)],
        [step - end for end, step in zip(ends, steps, strict=True)],
        sum(part.nbytes for part in message([*run.method.parameters.values()], 0.0, [0] * max(2, group.size))),
        matmul,
        convolution,
        backend.describe(),
        group.size,
    )


def _meeting(job: Job) -> Callable[[str], None]:
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


def _marks(run: Run) -> dict[str, list[float]]:
    """Let hooks note when each step's forward pass starts and ends, its backward pass ends, the optimizer steps."""
    marks: dict[str, list[float]] = {"start": [], "middle": [], "end": [], "step": []}

    def note(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if run.backend.device.type == "cuda":
                torch.cuda.synchronize()
            marks[name].append(time.perf_counter())

        return hook

    run.model.text_encoder.register_forward_pre_hook(note("start"))
    run.model.unet.register_forward_hook(note("middle"))
    last = next(iter(run.method.parameters.values()))
    last.register_post_accumulate_grad_hook(note("end"))
    run.optimizer.register_step_pre_hook(note("step"))
    return marks


def _measure_reference(options: TrainConfig, job: Job) -> Measurement:
    # Stock layers on the CPU, whatever else there is: what the script does there.
    backend, _ = backends.resolve("cpu", job.mixed_precision, "off")
    model = loading.load(loading.find(f"random:{job.arch}"), backend.dtype)
    trainer = ReferenceTrainer(model, options, backend.autocast())
    templates = TEMPLATES["object"]
    tokens = placeholder_tokens(options.placeholder_token, options.num_vectors)
    length = model.text_encoder.config.max_position_embeddings
    captions = captions_to_ids(trainer.tokenizer, templates, tokens, length)
    transform = Transform(options.resolution, center_crop=False)
    images = [read_picture(picture.path) for picture in list_pictures("bundled")]
    timesteps = model.noise_scheduler.config["num_train_timesteps"]
    stream = SampleStream(0, len(images), options.repeats, len(templates), timesteps)
    factor = 2 ** (len(model.vae.config["block_out_channels"]) - 1)
    shape = (model.vae.config["latent_channels"], *(options.resolution // factor,) * 2)

    def step(index: int) -> float:
        first = index * job.batch_size
        samples = [stream[i] for i in range(first, first + job.batch_size)]
        noises = [gaussian_noise(sample, shape) for sample in samples]
        batch = torch.stack([pixels(images[s.picture], transform, flip=s.flip) for s in samples])
        latents = trainer.encode(batch, torch.stack([vae_noise for vae_noise, _ in noises]))
        return trainer.train_batch(
            latents,
            torch.stack([noise for _, noise in noises]),
            torch.tensor([sample.timestep for sample in samples]),
            captions[[sample.template for sample in samples]],
        )

    seconds = _time_steps(step, job.steps, REFERENCE_WARM_UP)
    return Measurement(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def _time_steps(
    step: Callable[[int], object], count: int, warm_up: int, meet: Callable[[str], None] = lambda _: None
) -> list[float]:
    seconds = []
    for index in range(warm_up + count):
        if index == warm_up:
            meet("warm")
        began = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - began)
    meet("done")
    return seconds[warm_up:]


def count_flops(arch: str, resolution: int, batch_size: int) -> tuple[float, float]:
    """Operations of one training step's matrix products and convolutions, forward and backward, in 10^9.

    Counted by PyTorch's FlopCounterMode while stock layers run on the meta device, with gradients for the token table
    alone. A backend that computes something twice to save memory gets no credit for it.

    Returns:
        (of matrix products, attention's included; of convolutions).
    """
    # Before the counter and outside the device's context: torch 2.8 trips over importing the models there.
    from diffusers import UNet2DConditionModel  # noqa: F401
    from transformers import CLIPTextModel  # noqa: F401

    from torch.utils.flop_counter import FlopCounterMode  # isort: skip

    with torch.device("meta"):
        text_encoder, unet = TEXT_ENCODER.build(ARCHITECTURES[arch]), UNET.build(ARCHITECTURES[arch])
        text_encoder.requires_grad_(False)
        unet.requires_grad_(False)
        text_encoder.get_input_embeddings().weight.requires_grad_(True)
        length = text_encoder.config.max_position_embeddings
        side = resolution // 8
        # The meta device has no flash attention; the mathematics behind it is counted in full.
        with FlopCounterMode(display=False) as counter:
            text = text_encoder(torch.zeros(batch_size, length, dtype=torch.long))[0]
            latents = torch.zeros(batch_size, unet.config["in_channels"], side, side)
            unet(latents, torch.zeros(batch_size), text).sample.sum().backward()
    by_operator = counter.get_flop_counts()["Global"]
    convolutions = sum(count for operator, count in by_operator.items() if "convolution" in str(operator))
    return (sum(by_operator.values()) - convolutions) / 1e9, convolutions / 1e9


def peaks(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """The best rates of a matrix product and of a 3 x 3 convolution over a few sizes, in 10^12 operations per second.

    Weights are packed where the engine can pack them.
    """
    packed = device.type == "cpu" and operators.why_no_engine(dtype) is None
    sizes = (1024, 2048)
    shapes = ((320, 64), (640, 32), (1280, 16))
    matmul = max(_rate(2 * n**3, _product(n, device, dtype, packed)) for n in sizes)
    return matmul, max(_rate(18 * c * c * n * n, _convolution(c, n, device, dtype, packed)) for c, n in shapes)


def _product(n: int, device: torch.device, dtype: torch.dtype, packed: bool) -> list[Callable[[], object]]:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    ways: list[Callable[[], object]] = [lambda: a @ b]
    if packed:
        weight = operators.pack_linear(b, n)
        ways.append(lambda: operators.linear(a, weight))
    return ways


def _convolution(
    channels: int, side: int, device: torch.device, dtype: torch.dtype, packed: bool
) -> list[Callable[[], object]]:
    layout = torch.channels_last
    x = torch.randn(1, channels, side, side, device=device).to(dtype, memory_format=layout)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype, memory_format=layout)
    ways: list[Callable[[], object]] = [lambda: F.conv2d(x, weight, padding=1)]
    if packed:
        ready = operators.pack_convolution(weight, [1, 1], [1, 1], list(x.shape))
        ways.append(lambda: operators.convolution(x, ready, None, [1, 1], [1, 1]))
    return ways


def _rate(operations: float, ways: list[Callable[[], object]]) -> float:
    """The median rate of the best way, in 10^12 operations per second, over at least a tenth of a second."""
    best = 0.0
    for way in ways:
        way()
        seconds: list[float] = []
        while len(seconds) < 3 or sum(seconds) < 0.1:
            began = time.perf_counter()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        best = max(best, operations / statistics.median(seconds) / 1e12)
    return best


if __name__ == "__main__":
    own_process()
    print(json.dumps(dataclasses.asdict(measure(Job(**json.loads(sys.argv[1]))))))
