"""A model's weights under the names of the original Stable Diffusion code, as single-file checkpoints have them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def original_layout(
    text_encoder: torch.nn.Module, vae: torch.nn.Module, unet: torch.nn.Module
) -> dict[str, torch.Tensor]:
    """All weights by their original names.

    Args:
        text_encoder: CLIP as in Stable Diffusion 1.x.
        vae: AutoencoderKL.
        unet: with the same number of layers in every block, attention in all of them.
    """
    import torch

    weights = {"cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None]}
    for name, tensor in text_encoder.state_dict().items():
        if not name.endswith("position_ids"):
            weights[f"cond_stage_model.transformer.text_model.{name.removeprefix('text_model.')}"] = tensor
    for name, tensor in vae.state_dict().items():
        weights[f"first_stage_model.{_of_vae(name)}"] = (
            tensor[:, :, None, None] if "attentions" in name and tensor.dim() == 2 else tensor
        )
    layers = len({name.split(".")[3] for name in unet.state_dict() if name.startswith("down_blocks.0.resnets.")})
    for name, tensor in unet.state_dict().items():
        weights[f"model.diffusion_model.{_of_unet(name.split('.'), layers)}"] = tensor
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def _of_unet(words: Sequence[str], layers: int) -> str:
    name = ".".join(words)
    for start, original in _UNET_ENDS.items():
        if name.startswith(f"{start}."):
            return original + name.removeprefix(start)
    if words[0] == "mid_block":
        place = {"resnets.0": 0, "attentions.0": 1, "resnets.1": 2}[".".join(words[1:3])]
        return f"middle_block.{place}.{_inner(words[1], words[3:])}"
    block, kind, number, rest = int(words[1]), words[2], int(words[3]), words[4:]
    if words[0] == "down_blocks":
        first = 1 + block * (layers + 1)
        if kind == "downsamplers":
            return f"input_blocks.{first + layers}.0.op.{rest[-1]}"
        return f"input_blocks.{first + number}.{int(kind == 'attentions')}.{_inner(kind, rest)}"
    first = block * (layers + 1)
    if kind == "upsamplers":
        return f"output_blocks.{first + layers}.2.conv.{rest[-1]}"
    return f"output_blocks.{first + number}.{int(kind == 'attentions')}.{_inner(kind, rest)}"


def _inner(kind: str, words: Sequence[str]) -> str:
    return ".".join([_RESNET[words[0]], *words[1:]] if kind == "resnets" else words)


def _of_vae(name: str) -> str:
    name = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", name)
    name = re.sub(r"up_blocks\.(\d)\.resnets", lambda match: f"up.{3 - int(match[1])}.block", name)
    name = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda match: f"up.{3 - int(match[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    if "mid_block.attentions.0." in name:
        start, _, rest = name.partition("mid_block.attentions.0.")
        inner, _, last = rest.rpartition(".")
        return f"{start}mid.attn_1.{_ATTENTION[inner]}.{last}"
    return name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
