"""One optimizer step: the loss of a batch of the stream's samples, gradients summed over all processes, the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from icom.data.sampling import gaussian_noise
from icom.training.objective import diffusion_loss

if TYPE_CHECKING:
    from icom.training.run import Run


def optimizer_step(run: Run, next_sample: int, stop_signal: int = 0) -> tuple[float, int]:
    """One optimizer step.

    Args:
        run: parameters, optimizer and scheduler advance.
        next_sample: index of the step's first sample.
        stop_signal: number of the signal that this process got, or 0.

    Returns:
        (mean loss over all processes, highest signal that any process got). With a loss or gradient that is not
        finite the optimizer did not step; the loss is then not finite either, nor when a parameter has become so.
    """
    config, group = run.config, run.group
    parameters = list(run.method.parameters.values())
    total = 0.0
    for micro in range(config.gradient_accumulation_steps):
        offset = (micro * group.size + group.rank) * config.train_batch_size
        loss = batch_loss(run, range(next_sample + offset, next_sample + offset + config.train_batch_size))
        (loss / config.gradient_accumulation_steps).backward()
        total += loss.item() / config.gradient_accumulation_steps
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    if group.size > 1:
        signals = [stop_signal if rank == group.rank else 0 for rank in range(group.size)]
        *_, numbers = agreed = message(gradients, total, signals)
        group.sum(agreed)
        for gradient in gradients:
            gradient.div_(group.size)
        sums = numbers.tolist()
        total, stop_signal = sums[0] / group.size, int(max(sums[1:]))
    if not _all_finite(gradients):
        total = math.nan
    if math.isfinite(total):
        run.optimizer.step()
        run.lr_scheduler.step()
        if not _all_finite(parameters):
            total = math.nan
    run.optimizer.zero_grad(set_to_none=True)
    return total, stop_signal


def message(gradients: Sequence[torch.Tensor], loss: float, signals: list[int]) -> list[torch.Tensor]:
    """Everything that processes have to agree on in an optimizer step, to be summed in place.

    Returns:
        The gradients, and one float32 tensor of loss and signals.
    """
    return [*gradients, torch.tensor([loss, *signals], device=gradients[0].device)]


def batch_loss(run: Run, indices: range) -> torch.Tensor:
    """The loss of a batch of the stream's samples."""
    backend, model = run.backend, run.model
    samples = [run.stream[index] for index in indices]
    latents, noises = [], []
    for sample in samples:
        vae_noise, noise = gaussian_noise(sample, tuple(run.moments.mean.shape[2:]))
        latents.append(run.moments.sample(sample.picture, flip=sample.flip, noise=vae_noise))
        noises.append(noise)
    vae_config: dict[str, Any] = dict(model.vae.config)
    scaled = (torch.stack(latents) - (vae_config.get("shift_factor") or 0.0)) * vae_config["scaling_factor"]
    with backend.autocast():
        conditioning = run.method.condition(model, samples)
    return diffusion_loss(
        model.unet,
        model.noise_scheduler,
        scaled.to(backend.device, backend.dtype),
        torch.stack(noises).to(backend.device, backend.dtype),
        torch.tensor([sample.timestep for sample in samples], device=backend.device),
        conditioning.to(backend.dtype),
    )


def _all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
