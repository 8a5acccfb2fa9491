"""What one process of `icom bench` measures: the steps of one contender, and what the machine can do at its best.

Every measurement has a process of its own, because allocator settings, packed weights and IPEX act on a whole process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from icom import backends
from icom.bench.job import Job, Measurement, meeting, peak_gb, time_steps
from icom.bench.reference import ReferenceTrainer
from icom.config.common import BackendName
from icom.config.train import TrainConfig
from icom.config.words import placeholder_tokens
from icom.data.captions import TEMPLATES
from icom.data.images import list_pictures, read_picture
from icom.data.sampling import SampleStream, gaussian_noise
from icom.data.transform import Transform, pixels
from icom.engine import operators
from icom.engine.memory import keep_freed_memory
from icom.methods.embedding import captions_to_ids
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


def measure(job: Job) -> Measurement:
    """Build the model, warm up, time the steps, and of textual inversion then the machine's peak."""
    if job.our_allocator:
        keep_freed_memory()
    loading.quiet_libraries()
    if job.method == "unet":
        from icom.bench.unet import measure_unet

        return measure_unet(job)
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
        enable_cuda_graph=job.enable_cuda_graph,
    )
    return _measure_reference(options, job) if job.backend is None else _measure_ours(options, job, job.backend)


def _measure_ours(options: TrainConfig, job: Job, name: BackendName) -> Measurement:
    from accelerate import Accelerator

    from icom.training.material import open_material
    from icom.training.run import prepare
    from icom.training.step import optimizer_step

    place = find_place(os.environ)
    backend, _ = backends.resolve(name, job.mixed_precision, job.engine, cache_dir=job.cache, place=place)
    model = loading.load(loading.find(f"random:{job.arch}"), backend.dtype)
    with joined(place) as group:
        group.connect(choose_collectives("auto", backend.process_group)[0])
        accelerator = Accelerator(cpu=backend.device.type == "cpu", mixed_precision=job.mixed_precision)
        run = prepare(options, backend, accelerator, model, open_material(options), group)
        marks = _Marks(run)
        begun: deque[Callable[[], object]] = deque()

        def step(index: int) -> None:
            """As `icom.training.loop` has it: what a step came to is asked for when a GPU has the next one."""
            begun.append(optimizer_step(run, index * run.samples_per_step))
            if len(begun) > (1 if backend.asynchronous else 0):
                begun.popleft()()

        seconds = time_steps(step, job.steps, WARM_UP, meeting(job))
        peak = peak_gb(backend.device)
        forward, backward, exchange = (
            marks.between(*pair, job.steps) for pair in (("start", "middle"), ("middle", "end"), ("end", "step"))
        )
        if job.profile:
            _trace(step, WARM_UP + job.steps, Path(job.profile), on_gpu=backend.asynchronous)
    # Beside other processes it would be no peak.
    matmul, convolution = (0.0, 0.0) if job.side_by_side > 1 else peaks(backend.device, backend.dtype)
    return Measurement(
        seconds,
        peak,
        forward,
        backward,
        exchange,
        sum(part.nbytes for part in _message_of(run)),
        matmul,
        convolution,
        backend.describe(),
        torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else "",
        group.size,
    )


def _message_of(run: Run) -> list[torch.Tensor]:
    """What an optimizer step sends; of a process alone, what it would as one of two."""
    from icom.training.step import message

    numbers = torch.zeros(1 + max(2, run.group.size), device=run.backend.device)
    return message([*run.method.parameters.values()], numbers[0], numbers[1:])


class _Marks:
    """When each step's forward pass starts and ends, its backward pass ends, the optimizer steps; told by hooks.

    On a GPU these are times of its own, and nothing waits for them. In a graph there are none.
    """

    def __init__(self, run: Run) -> None:
        self._on_gpu = run.backend.device.type == "cuda"
        self._marks: dict[str, list[Any]] = {"start": [], "middle": [], "end": [], "step": []}
        if run.graphs is None:
            run.model.text_encoder.register_forward_pre_hook(self._note("start"))
            run.model.unet.register_forward_hook(self._note("middle"))
            last = next(iter(run.method.parameters.values()))
            last.register_post_accumulate_grad_hook(self._note("end"))
            run.optimizer.register_step_pre_hook(self._note("step"))

    def between(self, one: str, other: str, steps: int) -> list[float]:
        """Seconds from one mark to the other, of the last steps."""
        if self._on_gpu:
            torch.cuda.synchronize()
        pairs = zip(self._marks[one][-steps:], self._marks[other][-steps:], strict=True)
        return [begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin for begin, end in pairs]

    def _note(self, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if not self._on_gpu:
                self._marks[name].append(time.perf_counter())
                return
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name].append(event)

        return hook


def _trace(step: Callable[[int], object], first: int, path: Path, *, on_gpu: bool) -> None:
    """Write what two more steps do, in Chrome's format."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as trace:
        step(first)
        step(first + 1)
        if on_gpu:
            torch.cuda.synchronize()
    unfinished = path.with_name(f".{path.name}.tmp")
    trace.export_chrome_trace(str(unfinished))
    unfinished.replace(path)


def _measure_reference(options: TrainConfig, job: Job) -> Measurement:
    # Stock layers, in the layout that they are loaded in: what the script does there.
    backend, _ = backends.resolve(job.reference_backend, job.mixed_precision, "off")
    model = loading.load(loading.find(f"random:{job.arch}"), backend.dtype)
    for part in model.parts.values():
        part.to(backend.device)
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
        if backend.asynchronous:  # the script draws it where it is needed
            vae_noise, noise = torch.randn(2, len(samples), *shape, device=backend.device)
        else:
            vae_noise, noise = map(torch.stack, zip(*(gaussian_noise(one, shape) for one in samples), strict=True))
        batch = torch.stack([pixels(images[s.picture], transform, flip=s.flip) for s in samples])
        latents = trainer.encode(batch.to(backend.device), vae_noise)
        return trainer.train_batch(
            latents,
            noise,
            torch.tensor([sample.timestep for sample in samples], device=backend.device),
            captions[[sample.template for sample in samples]].to(backend.device),
        )

    seconds = time_steps(step, job.steps, REFERENCE_WARM_UP)
    return Measurement(seconds, peak_gb(backend.device))


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
    on_gpu = device.type == "cuda"
    packed = not on_gpu and operators.why_no_engine(dtype) is None
    sizes = (4096, 8192) if on_gpu else (1024, 2048)
    batch = 16 if on_gpu else 1
    shapes = ((320, 64), (640, 32), (1280, 16))
    matmul = max(_rate(2 * n**3, _product(n, device, dtype, packed)) for n in sizes)
    ways = {(c, n): _convolution(batch, c, n, device, dtype, packed) for c, n in shapes}
    return matmul, max(_rate(18 * batch * c * c * n * n, of_size) for (c, n), of_size in ways.items())


def _product(n: int, device: torch.device, dtype: torch.dtype, packed: bool) -> list[Callable[[], object]]:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    ways: list[Callable[[], object]] = [lambda: a @ b]
    if packed:
        weight = operators.pack_linear(b, n)
        ways.append(lambda: operators.linear(a, weight))
    return ways


def _convolution(
    batch: int, channels: int, side: int, device: torch.device, dtype: torch.dtype, packed: bool
) -> list[Callable[[], object]]:
    layout = torch.channels_last
    x = torch.randn(batch, channels, side, side, device=device).to(dtype, memory_format=layout)
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
    with contextlib.suppress(OSError):  # where memory does not suffice, the kernel is to take this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    print(json.dumps(dataclasses.asdict(measure(Job(**json.loads(sys.argv[1]))))))
