"""The field's usual training step, as the truth to test against and the baseline to measure against.

What diffusers' `examples/textual_inversion/textual_inversion.py` does, written anew: the whole token table is
trained with AdamW, then every other row is put back, and the VAE encodes the pictures at every step. Tests hold
icom's rows to its rows; `icom bench --compare reference` measures both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from icom.config.words import placeholder_tokens
from icom.methods.embedding import initializer_ids
from icom.training.objective import diffusion_loss

if TYPE_CHECKING:
    from icom.config.train import TrainConfig
    from icom.models.loading import Model


class ReferenceTrainer:
    """Full-table training of a placeholder token.

    Attributes:
        tokenizer: knows the placeholder.
        token_ids: of the placeholder.
    """

    def __init__(self, model: Model, config: TrainConfig, autocast: AbstractContextManager[object]) -> None:
        """Args: a freshly loaded model; token, initializer, AdamW and accumulation settings; text encoder's context."""
        self.model, self.config, self.autocast = model, config, autocast
        self.tokenizer = model.tokenizer
        initial = initializer_ids(self.tokenizer, config.initializer_token, config.num_vectors)
        tokens = placeholder_tokens(config.placeholder_token, config.num_vectors)
        first = len(self.tokenizer)
        self.tokenizer.add_tokens(tokens)
        self.token_ids = list(range(first, first + len(tokens)))
        size = max(len(self.tokenizer), model.text_encoder.config.vocab_size)
        table = model.text_encoder.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():
            for position, token_id in enumerate(self.token_ids):
                table.weight[token_id] = table.weight[initial[position % len(initial)]].clone()
        model.text_encoder.requires_grad_(False)
        table.weight.requires_grad_(True)
        model.text_encoder.train()
        self.table = table
        self.original = table.weight.detach().clone()
        self.optimizer = torch.optim.AdamW(
            table.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.adam_weight_decay,
            eps=config.adam_epsilon,
        )
        self.batches_seen = 0

    @property
    def rows(self) -> torch.Tensor:
        """The placeholder's rows: (vectors, width)."""
        return self.table.weight[self.token_ids].detach()

    def encode(self, pictures: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Pixels (batch, 3, height, width) in [-1, 1] to scaled latents, with the posterior's noise given."""
        with torch.no_grad():
            posterior = self.model.vae.encode(pictures.to(self.model.vae.dtype)).latent_dist
        scaling: Any = self.model.vae.config["scaling_factor"]
        latents: torch.Tensor = (posterior.mean + posterior.std * noise.to(posterior.mean.dtype)) * scaling
        return latents

    def train_batch(
        self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor, ids: torch.Tensor
    ) -> float:
        """Forward and backward; every --gradient_accumulation_steps-th call steps the optimizer and restores the rows.

        Args:
            latents: (batch, channels, height, width), scaled.
            noise: like latents.
            timesteps: int64 (batch,).
            ids: int64 (batch, context length).

        Returns:
            The batch's loss.
        """
        dtype = self.model.unet.dtype
        with self.autocast:
            conditioning = self.model.encode(ids)
        loss = diffusion_loss(
            self.model.unet,
            self.model.noise_scheduler,
            latents.to(dtype),
            noise.to(dtype),
            timesteps,
            conditioning.to(dtype),
        )
        (loss / self.config.gradient_accumulation_steps).backward()
        self.batches_seen += 1
        if self.batches_seen % self.config.gradient_accumulation_steps == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        others = torch.ones(len(self.original), dtype=torch.bool)
        others[self.token_ids] = False
        with torch.no_grad():
            self.table.weight[others] = self.original[others]
        return float(loss.item())
