"""Intel Extension for PyTorch (IPEX) on the CPU. Intel has archived it; its last release, 2.8, needs torch 2.8.

Importing it replaces kernels of PyTorch in the whole process (group norm, layer norm, autocast), so it is imported
when its backend is made and nowhere else.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.backends.shared import Synchronous, about_emulation, autocast_to, matrices_to, refuse_fp16
from icom.engine.blocks import replace_attention
from icom.engine.choices import Choices, choices_for
from icom.engine.threads import use_own_cores
from icom.errors import UsageError
from icom.parallel.place import SINGLE_PROCESS, Place

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

    from icom.models.loading import Model

DISTRIBUTION = "intel-extension-for-pytorch"
INSTALL = "`make setup-master ENV_MANAGER=venv VENV=.venv-ipex EXTRAS=ipex` makes an environment with both (extra ipex)"


def why_not() -> str | None:
    """Why IPEX cannot be used here and what to do about it; None when it can. Imports nothing."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"IPEX is not installed; it needs torch 2.8, and {INSTALL}"
    if version.split(".")[:2] != str(torch.__version__).split(".")[:2]:
        # Importing it would end the process.
        return f"IPEX {version} is installed beside torch {torch.__version__}, their versions have to agree; {INSTALL}"
    return None


class IpexBackend(Synchronous):
    """See `icom.backends.Backend`."""

    name = "ipex"
    process_group = "gloo"

    def __init__(self, mixed_precision: str, engine: str, folder: Path, place: Place = SINGLE_PROCESS) -> None:
        """Raises: UsageError for fp16, for bf16 on a CPU where IPEX refuses it, or when IPEX cannot be loaded."""
        refuse_fp16(mixed_precision)
        use_own_cores(place)
        self.device = torch.device("cpu")
        self.engine = engine
        self.dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32
        self.training_layout = torch.channels_last
        self.choices: dict[str, str] = {}
        self._folder = folder
        self._attention: Choices | None = None
        self._ipex = _load()
        if self.dtype == torch.bfloat16 and not self._ipex._C.onednn_has_bf16_support():
            raise UsageError(
                "IPEX computes in bf16 on CPUs with AVX512 only, and this one has none. Use --mixed_precision no, or "
                "--backend cpu, which computes bf16 in float32."
            )

    def prepare(self, model: Model) -> None:
        """IPEX's convolutions and linear layers with packed weights, in UNet and VAE."""
        for part in (model.unet, model.vae):
            part.to(memory_format=torch.channels_last)
            training = part.training  # gradient checkpointing asks for it; in training mode IPEX wants an optimizer
            # Without auto_kernel_selection float32 linear layers go to an MKL kernel that has no backward pass: the
            # text would get no gradient, and PyTorch would only warn.
            self._ipex.optimize(part.eval(), dtype=self.dtype, inplace=True, auto_kernel_selection=True)
            part.train(training)
        if self.engine != "off":
            self._attention = choices_for(model.unet, self._folder)
            self.choices = self._attention.made
            replace_attention(model.unet, self._attention.attend)
        matrices_to(model.text_encoder, self.dtype)

    def start_anew(self, model: Model) -> None:
        """Attention is chosen for the shapes that come first; ipex.optimize has packed the layers before."""
        if self._attention is not None:
            self._attention.forget()

    def prepare_training(self, unet: UNet2DConditionModel) -> None:
        """Raises: UsageError: ipex.optimize is for frozen models here."""
        raise UsageError("--backend ipex is for frozen models; use --backend cpu to train the UNet.")

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 autocast, or nothing in float32."""
        return autocast_to(self.dtype, self.device)

    def describe(self) -> str:
        """For instance: ipex (IPEX 2.8.0+cpu, PyTorch 2.8.0, AVX512, engine's attention), bf16, 2 threads."""
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        capability = torch.backends.cpu.get_cpu_capability()
        attention = "stock" if self.engine == "off" else "engine's"
        engine = f"IPEX {self._ipex.__version__}, PyTorch {torch.__version__}, {capability}, {attention} attention"
        return f"ipex ({engine}), {precision}, {torch.get_num_threads()} threads"

    def advice(self) -> str | None:
        """About emulated bf16."""
        return about_emulation(self.dtype, packed=False)


def _load() -> Any:
    """Import IPEX without its chatter.

    Raises:
        UsageError: it is installed but cannot be loaded.
    """
    logging.getLogger("IPEX").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    # It replaces these two without an autograd kernel of its own; their gradients come out right nevertheless (tested).
    for kernel in ("group_norm", "layer_norm"):
        warnings.filterwarnings("ignore", f"aten::{kernel}: an autograd kernel was not registered", UserWarning)
    try:
        with _standard_error_kept() as said:
            import intel_extension_for_pytorch
    except (Exception, SystemExit) as error:
        reason = (str(error).strip() or said() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"--backend ipex cannot be used here: IPEX is installed but cannot be loaded ({reason}). {INSTALL}; "
            "--backend cpu does without."
        ) from error
    return intel_extension_for_pytorch


@contextmanager
def _standard_error_kept() -> Iterator[Any]:
    """Hold back what C++ writes to standard error: seven lines about replaced kernels at every import of IPEX."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            return file.read().decode(errors="replace").strip()

        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)
