"""Which weights a UNet's training starts from: the model's, random ones, a checkpoint's, another UNet's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from icom.config.finetune import FinetuneConfig
from icom.config.loading import read_yaml
from icom.errors import IcomError, UsageError
from icom.methods.text_encoder import split
from icom.models import loading
from icom.models.parts import TEXT_ENCODER, UNET, VAE
from icom.training.checkpoint import load_checkpoint


def first_unet(config: FinetuneConfig, model: loading.ModelSource) -> Any:
    """The UNet as the training begins, float32, on the CPU.

    Raises:
        UsageError: --from_scratch is no configuration of a UNet, or not for this VAE and text encoder.
        IcomError: weights are missing, damaged, or another UNet's.
    """
    if config.from_scratch is None:
        unet = loading.load_parts(model, torch.float32, (UNET,))[UNET.name]
    else:
        unet = _from_scratch(config, model)
    if config.weights_from:
        unet.load_state_dict(weights_in(Path(config.weights_from), unet, mean=config.use_ema))
    return unet


def _from_scratch(config: FinetuneConfig, model: loading.ModelSource) -> Any:
    loading.quiet_libraries()
    kind = UNET.load_class()
    if config.from_scratch == "model":
        values = loading.configuration(model, UNET)
    else:
        from omegaconf import OmegaConf

        assert config.from_scratch is not None
        loaded = OmegaConf.to_container(OmegaConf.create(read_yaml(config.from_scratch)), resolve=True)
        assert isinstance(loaded, dict)
        values = {str(name): value for name, value in loaded.items()}
        known = inspect.signature(kind.__init__).parameters
        if strange := sorted(name for name in values if name not in known and not name.startswith("_")):
            raise UsageError(
                f"{config.from_scratch} has {', '.join(strange)}, which UNet2DConditionModel does not know."
            )
    assert config.seed is not None
    torch.manual_seed(config.seed)
    try:
        unet = kind.from_config(values)
    except (
        Exception
    ) as error:  # diffusers raises ValueError, TypeError, IndexError … for values that do not go together
        raise UsageError(f"--from_scratch {config.from_scratch} makes no UNet: {error}") from error
    channels, width = (
        loading.configuration(model, VAE)["latent_channels"],
        loading.configuration(model, TEXT_ENCODER)["hidden_size"],
    )
    for name, needed, why in (
        ("in_channels", channels, "the VAE's latents have so many channels"),
        ("out_channels", channels, "the VAE's latents have so many channels"),
        ("cross_attention_dim", width, "the text encoder's states are so wide"),
    ):
        if unet.config[name] != needed:
            raise UsageError(
                f"--from_scratch {config.from_scratch}: {name} is {unet.config[name]} and has to be {needed} with "
                f"{model.name} ({why})."
            )
    return unet


def weights_in(folder: Path, unet: Any, *, mean: bool) -> dict[str, torch.Tensor]:
    """The UNet's weights in a checkpoint of icom's, or in a UNet's folder of diffusers' layout.

    Args:
        folder: `checkpoint-N`, or one with diffusion_pytorch_model.safetensors, in it or in `unet/`.
        unet: whose names and shapes they have to have.
        mean: take the checkpoint's mean of the weights, where it has one.

    Returns:
        Name -> float32 tensor.

    Raises:
        IcomError: there are none, they are damaged, or another UNet's.
    """
    folder = folder.expanduser()
    name = f"{UNET.weights}.safetensors"
    if (folder / "state.json").is_file():
        state = load_checkpoint(folder).state
        weights, text_encoder = split(state.mean if mean and state.mean else state.parameters)
        if text_encoder:
            raise IcomError(
                f"{folder} holds a text encoder that was trained together with its UNet. Start from the pipeline of "
                "that run in place of the model (--pretrained_model_name_or_path OUTPUT/current_pipeline)."
            )
    else:
        file = next((path for path in (folder / name, folder / UNET.name / name) if path.is_file()), None)
        if file is None:
            raise IcomError(f"No weights of a UNet in {folder}: neither a checkpoint of icom's nor {name} is there.")
        try:
            weights = load_file(file)
        except (OSError, SafetensorError) as error:
            raise IcomError(f"{file} is damaged ({error}). Fetch it again.") from error
    wanted = {name: tensor.shape for name, tensor in unet.named_parameters()}
    wrong = sorted(
        name
        for name in wanted.keys() | weights.keys()
        if name not in weights or wanted.get(name) != weights[name].shape
    )
    if wrong:
        raise IcomError(
            f"The weights in {folder} are of another UNet: {len(wrong)} are missing, too many or of another shape "
            f"({wrong[0]}{', …' if wrong[1:] else ''})."
        )
    return {name: tensor.float() for name, tensor in weights.items()}
