"""What computes. The trainer asks `resolve` for a backend and tests no device itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from icom.backends import cuda, ipex
from icom.backends.cpu import CpuBackend
from icom.config.common import BackendName, Precision
from icom.engine.choices import machine_key
from icom.engine.precision import product_dtype
from icom.errors import UsageError
from icom.files import cache_folder, write_atomically, write_error
from icom.parallel.place import SINGLE_PROCESS, Place

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from icom.models.loading import Model

NAMES: tuple[BackendName, ...] = ("cpu", "ipex", "cuda")
"""What --backend takes beside `auto`."""

MEASURED = "backends.json"
"""In the cache folder: machine -> backend -> seconds per training step."""


class Backend(Protocol):
    """The contract.

    Attributes:
        name: as in --backend.
        device: where modules and batches live.
        dtype: of VAE and UNet.
        process_group: torch.distributed backend that suits the device.
        asynchronous: it computes while Python goes on, and whoever reads a number waits for all that was asked for.
        training_layout: memory format in which convolutions are trained fastest.
        choices: what was chosen by measuring and decides the bits of the result. It fills while the run computes;
            checkpoints record it, and a resumed run puts the record in before its first step.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    process_group: str
    asynchronous: bool
    training_layout: torch.memory_format
    choices: dict[str, str]

    def prepare(self, model: Model) -> None:
        """Move the frozen modules to the device, in the layout and precision that is fastest there."""

    def start_anew(self, model: Model) -> None:
        """Forget what was chosen by the shapes that came first: a further run beside the same model then has the bits
        that it has in a process of its own. `model` is prepared."""

    def prepare_training(self, unet: UNet2DConditionModel) -> None:
        """Make a UNet that is trained, float32 and on the device, as fast as its layers allow that stay as they are."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the CPU's memory, on the device. Python does not wait until an asynchronous one has it."""

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """What gives a vector of the device to Python: it waits for the vector, and for nothing that comes after."""

    def record(
        self, compute: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Record what the device does for `compute`, which reads and writes no other memory of the CPU.

        Returns:
            (tensors that hold the results, what does it again with the numbers that are then in the same memory).
            Nothing is in the results before the first time.
        """

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which the text encoder runs, and a UNet that is trained."""

    def describe(self) -> str:
        """One phrase for the user: engine, instruction set, precision, threads."""

    def advice(self) -> str | None:
        """What is slow about this precision here, measured, and what to do; None where nothing is."""


def resolve(
    name: str,
    mixed_precision: str,
    engine: str = "auto",
    *,
    allow_tf32: bool = False,
    compiled: bool = False,
    cache_dir: str | None = None,
    place: Place = SINGLE_PROCESS,
) -> tuple[Backend, str]:
    """Choose the backend.

    Args:
        name: `auto` or one of NAMES.
        mixed_precision: "no", "bf16", "fp16", or "auto" for what `fast_precision` says.
        engine: "auto", or "off" for stock layers.
        allow_tf32: TF32 in float32 matrix products; acts on GPUs only.
        compiled: torch.compile for the UNet; GPUs only.
        cache_dir: as in --cache_dir; `auto` looks for measurements there.
        place: of this process: which GPU or which cores are its own.

    Returns:
        (backend, the reason for the choice).

    Raises:
        UsageError: the backend is absent (only `auto` falls back), or cannot do what the other options ask for.
    """
    folder = cache_folder(cache_dir)
    chosen, reason = _choose(folder) if name == "auto" else (name, "asked for")
    if problem := why_not(chosen):
        raise UsageError(f"--backend {chosen} cannot be used here: {problem}. --backend auto takes what works.")
    if mixed_precision == "auto":
        mixed_precision, why = fast_precision(chosen, place=place)
        reason = f"{reason}; {why}"
    if compiled and chosen != "cuda":
        raise UsageError(
            f"--compile is for --backend cuda, and this run is on {chosen} ({reason}). On CPUs it gains nothing and "
            "costs minutes at the start. Drop it."
        )
    if chosen == "cuda":
        return cuda.CudaBackend(mixed_precision, allow_tf32=allow_tf32, compiled=compiled, place=place), reason
    if chosen == "ipex":
        return ipex.IpexBackend(mixed_precision, engine, folder, place), reason
    return CpuBackend(mixed_precision, engine, folder, place), reason


def why_not(name: str) -> str | None:
    """Why one of NAMES cannot be used here and what to do about it; None when it can."""
    return None if name == "cpu" else {"ipex": ipex, "cuda": cuda}[name].why_not()


def is_gpu(name: str) -> bool:
    """Whether what --backend names is a GPU; `auto` is where there is one."""
    return name == "cuda" or (name == "auto" and why_not("cuda") is None)


def fast_precision(name: str, cache_dir: str | None = None, place: Place = SINGLE_PROCESS) -> tuple[Precision, str]:
    """bf16 where the device computes in it, else float32.

    Args:
        name: of the backend, or `auto`.
        cache_dir, place: as in `resolve`.

    Returns:
        (precision, one phrase that says why).
    """
    chosen = _choose(cache_folder(cache_dir))[0] if name == "auto" else name
    device = "GPU" if chosen == "cuda" else "CPU"
    has_bf16 = cuda.has_bf16(place) if chosen == "cuda" else product_dtype(torch.bfloat16) == torch.bfloat16
    return ("bf16", f"bf16: this {device} has it") if has_bf16 else ("no", f"fp32: this {device} has no bf16")


def remember(seconds_per_step: Mapping[str, float], folder: Path) -> None:
    """Keep what was measured on this machine, for `auto`.

    Args:
        seconds_per_step: backend -> seconds of a training step; both backends measured alike.
        folder: of the cache.

    Raises:
        IcomError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder / MEASURED, error, "--cache_dir") from error
    measured = _read_measured(folder)
    measured[machine_key()] = {**measured.get(machine_key(), {}), **seconds_per_step}
    write_atomically(folder / MEASURED, json.dumps(measured, indent=1).encode(), "--cache_dir")


def faster_backend(folder: Path) -> tuple[str, str] | None:
    """The faster one of cpu and ipex as `remember` has it for this machine, and the figures; None without both."""
    seconds = _read_measured(folder).get(machine_key(), {})
    if not {"cpu", "ipex"} <= seconds.keys():
        return None
    faster, slower = sorted(("cpu", "ipex"), key=lambda name: seconds[name])
    figures = f"{seconds[faster]:.3g} against {seconds[slower]:.3g} s/step"
    return faster, f"measured faster than {slower} here: {figures}"


def _choose(folder: Path) -> tuple[str, str]:
    """What `auto` takes, and why: a GPU; else stock PyTorch, unless IPEX was measured to be faster here."""
    no_gpu = cuda.why_not()
    if no_gpu is None:
        return "cuda", "a GPU is there"
    faster = faster_backend(folder)
    if faster and ipex.why_not() is None:
        return faster
    return "cpu", f"stock PyTorch; no GPU: {no_gpu}"


def _read_measured(folder: Path) -> dict[str, dict[str, float]]:
    """The file's content; nothing when it is absent or damaged, as it only saves a measurement."""
    try:
        content = json.loads((folder / MEASURED).read_text())
        return {machine: {name: float(s) for name, s in seconds.items()} for machine, seconds in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
