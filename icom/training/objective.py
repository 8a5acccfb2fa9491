"""The diffusion loss, and the noise schedule and timesteps that it is taken at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from icom.data.sampling import TimestepSampling
from icom.errors import IcomError, UsageError

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, UNet2DConditionModel

    from icom.config.objective import ObjectiveOptions
    from icom.models.parts import Conditioning


def diffusion_loss(
    unet: UNet2DConditionModel,
    noise_scheduler: DDPMScheduler,
    latents: torch.Tensor,
    noise: torch.Tensor,
    timesteps: torch.Tensor,
    conditioning: Conditioning,
    snr_gamma: float | None = None,
    added_noise: torch.Tensor | None = None,
    pixel_weights: torch.Tensor | None = None,
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
        added_noise: what the latents are noised with, where that is not the noise to predict (input perturbation: Ning
            et al. 2023, arXiv:2301.11706).
        pixel_weights: what each squared error counts, float32 (batch, 1, height, width). The mean is over all elements,
            whatever they count, as in kohya's sd-scripts and OneTrainer: an object that fills a tenth of its picture
            gives a tenth of the gradient, and each of its pixels as much as those of one that fills it.

    Returns:
        float32 scalar: the mean over batch and elements.

    Raises:
        IcomError: a prediction type that no Stable Diffusion 1.x or 2.x has.
    """
    noisy = noise_scheduler.add_noise(latents, noise if added_noise is None else added_noise, timesteps)
    added = {"added_cond_kwargs": conditioning.added} if conditioning.added else {}
    prediction = unet(noisy, timesteps, conditioning.hidden_states, **added).sample
    kind = noise_scheduler.config["prediction_type"]
    if kind == "epsilon":
        target = noise
    elif kind == "v_prediction":
        target = noise_scheduler.get_velocity(latents, noise, timesteps)
    else:
        raise IcomError(f"The model's scheduler predicts {kind!r}; icom knows epsilon and v_prediction.")
    if snr_gamma is None and pixel_weights is None:
        return F.mse_loss(prediction.float(), target.float())
    squares = F.mse_loss(prediction.float(), target.float(), reduction="none")
    errors = (squares if pixel_weights is None else squares * pixel_weights).mean(dim=(1, 2, 3))
    if snr_gamma is None:
        return errors.mean()
    ratio = signal_to_noise(noise_scheduler, timesteps)
    # For noise it is min(ratio, gamma) / ratio, which is 1 where nothing is left of the picture.
    weights = (snr_gamma / ratio).clamp(max=1) if kind == "epsilon" else ratio.clamp(max=snr_gamma) / (ratio + 1)
    return (weights * errors).mean()


def signal_to_noise(noise_scheduler: DDPMScheduler, timesteps: torch.Tensor) -> torch.Tensor:
    """float32 (batch,): what of the picture is left at a timestep over the noise, as powers; 0 at zero-terminal SNR."""
    left: torch.Tensor = noise_scheduler.alphas_cumprod.to(timesteps.device)[timesteps].float()
    return left / (1 - left)


def changed_schedule(noise_scheduler: DDPMScheduler, **values: Any) -> DDPMScheduler:
    """The same noise schedule with other values in its configuration."""
    changed = type(noise_scheduler).from_config(noise_scheduler.config, **values)
    assert isinstance(changed, type(noise_scheduler))
    return changed


def with_zero_snr(noise_scheduler: DDPMScheduler, advice: str) -> DDPMScheduler:
    """The noise schedule with its last step noise alone (Lin et al. 2024, arXiv:2305.08891, algorithm 1).

    Args:
        noise_scheduler: the model's.
        advice: what to do where it cannot be.

    Raises:
        IcomError: the UNet predicts noise. Where nothing is left of the picture that is the input itself, and nothing
            is learned from it.
    """
    if noise_scheduler.config["prediction_type"] != "v_prediction":
        raise IcomError(
            "--rescale_betas_zero_snr needs a UNet that predicts velocity, and this one predicts noise: " + advice + "."
        )
    return changed_schedule(noise_scheduler, rescale_betas_zero_snr=True, timestep_spacing="trailing")


def sampling_of(config: ObjectiveOptions, timesteps: int) -> TimestepSampling:
    """How the options draw timesteps.

    Args:
        config: checked.
        timesteps: of the model's noise schedule.

    Raises:
        UsageError: it has fewer than the options say.
    """
    for name, most in (("min_timestep", timesteps - 1), ("max_timestep", timesteps)):
        given = getattr(config, name)
        if given is not None and given > most:
            raise UsageError(f"--{name} can be {most} at most, not {given}: the model has {timesteps} timesteps.")
    wide = (config.logit_mean, config.logit_std) if config.timestep_sampling == "logit_normal" else None
    return TimestepSampling(config.min_timestep, config.max_timestep, wide)
