"""NVIDIA GPUs: one device per process. Written without a GPU at hand: see docs/gpu.md for what is not proven."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from icom.backends.shared import autocast_to, matrices_to
from icom.errors import UsageError
from icom.parallel.place import SINGLE_PROCESS, Place

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from icom.models.loading import Model

AMPERE = (8, 0)
"""Compute capability from which GPUs compute in bf16."""
BEFORE_RECORDING = 3
"""Passes before a graph is recorded."""


def why_not() -> str | None:
    """Why no GPU can be used here and what to do about it; None when one can."""
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"):
        return "accelerate is configured with use_cpu: true; accelerate_configs/single_gpu.yaml is for a GPU"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is a build without CUDA; docs/gpu.md installs one with it"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    # PyTorch warns when there is a GPU whose driver is too old.
    detail = (
        str(said[0].message).split(" (Triggered")[0] if said else "no NVIDIA driver, or CUDA_VISIBLE_DEVICES hides it"
    )
    return f"PyTorch (CUDA {torch.version.cuda}) finds no NVIDIA GPU ({detail}); `nvidia-smi` shows what there is"


def has_bf16(place: Place) -> bool:
    """Whether there is a GPU for this process and it computes in bf16."""
    return why_not() is None and torch.cuda.get_device_capability(place.local_rank) >= AMPERE


class CudaBackend:
    """See `icom.backends.Backend`. --engine does not matter here: its layers are for CPUs."""

    name = "cuda"
    process_group = "nccl"
    asynchronous = True

    def __init__(
        self, mixed_precision: str, *, allow_tf32: bool = False, compiled: bool = False, place: Place = SINGLE_PROCESS
    ) -> None:
        """Raises: UsageError for fp16, for bf16 on a GPU that has none, or with more processes than GPUs."""
        if mixed_precision == "fp16":
            # The gradient of a mean over a picture is far below fp16's smallest number unless the loss is scaled.
            raise UsageError(
                "fp16 needs loss scaling, which icom does not do: gradients underflow. Use --mixed_precision bf16 "
                "(A100, H100 and all since) or no."
            )
        local_rank, gpus = place.local_rank, torch.cuda.device_count()
        if local_rank >= gpus:
            raise UsageError(
                f"This is process {local_rank + 1} on this machine, and it has {gpus} GPUs that PyTorch sees. Start at "
                "most one process per GPU (accelerate launch --num_processes) and look at CUDA_VISIBLE_DEVICES."
            )
        self.device = torch.device("cuda", local_rank)
        self.dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32
        if self.dtype == torch.bfloat16 and torch.cuda.get_device_capability(self.device) < AMPERE:
            raise UsageError(
                f"{torch.cuda.get_device_name(self.device)} does not compute in bf16 (A100, H100 and all since do). "
                "Use --mixed_precision no."
            )
        torch.cuda.set_device(self.device)
        self.training_layout = torch.channels_last
        self.allow_tf32, self.compiled = allow_tf32, compiled
        self.choices: dict[str, str] = {}
        self._graphs_memory: Any = None
        # PyTorch's own defaults are no for matrix products and yes for convolutions.
        torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = allow_tf32

    def prepare(self, model: Model) -> None:
        """All parts to the GPU, channels-last for the convolutions; PyTorch's own attention, which is flash there."""
        for part in model.parts.values():
            part.to(self.device)
        model.vae.to(memory_format=torch.channels_last)
        model.unet.to(memory_format=torch.channels_last)
        matrices_to(model.text_encoder, self.dtype)
        if self.compiled:
            model.unet.compile()

    def start_anew(self, model: Model) -> None:
        """torch.compile makes code for the first shape, and other code for all shapes when a second one comes."""
        if self.compiled:
            torch.compiler.reset()

    def prepare_training(self, unet: UNet2DConditionModel) -> None:
        """Nothing: PyTorch's own attention is flash there."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """By way of pinned memory: from any other, Python would wait until all kernels before the copy are done.

        PyTorch keeps the pinned memory until the copy is done, and then for the next one.
        """
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """They are copied when the kernels before are done; an event, and no later kernel, is waited for."""
        copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copy.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[float]:
            copied.synchronize()
            return copy.tolist()

        return read

    def record(
        self, compute: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """A CUDA graph, as PyTorch's notes on CUDA semantics make one of a whole network.

        All graphs share their memory: no two are played at a time, and what each leaves is kept from the others.
        """
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cast that is kept from outside the graph would not be in it
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries choose kernels and take memory of their own
                for _ in range(BEFORE_RECORDING):
                    compute()
            torch.cuda.current_stream().wait_stream(side)
            if self._graphs_memory is None:
                self._graphs_memory = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads, as NCCL's, may ask the device for something meanwhile.
            with torch.cuda.graph(graph, pool=self._graphs_memory, capture_error_mode="thread_local"):
                results = compute()
        finally:
            torch.set_autocast_cache_enabled(cached)
        return results, graph.replay

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 autocast, or nothing in float32."""
        return autocast_to(self.dtype, self.device)

    def describe(self) -> str:
        """For instance: cuda (NVIDIA A100-SXM4-80GB, PyTorch 2.13.0, CUDA 13.0), bf16, cuda:0."""
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        extras = [word for word, on in (("TF32", self.allow_tf32), ("compiled", self.compiled)) if on]
        engine = f"{torch.cuda.get_device_name(self.device)}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
        return f"cuda ({', '.join([engine, *extras])}), {precision}, {self.device}"

    def advice(self) -> str | None:
        """None: a GPU without bf16 is refused."""
        return None
