"""One optimizer step: the loss of a batch of the stream's samples, gradients summed over all processes, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from icom.data.sampling import gaussian_noise
from icom.training.loop import Advance
from icom.training.objective import diffusion_loss

if TYPE_CHECKING:
    from icom.backends import Backend
    from icom.data.sampling import Sample
    from icom.training.run import Run


def optimizer_step(run: Run, next_sample: int, stop_signal: int = 0) -> Callable[[], Advance]:
    """One optimizer step. On an asynchronous device it is begun, and nothing here waits for anything of it.

    With a loss or gradient that is not finite the optimizer does not step, but for an asynchronous device, where that
    is not known in time: what it holds then is good for nothing.

    Args:
        run: parameters, optimizer and scheduler advance.
        next_sample: index of the step's first sample.
        stop_signal: number of the signal that this process got, or 0.

    Returns:
        What waits until the step is done, and says what it came to: the mean loss over all processes, which is not
        finite where a loss, gradient or parameter is not, and the highest signal that any process got.
    """
    config, group, backend = run.config, run.group, run.backend
    parameters = list(run.method.parameters.values())
    total = torch.zeros((), dtype=torch.float64, device=backend.device)
    for micro in range(config.gradient_accumulation_steps):
        offset = (micro * group.size + group.rank) * config.train_batch_size
        indices = range(next_sample + offset, next_sample + offset + config.train_batch_size)
        for source in (run, run.prior):
            if source is not None:
                total += _backward(run, source, indices).double() / config.gradient_accumulation_steps
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    signal = torch.full((), float(stop_signal), dtype=torch.float64, device=backend.device)
    if group.size > 1:
        signals = torch.tensor([float(stop_signal) if rank == group.rank else 0.0 for rank in range(group.size)])
        *_, numbers = agreed = message(gradients, total, backend.to_device(signals))
        group.sum(agreed)
        for gradient in gradients:
            gradient.div_(group.size)
        total, signal = numbers[0].double() / group.size, numbers[1:].max().double()
    total = total.masked_fill(~_all_finite(gradients), math.nan)
    if backend.asynchronous or math.isfinite(total.item()):
        run.rows.step()
        run.lr_scheduler.step()
        total = total.masked_fill(total.isfinite() & ~_all_finite(parameters), math.nan)
    run.optimizer.zero_grad(set_to_none=True)
    known = run.rows.figures
    figures = [value for value in known.values() if isinstance(value, torch.Tensor)]
    read = backend.read_later(torch.stack([total, signal, *(figure.double() for figure in figures)]))
    if backend.asynchronous:  # a process that is gone leaves the others' sum undone
        read = partial(group.attend, read)
    return partial(_advance, read, dict(known))


def _advance(read: Callable[[], list[float]], known: dict[str, torch.Tensor | float]) -> Advance:
    loss, signal, *values = read()
    unread = iter(values)
    figures = {name: next(unread) if isinstance(value, torch.Tensor) else value for name, value in known.items()}
    return Advance(loss, int(signal), figures, "".join(f", {name} {value:.2e}" for name, value in figures.items()))


def message(gradients: Sequence[torch.Tensor], loss: torch.Tensor, signals: torch.Tensor) -> list[torch.Tensor]:
    """Everything that processes have to agree on in an optimizer step, to be summed in place.

    Args:
        gradients: of this process.
        loss: its mean loss, a scalar.
        signals: float32, one for each process: what this one got in its place, and zeros.

    Returns:
        The gradients, and one float32 tensor of loss and signals.
    """
    return [*gradients, torch.cat([loss.float().reshape(1), signals])]


def _backward(run: Run, source: Run, indices: range) -> torch.Tensor:
    """Add the gradient of a term of a batch's loss to what is there.

    Args:
        run: that learns.
        source: what the samples are of: the run itself, or its prior preservation.
        indices: of the samples.

    Returns:
        The term.
    """
    accumulated, graphs = run.config.gradient_accumulation_steps, run.graphs
    parameters = list(run.method.parameters.values())

    def term(batch: Batch) -> torch.Tensor:
        loss = batch.loss(source)
        return loss if source is run else run.config.prior_loss_weight * loss

    def with_gradients(batch: Batch) -> list[torch.Tensor]:
        loss = term(batch)
        return [loss.detach(), *torch.autograd.grad(loss / accumulated, parameters)]

    batch = batch_of(source, [source.stream[index] for index in indices]).to(run.backend)
    if graphs is None:
        loss = term(batch)
        (loss / accumulated).backward()
        return loss.detach()
    loss, *gradients = graphs.results(source is run, batch, with_gradients)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
    return loss


def batch_loss(run: Run, indices: range) -> torch.Tensor:
    """The loss of a batch of the stream's samples."""
    return loss_of(run, [run.stream[index] for index in indices])


def loss_of(run: Run, samples: Sequence[Sample]) -> torch.Tensor:
    """The loss of a batch of samples."""
    return batch_of(run, samples).to(run.backend).loss(run)


@dataclass(frozen=True)
class Batch:
    """The numbers of some samples: all that their loss depends on beside the model.

    Attributes:
        latents: (batch, channels, height, width), scaled, in the backend's dtype.
        noise: like latents.
        timesteps: int64 (batch,).
        ids: of the captions' tokens, int64 (batch, context length).
        pixel_weights: float32 (batch, 1, height, width), where pixels do not all count the same.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    timesteps: torch.Tensor
    ids: torch.Tensor
    pixel_weights: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        """All that there are."""
        weights = [] if self.pixel_weights is None else [self.pixel_weights]
        return [self.latents, self.noise, self.timesteps, self.ids, *weights]

    def to(self, backend: Backend) -> Batch:
        """On the backend's device."""
        latents, noise, timesteps, ids, *weights = map(backend.to_device, self.tensors())
        return Batch(latents, noise, timesteps, ids, weights[0] if weights else None)

    def loss(self, run: Run) -> torch.Tensor:
        """A float32 scalar; its numbers are on the device."""
        model = run.model
        with run.backend.autocast():
            conditioning = run.method.encode(model, self.ids)
        return diffusion_loss(
            model.unet,
            model.noise_scheduler,
            self.latents,
            self.noise,
            self.timesteps,
            conditioning.to(run.backend.dtype),
            run.config.snr_gamma,
            pixel_weights=self.pixel_weights,
        )


def batch_of(run: Run, samples: Sequence[Sample]) -> Batch:
    """The numbers of samples, in the CPU's memory."""
    latents, noises = [], []
    for sample in samples:
        vae_noise, noise = gaussian_noise(sample, run.moments.shape(sample.picture), run.config.noise_offset)
        latents.append(run.moments.sample(sample, vae_noise))
        noises.append(noise)
    vae_config: dict[str, Any] = dict(run.model.vae.config)
    scaled = (torch.stack(latents) - (vae_config.get("shift_factor") or 0.0)) * vae_config["scaling_factor"]
    return Batch(
        scaled.to(run.backend.dtype),
        torch.stack(noises).to(run.backend.dtype),
        torch.tensor([sample.timestep for sample in samples]),
        run.method.ids(run.model.tokenizer, samples),
        run.moments.weights_of(samples),
    )


def _all_finite(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A scalar on their device."""
    return torch.stack([tensor.isfinite().all() for tensor in tensors]).all()
