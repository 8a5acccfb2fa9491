"""The numbers in a model's configuration that decide memory, time or sense, checked before anything is built.

Models come from strangers. What is not listed here ends in the loaders' own errors, which cost nothing: they build
modules without storage, and compare them with the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icom.errors import IcomError
from icom.models.kinds import read_json

TEXT_ENCODER, UNET, VAE = "text_encoder/config.json", "unet/config.json", "vae/config.json"
SCHEDULER, TOKENIZER = "scheduler/scheduler_config.json", "tokenizer_config.json"


@dataclass(frozen=True)
class Check:
    """What a value has to be, in words and as a test."""

    what: str
    holds: Callable[[Any], bool]

    def __or__(self, other: Check) -> Check:
        return Check(f"{self.what} or {other.what}", lambda value: self.holds(value) or other.holds(value))


def whole(low: int, high: int) -> Check:
    """A whole number in [low, high]; true and false are none."""
    return Check(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A finite number in [low, high], or in (low, high]."""
    return Check(
        f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}",
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (low < value if above else low <= value)
            and value <= high
        ),
    )


def list_of(check: Check, longest: int, shortest: int = 1) -> Check:
    """A list of so many such values."""
    return Check(
        f"a list of {shortest} to {longest}, each {check.what}",
        lambda value: isinstance(value, list) and shortest <= len(value) <= longest and all(map(check.holds, value)),
    )


def one_of(*values: str) -> Check:
    """One of these words."""
    return Check(" or ".join(values), lambda value: isinstance(value, str) and value in values)


NOTHING = Check("null", lambda value: value is None)
_BLOCKS = 8
_WIDTH = whole(1, 16_384)
_WIDTHS = list_of(_WIDTH, _BLOCKS)
_FEW = whole(1, 32)
_FEW_EACH = _FEW | list_of(_FEW, _BLOCKS)
_SIDE = whole(1, 8192)
_POSITIVE = number(0, 1e6, above=True)
_TYPES = list_of(Check("text", lambda value: isinstance(value, str)), _BLOCKS)

CHECKS: tuple[tuple[str, str, Check], ...] = (
    (TEXT_ENCODER, "vocab_size", whole(3, 1_000_000)),
    (TEXT_ENCODER, "hidden_size", _WIDTH),
    (TEXT_ENCODER, "intermediate_size", whole(1, 65_536)),
    (TEXT_ENCODER, "projection_dim", _WIDTH | NOTHING),
    (TEXT_ENCODER, "num_hidden_layers", whole(1, 128)),
    (TEXT_ENCODER, "num_attention_heads", whole(1, 256)),
    (TEXT_ENCODER, "max_position_embeddings", whole(8, 4096)),
    (TEXT_ENCODER, "layer_norm_eps", _POSITIVE),
    (TEXT_ENCODER, "eos_token_id", whole(0, 1_000_000) | NOTHING),
    (TEXT_ENCODER, "pad_token_id", whole(-1, 1_000_000) | NOTHING),
    (UNET, "sample_size", whole(1, 1024) | list_of(whole(1, 1024), 2, 2) | NOTHING),
    (UNET, "in_channels", whole(1, 64)),
    (UNET, "out_channels", whole(1, 64)),
    (UNET, "block_out_channels", _WIDTHS),
    (UNET, "down_block_types", _TYPES),
    (UNET, "up_block_types", _TYPES),
    (UNET, "layers_per_block", _FEW_EACH),
    (UNET, "transformer_layers_per_block", _FEW_EACH),
    (UNET, "reverse_transformer_layers_per_block", _FEW_EACH | NOTHING),
    (UNET, "cross_attention_dim", _WIDTH | _WIDTHS),
    (UNET, "attention_head_dim", _WIDTH | _WIDTHS),
    (UNET, "num_attention_heads", _WIDTH | _WIDTHS | NOTHING),
    (UNET, "norm_num_groups", whole(1, 1024)),
    (UNET, "norm_eps", _POSITIVE),
    (UNET, "conv_in_kernel", whole(1, 15)),
    (UNET, "conv_out_kernel", whole(1, 15)),
    (UNET, "downsample_padding", whole(0, 7)),
    (UNET, "time_embedding_dim", _WIDTH | NOTHING),
    (UNET, "time_cond_proj_dim", _WIDTH | NOTHING),
    (UNET, "freq_shift", number(-1000, 1000)),
    (UNET, "mid_block_scale_factor", _POSITIVE),
    (UNET, "resnet_out_scale_factor", _POSITIVE),
    (VAE, "sample_size", _SIDE | list_of(_SIDE, 2, 2) | NOTHING),
    (VAE, "in_channels", whole(3, 3)),
    (VAE, "out_channels", whole(3, 3)),
    (VAE, "latent_channels", whole(1, 64)),
    (VAE, "block_out_channels", _WIDTHS),
    (VAE, "down_block_types", _TYPES),
    (VAE, "up_block_types", _TYPES),
    (VAE, "layers_per_block", _FEW),
    (VAE, "norm_num_groups", whole(1, 1024)),
    (VAE, "scaling_factor", _POSITIVE),
    (VAE, "shift_factor", number(-1e6, 1e6) | NOTHING),
    (SCHEDULER, "_class_name", Check("text", lambda value: isinstance(value, str))),
    (SCHEDULER, "num_train_timesteps", whole(1, 100_000)),
    (SCHEDULER, "beta_start", number(0, 1)),
    (SCHEDULER, "beta_end", number(0, 1)),
    (SCHEDULER, "trained_betas", list_of(number(0, 1), 100_000) | NOTHING),
    (SCHEDULER, "prediction_type", one_of("epsilon", "v_prediction")),
    (SCHEDULER, "steps_offset", whole(0, 1000)),
    (SCHEDULER, "timestep_spacing", one_of("leading", "linspace", "trailing")),
    (SCHEDULER, "clip_sample_range", _POSITIVE),
    (SCHEDULER, "sample_max_value", _POSITIVE),
    (SCHEDULER, "dynamic_thresholding_ratio", number(0, 1)),
    # 10^30 and the like stand for "no limit".
    (TOKENIZER, "model_max_length", number(8, 1e31)),
    (TOKENIZER, "max_length", number(8, 1e31) | NOTHING),
)
"""(file, key, what its value has to be). A key that is absent has the library's default."""

AGREEMENTS = (
    ((UNET, "cross_attention_dim"), (TEXT_ENCODER, "hidden_size")),
    ((UNET, "in_channels"), (VAE, "latent_channels")),
    ((UNET, "out_channels"), (VAE, "latent_channels")),
)
"""Pairs of numbers that have to be equal, where both are there."""

_TABLE, _POSITIONS = "embeddings.token_embedding.weight", "embeddings.position_embedding.weight"
_KEYS = "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight"
SHAPES = (
    ("text_encoder", _TABLE, 0, "vocab_size"),
    ("text_encoder", _TABLE, 1, "hidden_size"),
    ("text_encoder", _POSITIONS, 0, "max_position_embeddings"),
    ("text_encoder", "encoder.layers.0.mlp.fc1.weight", 0, "intermediate_size"),
    ("unet", "conv_in.weight", 0, "block_out_channels"),
    ("unet", "conv_in.weight", 1, "in_channels"),
    ("unet", "conv_out.weight", 0, "out_channels"),
    ("unet", "time_embedding.linear_2.weight", 0, "time_embedding_dim"),
    ("unet", _KEYS, 1, "cross_attention_dim"),
    ("vae", "encoder.conv_in.weight", 0, "block_out_channels"),
    ("vae", "decoder.conv_in.weight", 1, "latent_channels"),
)
"""(part, weight, dimension, key of config.json): of a list, its first number."""

COUNTS = (
    ("text_encoder", r"encoder\.layers\.(\d+)\.", "num_hidden_layers"),
    ("unet", r"down_blocks\.0\.resnets\.(\d+)\.", "layers_per_block"),
    ("unet", r"down_blocks\.0\.attentions\.0\.transformer_blocks\.(\d+)\.", "transformer_layers_per_block"),
    ("vae", r"encoder\.down_blocks\.0\.resnets\.(\d+)\.", "layers_per_block"),
)
"""(part, beginning of names, key of config.json): so many different numbers as the key says, of a list its first."""


def check_configs(folder: Path, files: Sequence[str] = (TEXT_ENCODER, UNET, VAE, SCHEDULER)) -> None:
    """Check the numbers of these files, where they exist.

    Raises:
        IcomError: names every value that is no good, and what it has to be.
    """
    documents = {name: read_json(folder, name) for name in files if (folder / name).is_file()}
    wrong = [
        f"{key} in {name} is {_short(documents[name][key])}, not {check.what}"
        for name, key, check in CHECKS
        if key in documents.get(name, {}) and not check.holds(documents[name][key])
    ]
    for (name, key), (there, other) in () if wrong else AGREEMENTS:
        one, two = documents.get(name, {}).get(key), documents.get(there, {}).get(other)
        if one is not None and two is not None and {*_listed(one)} != {two}:
            wrong.append(f"{key} in {name} is {one} and {other} in {there} {two}")
    if wrong:
        raise IcomError(f"The model in {folder} cannot work: {'; '.join(wrong)}. Fetch it again, or take another.")


def check_weights(folder: Path, weights: Mapping[str, Sequence[Path]]) -> None:
    """Compare configurations with the shapes in the weights' headers; no weight is read.

    Args:
        folder: the model's.
        weights: part -> its safetensors files. One that cannot be read is left to the loaders, which say so.

    Raises:
        IcomError: a table or a number of layers is not the one of config.json.
    """
    for part, paths in weights.items():
        config = read_json(folder, f"{part}/config.json")
        found: dict[str, tuple[int, ...]] = {}
        for path in paths:
            found |= read_shapes(path) or {}
        shapes = {name.removeprefix("text_model."): shape for name, shape in found.items()}
        for _, weight, dimension, key in (row for row in SHAPES if row[0] == part):
            shape = shapes.get(weight)
            said = _listed(config.get(key))[0]
            if shape and said is not None and (len(shape) <= dimension or shape[dimension] != said):
                raise _misfit(folder, part, f"{weight} is {shape}, of another shape than {key} {said} says")
        for _, pattern, key in (row for row in COUNTS if row[0] == part):
            said = _listed(config.get(key))[0]
            count = len({match[1] for match in map(re.compile(pattern).match, shapes) if match})
            if said is not None and count not in (0, said):
                raise _misfit(folder, part, f"{count} layers, where {key} is {said}")


def read_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes of a safetensors file, from its header; None where it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


def _listed(value: Any) -> list[Any]:
    """A number, or a list of one per block, as a list."""
    return value if isinstance(value, list) else [value]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]} …"


def _misfit(folder: Path, part: str, what: str) -> IcomError:
    return IcomError(
        f"The weights of the {part} in {folder} do not fit its config.json: {what}. Fetch the model again."
    )
