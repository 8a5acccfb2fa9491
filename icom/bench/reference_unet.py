"""The field's usual step of training the whole UNet, as the truth to test against and the baseline to measure against.

What diffusers' `examples/text_to_image/train_text_to_image.py` does, written anew from its behaviour: pictures are read
when they are needed; VAE and text encoder, in the precision of the computation, encode them at every step; the float32
UNet has diffusers' own attention and layers, under Accelerate's autocast; the gradient is clipped to 1; torch's AdamW
as it comes. What a sample is (crop, caption, timestep, noise) is icom's, so that both do the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from icom.methods.unet import Prepared
from icom.models import loading
from icom.models.parts import PARTS, UNET

if TYPE_CHECKING:
    from accelerate import Accelerator

    from icom.models.loading import ModelSource


class ReferenceFinetuner:
    """Training of the UNet with everything in every step.

    Attributes:
        accelerator: of the precision.
        unet: what is trained, as Accelerate wrapped it.
        noise_scheduler: the model's.
    """

    def __init__(self, model: ModelSource, accelerator: Accelerator, learning_rate: float) -> None:
        """Args: where the model comes from; device and precision; a constant rate."""
        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        self.accelerator, self.tokenizer = accelerator, loading.load_tokenizer(model)
        self.noise_scheduler = loading.load_scheduler(model)
        parts = loading.load_parts(model, torch.float32, PARTS, self.tokenizer)
        unet: Any = parts.pop(UNET.name)
        self.text_encoder, self.vae = (parts[name].to(accelerator.device, dtype) for name in ("text_encoder", "vae"))
        unet.requires_grad_(True)
        unet.train()
        optimizer = torch.optim.AdamW(unet.parameters(), lr=learning_rate, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        self.unet, self.optimizer, self.schedule = accelerator.prepare(unet, optimizer, schedule)
        limit = self.text_encoder.config.max_position_embeddings
        self.tokenizer.model_max_length = min(self.tokenizer.model_max_length, limit)

    def step(self, batch: Sequence[Prepared]) -> float:
        """One optimizer step on pictures with captions; returns the loss."""
        accelerator, device, dtype = self.accelerator, self.accelerator.device, self.vae.dtype
        pixels = torch.stack([one.pixels for one in batch if one.pixels is not None])
        scaling = self.vae.config.scaling_factor
        with accelerator.accumulate(self.unet):
            with torch.no_grad():
                posterior = self.vae.encode(pixels.to(device, dtype)).latent_dist
            shape = tuple(posterior.mean.shape[1:])
            draws = [torch.randn(2, *shape, generator=_generator(one.noise_seed)) for one in batch]
            of_vae, noise = (part.to(device, dtype) for part in torch.stack(draws).unbind(1))
            latents = (posterior.mean + posterior.std * of_vae) * scaling
            timesteps = torch.tensor([one.timestep for one in batch], device=device)
            noisy = self.noise_scheduler.add_noise(latents, noise, timesteps)
            ids = self.tokenizer(
                [one.caption for one in batch],
                padding="max_length",
                truncation=True,
                max_length=self.tokenizer.model_max_length,
                return_tensors="pt",
            ).input_ids
            with torch.no_grad():
                states = self.text_encoder(ids.to(device))[0]
            velocity = self.noise_scheduler.config["prediction_type"] == "v_prediction"
            target = self.noise_scheduler.get_velocity(latents, noise, timesteps) if velocity else noise
            predicted = self.unet(noisy, timesteps, states, return_dict=False)[0]
            loss = F.mse_loss(predicted.float(), target.float())
            mean = float(accelerator.gather(loss.detach().repeat(len(batch))).mean())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(self.unet.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return mean


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
