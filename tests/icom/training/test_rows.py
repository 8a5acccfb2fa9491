"""Rows learned with each option are those of a plain loop, on any number of processes and wherever they are stopped.

Guards icom.training.rows, icom.training.optimizers, icom.training.clipping and icom.config.rows.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file

from icom.config.train import TrainConfig
from icom.data.sampling import Stream, raw_words
from icom.models import loading
from icom.training.checkpoint import load_checkpoint
from icom.training.report import read_metrics
from icom.training.step import batch_loss
from tests.icom.training.test_objective import prepared
from tests.support.command import Result, assert_message, assert_refused
from tests.support.ranks import Ranks

Train = Callable[..., Result]

STEPS = 12
OPTIONS: dict[str, object] = {
    "num_vectors": 2,
    "train_batch_size": 2,
    "max_train_steps": STEPS,
    "adam_epsilon": "1e-4",
    "adam_weight_decay": 2,
    "weight_decay_to_start": True,
    "max_grad_norm": 0.001,
    "report_to": "none",
}
MEAN: dict[str, object] = {"use_ema": True, "ema_decay": 0.8}
OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {"preserve_embedding_norm": 0.3} | MEAN,
    # From its first estimate of the rate, a millionth, little would be seen in so few steps.
    "prodigy": {"learning_rate": 100} | MEAN,
    "schedule_free_adamw": {"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 3},
}


def options_of(optimizer: str) -> dict[str, object]:
    return OPTIONS | OPTIMIZERS[optimizer] | {"optimizer": optimizer}


def learned(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def raw(folder: Path) -> torch.Tensor:
    return load_checkpoint(folder / f"checkpoint-{STEPS}").state.parameters["rows"]


def tensors(folder: Path, step: int = STEPS) -> bytes:
    return (folder / f"checkpoint-{step}" / "state.safetensors").read_bytes()


def bundled_table() -> torch.Tensor:
    weights = load_file(loading.BUNDLE / "text_encoder/model.safetensors")
    (name,) = (name for name in weights if "token_embedding" in name)
    return weights[name].float()


def bundled_start() -> torch.Tensor:
    toy: int = loading.load_tokenizer(loading.find("bundled")).convert_tokens_to_ids("toy</w>")  # type: ignore[assignment]
    return bundled_table()[toy]


def plain_optimizer(name: str, rows: torch.nn.Parameter, config: TrainConfig) -> Any:
    options = {"betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 2.0}
    if name == "adamw":
        return torch.optim.AdamW([rows], lr=1e-2, foreach=False, **options)  # type: ignore[arg-type]
    if name == "prodigy":
        from prodigyopt import Prodigy

        return Prodigy([rows], lr=100, safeguard_warmup=True, use_bias_correction=True, **options)
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree([rows], lr=1e-2, foreach=False, **options)


def plain_loop(name: str) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """(raw rows, rows that people get, norms of the gradients): what is trained is the way from the start."""
    run = prepared("bundled", **{k: v for k, v in OPTIONS.items() if k in ("num_vectors", "train_batch_size")}, seed=7)
    rows = run.method.parameters["rows"]
    start = rows.detach().clone()
    norm = statistics.median_low(bundled_table().norm(dim=1).tolist())
    way = torch.nn.Parameter(torch.zeros_like(start))
    optimizer = plain_optimizer(name, way, run.config)
    mean = EMAModel([start], decay=0.8)
    norms = []
    for step in range(STEPS):
        with torch.no_grad():
            rows.copy_(start + way)
        rows.grad = None
        batch_loss(run, range(2 * step, 2 * step + 2)).backward()
        assert rows.grad is not None
        norms.append(float(rows.grad.norm()))
        way.grad = rows.grad * min(1.0, 0.001 / norms[-1])
        if name == "schedule_free_adamw":
            optimizer.train()
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, step / 3)
        optimizer.step()
        if name == "adamw":
            with torch.no_grad():
                found = start + way
                lengths = found.norm(dim=1, keepdim=True)
                way.copy_(found * (lengths + 0.3 * (norm - lengths)) / lengths - start)
        if name != "schedule_free_adamw":
            mean.step([torch.nn.Parameter(start + way.detach())])  # what has no gradient it would copy
    trained = start + way.detach().clone()
    if name != "schedule_free_adamw":
        return trained, mean.shadow_params[0], norms
    optimizer.eval()
    return trained, start + way.detach(), norms


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_those_of_a_plain_loop_and_go_on_to_the_same_bits(name: str, tmp_path: Path, train: Train) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    often = {"save_steps": 1, "checkpointing_steps": 5}
    result = train(output_dir=whole, **options_of(name), **often)
    assert result.code == 0, result.err
    trained, wanted, norms = plain_loop(name)
    assert min(norms) < 0.001 < max(norms)  # some are clipped and some are not
    way = float((raw(whole) - bundled_start()).abs().max())
    assert way > (5e-5 if name == "prodigy" else 1e-2)
    near = min(2e-5, 0.03 * way)  # Prodigy's way is short, and rows of size 1 are rounded to 1e-7
    torch.testing.assert_close(raw(whole), trained, rtol=0, atol=near)
    torch.testing.assert_close(learned(whole), wanted, rtol=0, atol=near)
    assert (trained - wanted).abs().max() > 0.01 * way  # both are kept, and not the same
    figures = read_metrics(whole / "metrics.jsonl")
    assert [row["grad_norm"] for row in figures] == pytest.approx(
        norms, rel=1e-2
    )  # torch clips to a little less than the norm
    assert ("d*lr" in figures[0]) == (name == "prodigy")
    # Saving every step what people get has changed nothing, and what is there after 10 steps leads to the same end.
    seldom = options_of(name) | {"save_steps": 1000, "checkpointing_steps": 1000, "output_dir": stopped}
    shutil.copytree(whole / "checkpoint-10", stopped / "checkpoint-10")
    assert train(**seldom, resume_from_checkpoint="latest").code == 0
    assert tensors(stopped) == tensors(whole)
    assert torch.equal(learned(stopped), learned(whole))
    assert torch.equal(load_file(whole / f"learned_embeds-steps-{STEPS}.safetensors")["<robot>"], learned(whole))


@pytest.mark.long
def test_three_ranks_equal_one(tmp_path: Path, train: Train, ranks: Callable[..., Ranks]) -> None:
    """Also rows that start from random numbers, and the noise and timesteps of every option."""
    for name in OPTIMIZERS:
        options = options_of(name) | {"initializer_token": "<rand>", "snr_gamma": 5, "noise_offset": 0.1}
        options |= {"min_timestep": 100, "timestep_sampling": "logit_normal", "train_batch_size": 1}
        results = ranks(3, folder=tmp_path / name, **options).results()
        assert [result.code for result in results] == [0, 0, 0], results
        assert train(output_dir=tmp_path / name / "one", **(options | {"train_batch_size": 3})).code == 0
        three, one = tmp_path / name / "rank0/out", tmp_path / name / "one"
        torch.testing.assert_close(raw(three), raw(one), rtol=0, atol=2e-5)
        torch.testing.assert_close(learned(three), learned(one), rtol=0, atol=2e-5)


def test_plain_runs_checkpoint_is_that_of_before(tmp_path: Path, train: Train) -> None:
    """No new names in its identity or its state: older checkpoints, and those for older versions, go on."""
    assert train(output_dir=tmp_path).code == 0
    state, identity, _, _ = load_checkpoint(tmp_path / "checkpoint-3")
    assert set(identity.options) == {
        *("placeholder_token", "num_vectors", "learnable_property", "resolution", "center_crop", "repeats", "engine"),
    }
    assert set(state.optimizer["rows"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert not state.mean
    assert set(read_metrics(tmp_path / "metrics.jsonl")[0]) == {"step", "loss", "lr", "seconds"}


def test_run_goes_on_with_its_own_options_only(tmp_path: Path, train: Train) -> None:
    assert train(output_dir=tmp_path, snr_gamma=5, weight_decay_to_start=True).code == 0
    on = {"output_dir": tmp_path, "resume_from_checkpoint": "latest", "max_train_steps": 4}
    result = train(**on, snr_gamma=4, weight_decay_to_start=True)
    assert_refused(result, 1, "different: snr_gamma (checkpoint 5.0, now 4.0)")
    result = train(**on, snr_gamma=5, weight_decay_to_start=True, initializer_token="star")
    assert_refused(result, 1, "different: start_rows (checkpoint ")
    assert_refused(train(**on, snr_gamma=5), 1, "start_rows", "weight_decay_to_start (checkpoint True, now None)")
    result = train(**on, snr_gamma=5, weight_decay_to_start=True, use_ema=True)
    assert_refused(result, 1, "different: use_ema (checkpoint None, now True)")
    assert train(**on, snr_gamma=5, weight_decay_to_start=True).code == 0


def test_random_rows_have_the_tables_statistics_and_the_seed_decides(tmp_path: Path, train: Train) -> None:
    run = prepared("bundled", initializer_token="<rand>", num_vectors=60)
    rows, table = run.method.parameters["rows"].detach(), bundled_table()
    (word,) = raw_words(5, Stream.ROWS, count=1)
    normal = torch.randn(60, 128, generator=torch.Generator().manual_seed(int(word) >> 1))
    torch.testing.assert_close(rows, table.mean(dim=0) + table.std(dim=0) * normal, rtol=0, atol=1e-6)
    still = {"learning_rate": 1e-30, "adam_weight_decay": 0, "max_train_steps": 1, "initializer_token": "<rand>"}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(output_dir=tmp_path / name, seed=seed, **still).code == 0
    assert torch.equal(learned(tmp_path / "a"), learned(tmp_path / "b"))
    assert (learned(tmp_path / "a") - learned(tmp_path / "c")).abs().max() > 0.01


def test_rows_start_from_files_of_other_tools(tmp_path: Path, train: Train) -> None:
    """A1111's .pt, kohya's and diffusers' .safetensors, bare rows; a pickle that holds more is never run."""
    rows = torch.randn(2, 128, generator=torch.Generator().manual_seed(1))
    torch.save({"string_to_token": {"*": 265}, "string_to_param": {"*": rows}, "name": "old"}, tmp_path / "a1111.pt")
    save_file({"emb_params": rows}, tmp_path / "kohya.safetensors")
    torch.save({"<dicoo>": rows.half().float()}, tmp_path / "diffusers.bin")
    still = {"learning_rate": 1e-30, "adam_weight_decay": 0, "max_train_steps": 1, "num_vectors": 2}
    for name in ("a1111.pt", "kohya.safetensors", "diffusers.bin"):
        output = tmp_path / f"from-{name}"
        assert train(output_dir=output, initial_embedding=tmp_path / name, **still).code == 0
        torch.testing.assert_close(learned(output), rows, rtol=0, atol=0 if "bin" not in name else 2e-3)
    torch.save({"string_to_param": {"*": rows}, "more": Path("x")}, tmp_path / "evil.pt")
    result = train(output_dir=tmp_path / "out", initial_embedding=tmp_path / "evil.pt", **still)
    assert_refused(result, 1, "beside tensors. Reading that could run code of whoever made the file, and icom does not")


def test_prodigys_rate_is_one_unless_given_and_another_one_is_remarked(tmp_path: Path, train: Train) -> None:
    result = train(output_dir=tmp_path / "plain", optimizer="prodigy", learning_rate=None)
    assert (result.code, "finds the rate by itself" in result.err) == (0, False)
    assert read_metrics(tmp_path / "plain/metrics.jsonl")[0]["lr"] == 1
    result = train(output_dir=tmp_path / "low", optimizer="prodigy", learning_rate="1e-4")
    assert_message(result, 0, "--learning_rate 0.0001 is a factor of it, and meant to be about 1. Drop it.")


def test_optimizer_whose_package_is_missing(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    for optimizer, package in (("prodigy", "prodigyopt"), ("schedule_free_adamw", "schedulefree")):
        monkeypatch.setitem(sys.modules, package, None)
        result = train(output_dir=tmp_path, optimizer=optimizer)
        assert_refused(result, 1, f"--optimizer {optimizer} needs {package}", f"python -m pip install {package}.")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"preserve_embedding_norm": 1.5}, "--preserve_embedding_norm is a share between 0 and 1, not 1.5"),
        ({"preserve_embedding_norm": "nan"}, "--preserve_embedding_norm is a share between 0 and 1, not nan"),
        ({"max_grad_norm": -1}, "--max_grad_norm has to be a number from 0 on, not -1"),
        ({"max_grad_norm": "inf"}, "--max_grad_norm has to be a number from 0 on, not inf"),
        ({"ema_decay": 1, "use_ema": True}, "--ema_decay has to be in [0, 1)"),
        ({"ema_half_life": 10}, "--ema_half_life is of the mean of the weights: add --use_ema, or drop it"),
        ({"weight_decay_to_start": True, "adam_weight_decay": 0}, "needs --adam_weight_decay above 0"),
        ({"optimizer": "adam"}, "invalid choice 'adam'"),
        ({"optimizer": "prodigy", "scale_lr": True}, "finds the rate by itself, whatever the batch: drop --scale_lr"),
        (
            {"optimizer": "schedule_free_adamw", "lr_scheduler": "cosine"},
            "takes the place of --lr_scheduler cosine: give constant or constant_with_warmup",
        ),
        ({"optimizer": "schedule_free_adamw", "use_ema": True}, "learns a mean of its own: drop --use_ema"),
        (
            {"optimizer": "schedule_free_adamw", "preserve_embedding_norm": 1},
            "learns a mean of its own: drop --preserve_embedding_norm",
        ),
        ({"optimizer": "prodigy", "preserve_embedding_norm": 0.1}, "moves them, too: drop one of them"),
        ({"optimizer": "schedule_free_adamw", "adam_beta1": 0}, "needs --adam_beta1 above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], part: str, tmp_path: Path, train: Train) -> None:
    assert_refused(train(output_dir=tmp_path, **options), 2, part)
