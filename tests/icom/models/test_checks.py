"""icom/models/checks.py: models from strangers end in a message, before anything is built.

Guards icom.models.checks.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from icom.models.checks import CHECKS, SCHEDULER, TEXT_ENCODER, UNET, VAE, check_configs
from icom.models.loading import BUNDLE
from tests.support.command import Run, assert_refused, peak_memory

TOKENIZER = "tokenizer/tokenizer_config.json"
HUGE = 10**6
HOSTILE: tuple[tuple[str, str, Any], ...] = (
    (TEXT_ENCODER, "vocab_size", 20 * HUGE),
    (TEXT_ENCODER, "vocab_size", 900_000),  # within bounds: the weights' header says otherwise
    (TEXT_ENCODER, "vocab_size", -1),
    (TEXT_ENCODER, "vocab_size", "many"),
    (TEXT_ENCODER, "hidden_size", HUGE),
    (TEXT_ENCODER, "hidden_size", 12_800),
    (TEXT_ENCODER, "intermediate_size", 10**9),
    (TEXT_ENCODER, "intermediate_size", 60_000),
    (TEXT_ENCODER, "num_hidden_layers", HUGE),
    (TEXT_ENCODER, "num_hidden_layers", 100),
    (TEXT_ENCODER, "num_hidden_layers", 0),
    (TEXT_ENCODER, "num_attention_heads", 0),
    (TEXT_ENCODER, "max_position_embeddings", 10**9),
    (TEXT_ENCODER, "max_position_embeddings", "77"),
    (TEXT_ENCODER, "layer_norm_eps", "x"),
    (TEXT_ENCODER, "eos_token_id", "end"),
    (UNET, "sample_size", HUGE),
    (UNET, "sample_size", "64"),
    (UNET, "sample_size", [64]),
    (UNET, "in_channels", "4"),
    (UNET, "out_channels", 8),
    (UNET, "block_out_channels", [96, HUGE]),
    (UNET, "block_out_channels", [96] * 1000),
    (UNET, "block_out_channels", []),
    (UNET, "block_out_channels", 96),
    (UNET, "layers_per_block", HUGE),
    (UNET, "layers_per_block", 30),
    (UNET, "layers_per_block", 1.5),
    (UNET, "transformer_layers_per_block", HUGE),
    (UNET, "transformer_layers_per_block", 30),
    (UNET, "cross_attention_dim", 10**9),
    (UNET, "cross_attention_dim", 256),
    (UNET, "cross_attention_dim", None),
    (UNET, "attention_head_dim", 0),
    (UNET, "norm_num_groups", 0),
    (UNET, "norm_eps", "small"),
    (UNET, "norm_eps", float("nan")),
    (UNET, "conv_in_kernel", HUGE + 1),
    (UNET, "time_embedding_dim", HUGE),
    (UNET, "time_embedding_dim", 16_000),
    (UNET, "freq_shift", "x"),
    (UNET, "mid_block_scale_factor", 0),
    (UNET, "down_block_types", "CrossAttnDownBlock2D"),
    (VAE, "scaling_factor", "x"),
    (VAE, "scaling_factor", None),
    (VAE, "scaling_factor", float("nan")),
    (VAE, "scaling_factor", float("inf")),
    (VAE, "scaling_factor", 0),
    (VAE, "scaling_factor", True),
    (VAE, "shift_factor", "x"),
    (VAE, "shift_factor", float("nan")),
    (VAE, "latent_channels", 16),
    (VAE, "latent_channels", HUGE),
    (VAE, "in_channels", 1),
    (VAE, "layers_per_block", HUGE),
    (VAE, "layers_per_block", 30),
    (VAE, "block_out_channels", [16, 48, 96, HUGE]),
    (SCHEDULER, "num_train_timesteps", 0),
    (SCHEDULER, "num_train_timesteps", 10**10),
    (SCHEDULER, "num_train_timesteps", "1000"),
    (SCHEDULER, "beta_start", "x"),
    (SCHEDULER, "beta_end", float("nan")),
    (SCHEDULER, "trained_betas", ["x"]),
    (SCHEDULER, "prediction_type", "everything"),
    (SCHEDULER, "_class_name", "StableDiffusionPipeline"),
    (SCHEDULER, "_class_name", "NoSuchScheduler"),
    (SCHEDULER, "_class_name", "os"),
    (SCHEDULER, "_class_name", 7),
    (TOKENIZER, "model_max_length", "77"),
    (TOKENIZER, "model_max_length", 0),
    (TOKENIZER, "max_length", "many"),
)


def change(model: Path, name: str, key: str, value: object) -> None:
    document = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps(document | {key: value}))


@pytest.mark.parametrize("name, key, value", HOSTILE, ids=lambda value: str(value)[:24])
def test_hostile_number(train: Run, tmp_path: Path, name: str, key: str, value: object) -> None:
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    change(model, name, key, value)
    import diffusers  # noqa: F401  # not on this test's account
    import transformers  # noqa: F401

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    memory, began = peak_memory(), time.process_time()
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=model, max_train_steps=1)
    assert_refused(result, 1, str(model), key, "etch")
    assert name.rpartition("/")[0] in result.err
    assert "learning_rate" not in result.err
    assert peak_memory() - memory < 100, "something was built"
    assert time.process_time() - began < 10


def test_generate_refuses_the_same(icom: Run, tmp_path: Path) -> None:
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    options = ("--prompt", "a star", "--output_dir", str(tmp_path / "drawn"), "--scheduler", "model")
    change(model, SCHEDULER, "_class_name", "UNet2DConditionModel")
    result = icom("generate", f"--pretrained_model_name_or_path={model}", *options)
    assert_refused(result, 1, "_class_name in scheduler/scheduler_config.json is 'UNet2DConditionModel', no scheduler")


def test_options_of_a_sampler_that_contradict_each_other(icom: Run, tmp_path: Path) -> None:
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    change(model, SCHEDULER, "algorithm_type", "magic")
    options = ("--prompt", "a star", "--output_dir", str(tmp_path / "drawn"))
    result = icom("generate", f"--pretrained_model_name_or_path={model}", *options)
    assert_refused(
        result, 1, f"The scheduler of {model} cannot be made from its scheduler/scheduler_config.json: magic"
    )


def test_params_builds_no_giant(icom: Run, tmp_path: Path) -> None:
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    change(model, UNET, "layers_per_block", HUGE)
    assert_refused(icom("params", str(model)), 1, f"layers_per_block in {UNET} is {HUGE}, not a whole number from 1 to")


def test_all_that_is_wrong_is_named_at_once(train: Run, tmp_path: Path) -> None:
    model = Path(shutil.copytree(BUNDLE, tmp_path / "model"))
    change(model, VAE, "scaling_factor", None)
    change(model, SCHEDULER, "num_train_timesteps", 0)
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path=model)
    assert_refused(
        result,
        1,
        f"scaling_factor in {VAE} is None, not a number above 0 up to 1e+06; num_train_timesteps in {SCHEDULER} is 0",
    )


@pytest.mark.parametrize("arch", ["sd15", "sd2-base", "sd21", "tiny"])
def test_published_configurations_pass(tmp_path: Path, arch: str) -> None:
    """As diffusers and transformers write the full-size models' configurations, every key included."""
    import torch
    from diffusers import DDPMScheduler

    from icom.models.architectures import ARCHITECTURES
    from icom.models.parts import TEXT_ENCODER, UNET, VAE

    with torch.device("meta"):
        parts = {
            "text_encoder": TEXT_ENCODER.build(ARCHITECTURES[arch]),
            "unet": UNET.build(ARCHITECTURES[arch]),
            "vae": VAE.build(ARCHITECTURES[arch]),
        }
    for part, module in parts.items():
        (tmp_path / part).mkdir()
        config = module.config if part == "text_encoder" else module
        (config.save_pretrained if part == "text_encoder" else config.save_config)(tmp_path / part)
    DDPMScheduler(**ARCHITECTURES[arch].scheduler).save_config(tmp_path / "scheduler")
    check_configs(tmp_path)
    for name in {row[0] for row in CHECKS} - {"tokenizer_config.json"}:
        absent = {row[1] for row in CHECKS if row[0] == name} - set(json.loads((tmp_path / name).read_text()))
        assert absent <= {"model_max_length", "max_length"}, f"the table names keys that no {name} has"
