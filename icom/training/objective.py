"""The diffusion loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from icom.errors import IcomError

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    from icom.models.parts import Conditioning


def diffusion_loss(
    unet: UNet2DConditionModel,
    noise_scheduler: DDPMScheduler,
    latents: torch.Tensor,
    noise: torch.Tensor,
    timesteps: torch.Tensor,
    conditioning: Conditioning,
    snr_gamma: float | None = None,
) -> torch.Tensor:
    """Mean squared error of the UNet's prediction on noised latents (Ho et al. 2020, eq. 14; v: Salimans & Ho 2022).

    What is predicted, noise or velocity, is what the scheduler's configuration says.

    Args:
        unet: predicts from (noisy latents, timesteps, conditioning).
        noise_scheduler: the model's noise schedule.
        latents: (batch, channels, height, width), scaled, in the UNet's dtype.
        noise: like latents, standard normal.
        timesteps: int64 of shape (batch,).
        conditioning: of the captions, in the UNet's dtype.
        snr_gamma: weigh each sample by min(SNR, this) over what the error's own weight is (Hang et al. 2023,
            arXiv:2303.09556, section 3.4): SNR for noise, SNR + 1 for velocity.

    Returns:
        float32 scalar: the mean over batch and elements.

    Raises:
        IcomError: a prediction type that no Stable Diffusion 1.x or 2.x has.
    """
    noisy = noise_scheduler.add_noise(latents, noise, timesteps)
    added = {"added_cond_kwargs": conditioning.added} if conditioning.added else {}
    prediction = unet(noisy, timesteps, conditioning.hidden_states, **added).sample
    kind = noise_scheduler.config["prediction_type"]
    if kind == "epsilon":
        target = noise
    elif kind == "v_prediction":
        target = noise_scheduler.get_velocity(latents, noise, timesteps)
    else:
        raise IcomError(f"The model's scheduler predicts {kind!r}; icom knows epsilon and v_prediction.")
    if snr_gamma is None:
        return F.mse_loss(prediction.float(), target.float())
    errors = F.mse_loss(prediction.float(), target.float(), reduction="none").mean(dim=(1, 2, 3))
    ratio = signal_to_noise(noise_scheduler, timesteps)
    weights = ratio.clamp(max=snr_gamma) / (ratio if kind == "epsilon" else ratio + 1)
    return (weights * errors).mean()


def signal_to_noise(noise_scheduler: DDPMScheduler, timesteps: torch.Tensor) -> torch.Tensor:
    """float32 (batch,): what of the picture is left at a timestep over the noise, as powers; 0 at zero-terminal SNR."""
    left: torch.Tensor = noise_scheduler.alphas_cumprod.to(timesteps.device)[timesteps].float()
    return left / (1 - left)
