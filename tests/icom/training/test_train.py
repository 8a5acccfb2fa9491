"""What a training run does and leaves behind.

Guards icom.training.train, icom.training.run and icom.training.results.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import DDPMScheduler
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from icom import backends
from icom.backends import fast_precision
from icom.config.train import TrainConfig
from icom.config.words import Word
from icom.methods.embedding import add_placeholders
from icom.methods.embedding_file import load_embedding
from icom.models import loading
from icom.parallel.group import ALONE, Group
from icom.parallel.place import Place
from icom.training import results
from icom.training.begin import precision_of
from icom.training.report import read_metrics
from tests.support.command import ROOT, Result, long, start_process, train_arguments

Train = Callable[..., Result]


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def picture(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


def test_embedding_obeys_the_rules_of_all_three_tools(tmp_path: Path, train: Train) -> None:
    """diffusers takes a single key as the token; A1111 wants exactly one tensor; ComfyUI takes a 2-D float one."""
    assert train(output_dir=tmp_path, num_vectors=3, save_steps=2).code == 0
    for name in ("learned_embeds.safetensors", "learned_embeds-steps-2.safetensors"):
        with safe_open(tmp_path / name, "pt") as file:
            assert list(file.keys()) == ["<robot>"]
            tensor = file.get_tensor("<robot>")
        assert tensor.shape == (3, 128)
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()


def test_embedding_opens_in_diffusers_and_changes_the_picture(tmp_path: Path, train: Train) -> None:
    from diffusers import StableDiffusionPipeline

    assert train(output_dir=tmp_path, max_train_steps=20, learning_rate=0.1, num_vectors=2).code == 0

    def drawn(prompt: str, *, learned: bool) -> bytes:
        pipeline = StableDiffusionPipeline.from_pretrained(loading.BUNDLE, safety_checker=None)
        pipeline.set_progress_bar_config(disable=True)
        if learned:
            pipeline.load_textual_inversion(str(tmp_path / "learned_embeds.safetensors"))
            ids = pipeline.tokenizer.convert_tokens_to_ids(["<robot>", "<robot>_1"])
            table = pipeline.text_encoder.get_input_embeddings().weight
            assert torch.equal(table[ids], rows(tmp_path))
        generator = torch.Generator().manual_seed(0)
        image = pipeline(prompt, num_inference_steps=3, generator=generator, height=64, width=64).images[0]
        return bytes(image.tobytes())

    assert drawn("a photo of <robot>", learned=True) != drawn("a photo of toy", learned=True)
    assert drawn("a photo of toy", learned=True) == drawn("a photo of toy", learned=False)


def test_vectors_differ_after_training(tmp_path: Path, train: Train) -> None:
    """Also those that start from the same token."""
    assert train(output_dir=tmp_path, num_vectors=3, initializer_token="toy star", max_train_steps=10).code == 0
    first, second, third = rows(tmp_path)
    assert (first - second).abs().max() > 1e-3
    assert (first - third).abs().max() > 1e-3  # both started from "toy"


def test_phrase_initialises_the_vectors_in_turn() -> None:
    model = loading.load(loading.find("bundled"), torch.float32)
    table = model.text_encoder.get_input_embeddings().weight.clone()
    toy, star = (model.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("toy", "star"))
    concept = add_placeholders(model.tokenizer, model.text_encoder, [Word("<x>", "toy star", 5)])
    assert torch.equal(concept.words[0], table[[toy, star, toy, star, toy]])


def test_only_placeholder_ids_get_trained_rows_and_gradients() -> None:
    model = loading.load(loading.find("bundled"), torch.float32)
    before = model.text_encoder.get_input_embeddings()
    plain = model.tokenizer("a photo of a toy", return_tensors="pt").input_ids
    expected = before(plain)
    concept = add_placeholders(model.tokenizer, model.text_encoder, [Word("<x>", "toy", 1)])
    assert torch.equal(model.text_encoder.get_input_embeddings()(plain), expected)
    ids = model.tokenizer("a photo of a <x>", return_tensors="pt").input_ids
    model.text_encoder(ids)[0].sum().backward()
    (trained,) = (p for p in model.text_encoder.parameters() if p.grad is not None)
    assert trained is concept.words[0]


@pytest.mark.long
def test_loss_falls_by_a_margin(tmp_path: Path, train: Train) -> None:
    """On the same 200 fresh samples: the trained row against the row that it started from."""
    assert train(output_dir=tmp_path, max_train_steps=300, learning_rate=5e-2, seed=7).code == 0
    trained, untrained = (evaluate(range(200), 10_000, learned) for learned in (rows(tmp_path), None))
    print(f"loss of the untrained row {untrained:.4f}, of the trained row {trained:.4f}")
    assert trained < 0.97 * untrained


@pytest.mark.long
def test_steps_take_the_streams_samples_one_after_the_other(tmp_path: Path, train: Train) -> None:
    """With rows that hardly move, step k's loss is the loss of the k-th part of the stream."""
    options = {"train_batch_size": 2, "gradient_accumulation_steps": 3, "learning_rate": 1e-12, "max_train_steps": 4}
    assert train(output_dir=tmp_path, **options).code == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    expected = [evaluate(range(6 * step, 6 * step + 6), seed=7) for step in range(4)]
    assert losses == pytest.approx(expected, rel=1e-5)


def evaluate(samples: range, seed: int, learned: torch.Tensor | None = None) -> float:
    """The mean loss of samples of a seed's stream, with the initial rows or others."""
    from accelerate import Accelerator

    from icom.training.material import open_material
    from icom.training.run import prepare
    from icom.training.step import batch_loss

    backend, _ = backends.resolve("cpu", "no")
    config = TrainConfig(
        train_data_dir="bundled",
        placeholder_token="<robot>",
        initializer_token="toy",
        resolution=64,
        max_train_steps=1,
        seed=seed,
    )
    model = loading.load(loading.find("bundled"), torch.float32)
    run = prepare(config, backend, Accelerator(cpu=True), model, open_material(config))
    with torch.no_grad():
        if learned is not None:
            run.method.parameters["rows"].copy_(learned)
        return float(batch_loss(run, samples))


def test_effective_configuration_reruns_to_the_same_vectors(tmp_path: Path, train: Train, icom: Train) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    result = train(output_dir=first, seed=None, scale_lr=True, gradient_accumulation_steps=2, num_vectors=2)
    assert result.code == 0
    config = str(first / "config.yaml")
    assert icom("train", "--config", config, "--output_dir", str(second)).code == 0
    assert torch.equal(rows(first), rows(second))
    third = icom("train", "--config", config, "--output_dir", str(tmp_path / "third"), "--seed", "99")
    assert third.code == 0
    assert not torch.equal(rows(first), rows(tmp_path / "third"))  # flags go before the file


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_same_seed_same_vectors(tmp_path: Path, train: Train, precision: str) -> None:
    for name in ("a", "b"):
        assert train(output_dir=tmp_path / name, mixed_precision=precision).code == 0
    assert torch.equal(rows(tmp_path / "a"), rows(tmp_path / "b"))


@pytest.mark.parametrize("has_it", [True, False])
def test_auto_takes_the_precision_that_is_fast_here(
    has_it: bool, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left in config.yaml is a precision, not `auto`, and Accelerate gets it too; the start line says why."""
    monkeypatch.setattr(backends, "product_dtype", lambda dtype: dtype if has_it else torch.float32)
    result = train(output_dir=tmp_path, mixed_precision="auto")
    assert result.code == 0, result.err
    taken = yaml.safe_load((tmp_path / "config.yaml").read_text())["mixed_precision"]
    assert taken == ("bf16" if has_it else "no")
    phrases = ("bf16: this CPU has it", ", bf16,") if has_it else ("fp32: this CPU has no bf16", ", fp32,")
    assert all(phrase in result.out for phrase in phrases)


def test_auto_keeps_a_resumed_runs_precision(tmp_path: Path, train: Train) -> None:
    """The one that `auto` would not take here; the rows go on to the same bits."""
    other = "no" if fast_precision("cpu")[0] == "bf16" else "bf16"
    options = {"max_train_steps": 6, "checkpointing_steps": 3}
    assert train(output_dir=tmp_path / "whole", mixed_precision=other, **options).code == 0
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    options |= {"mixed_precision": "auto", "resume_from_checkpoint": "latest"}
    result = train(output_dir=tmp_path / "resumed", **options)
    assert result.code == 0, result.err
    assert "the checkpoint's" in result.out
    assert torch.equal(rows(tmp_path / "resumed"), rows(tmp_path / "whole"))
    # Nothing to resume yet: the machine decides.
    result = train(output_dir=tmp_path / "new", **options)
    assert "the checkpoint's" not in result.out
    config = yaml.safe_load((tmp_path / "new" / "config.yaml").read_text())
    assert config["mixed_precision"] == fast_precision("cpu")[0]


def test_auto_of_several_ranks_is_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of two kinds: both take what rank 0's has."""

    class Second(Group):
        def broadcast(self, content: bytes | None) -> bytes:
            assert content is None
            return sent

    sent = b""
    words = {"train_data_dir": "bundled", "placeholder_token": "<x>", "initializer_token": "toy"}
    auto, named = (TrainConfig(**words, mixed_precision=wanted) for wanted in ("auto", "no"))  # type: ignore[arg-type]
    second = Second(Place(rank=1, world_size=2))
    for first_has_it in (True, False):
        monkeypatch.setattr(backends, "product_dtype", lambda dtype, has=first_has_it: dtype if has else torch.float32)
        decided = precision_of(auto, ALONE)
        sent = json.dumps(decided).encode()
        monkeypatch.setattr(backends, "product_dtype", lambda dtype, has=first_has_it: torch.float32 if has else dtype)
        assert precision_of(auto, second) == decided == precision_of(auto, second)
        assert decided[0] == ("bf16" if first_has_it else "no")
        assert precision_of(named, second) == ("no", "")  # the disagreement is found with the other options


@pytest.mark.long
def test_emulated_bf16_is_said_once_with_its_price(tmp_path: Path) -> None:
    """On any machine: the variables leave no bf16 instructions."""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    for precision, times in (("bf16", 1), ("no", 0)):
        arguments = train_arguments(output_dir=tmp_path / precision, mixed_precision=precision)
        process = start_process(*arguments, **limits)
        out, err = process.communicate()
        assert process.returncode == 0, err
        said = [line for line in err.splitlines() if "has no bf16 instructions" in line]
        assert len(said) == times
        assert all(re.search(r"\d\.\d x float32's time.*--mixed_precision no", line) for line in said)
        assert ("stock layers" in out) is (precision == "no")  # the engine computes it, though the model is small


def test_bf16_follows_float32(tmp_path: Path, train: Train) -> None:
    for precision in ("no", "bf16"):
        assert train(output_dir=tmp_path / precision, mixed_precision=precision, max_train_steps=20).code == 0
    curves = [[row["loss"] for row in read_metrics(tmp_path / p / "metrics.jsonl")] for p in ("no", "bf16")]
    assert curves[0] == pytest.approx(curves[1], rel=0.02)


def test_gradient_checkpointing_gives_the_same_vectors(tmp_path: Path, train: Train) -> None:
    assert train(output_dir=tmp_path / "a").code == 0
    assert train(output_dir=tmp_path / "b", gradient_checkpointing=True).code == 0
    torch.testing.assert_close(rows(tmp_path / "a"), rows(tmp_path / "b"), rtol=0, atol=1e-6)


def test_v_prediction_and_vae_scale_come_from_the_model(tmp_path: Path, train: Train) -> None:
    """SD2.1's scheduler and another VAE scale: both change what is learned, so both are read."""
    learned = {}
    for name in ("plain", "v", "scale"):
        model = tmp_path / name
        shutil.copytree(loading.BUNDLE, model)
        if name == "v":
            scheduler = DDPMScheduler.from_pretrained(model, subfolder="scheduler", prediction_type="v_prediction")
            scheduler.save_pretrained(model / "scheduler")
        if name == "scale":
            config = json.loads((model / "vae" / "config.json").read_text())
            (model / "vae" / "config.json").write_text(json.dumps(config | {"scaling_factor": 0.5}))
        output = tmp_path / f"{name}-out"
        assert train(output_dir=output, pretrained_model_name_or_path=model).code == 0
        learned[name] = rows(output)
    assert not torch.equal(learned["plain"], learned["v"])
    assert not torch.equal(learned["plain"], learned["scale"])


def test_random_architecture_trains(tmp_path: Path, train: Train) -> None:
    assert train(output_dir=tmp_path, pretrained_model_name_or_path="random:tiny").code == 0


@pytest.mark.long
def test_tokenizer_from_a_bare_vocabulary(tmp_path: Path, train: Train) -> None:
    """Two files, as OpenAI published CLIP's: no limit of length is known from them, and pictures need one."""
    vocabulary = json.loads((loading.BUNDLE / "tokenizer" / "tokenizer.json").read_text())["model"]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in vocabulary["merges"])
    (bare / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    options = {"tokenizer_name": bare, "num_comparison_images": 1, "save_as_full_pipeline": True}
    assert train(output_dir=tmp_path / "bare-out", **options).code == 0
    assert train(output_dir=tmp_path / "own-out").code == 0
    assert torch.equal(rows(tmp_path / "bare-out"), rows(tmp_path / "own-out"))
    saved = json.loads((tmp_path / "bare-out" / "tokenizer" / "tokenizer_config.json").read_text())
    assert saved["model_max_length"] == 77


def test_epochs_decide_without_max_train_steps(tmp_path: Path, train: Train) -> None:
    result = train(output_dir=tmp_path, max_train_steps="None", num_train_epochs=2, repeats=3, train_batch_size=4)
    assert result.code == 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 * 4  # ceil(5 x 3 / 4) per epoch


EPOCHS = [
    ("", {"num_train_epochs": 2}, 8),
    ("max_train_steps: 5", {"num_train_epochs": 2}, 8),
    ("num_train_epochs: 2", {}, 8),
    ("num_train_epochs: 3", {"num_train_epochs": 2}, 8),
    ("", {"num_train_epochs": 2, "max_train_steps": 5}, 5),
    ("num_train_epochs: 2\nmax_train_steps: 5", {}, 5),
    ("num_train_epochs: 2", {"max_train_steps": 5}, 5),
]


@pytest.mark.parametrize(
    "file, flags, steps", [EPOCHS[1], *(long(*case) for case in EPOCHS if case != EPOCHS[1])], ids=str
)
def test_who_names_epochs_alone_gets_them(
    tmp_path: Path, train: Train, file: str, flags: dict[str, object], steps: int
) -> None:
    """Not diffusers' default of 5000 steps, nor the bundled model's, nor what a file below the flags says."""
    (tmp_path / "run.yaml").write_text(f"repeats: 3\ntrain_batch_size: 4\n{file}\n")
    options = {"max_train_steps": None, "train_batch_size": None, "config": tmp_path / "run.yaml"} | flags
    assert train(output_dir=tmp_path / "out", **options).code == 0
    assert len(read_metrics(tmp_path / "out" / "metrics.jsonl")) == steps


def test_start_line_and_closing_lines(tmp_path: Path, train: Train) -> None:
    result = train(output_dir=tmp_path, train_batch_size=2, gradient_accumulation_steps=3, num_vectors=2)
    for phrase in (
        "cpu (PyTorch",
        "fp32",
        "threads",
        "256 trainable numbers",
        "/10 hits",
        "total batch 6",
        "seed 7",
    ):
        assert phrase in result.out
    embedding = tmp_path / "learned_embeds.safetensors"
    assert f"icom generate --embedding {embedding} --prompt 'a photo of <robot>'" in result.out
    assert "copied as robot.safetensors it is `robot` in A1111 and `embedding:robot` in ComfyUI." in result.out
    assert "loss" in result.err  # the progress bar
    assert "s/step" in result.err


def test_comparison_pictures_and_curve(tmp_path: Path, train: Train) -> None:
    assert train(output_dir=tmp_path, num_comparison_images=2, max_train_steps=30, learning_rate=0.1).code == 0
    sheet = picture(tmp_path / "comparison.png")
    assert sheet.size == (2 * 64 + 4, 2 * 64 + 4)
    assert sheet.crop((0, 0, 64, 64)).tobytes() != sheet.crop((0, 68, 64, 132)).tobytes()
    assert picture(tmp_path / "loss.png").size[0] > 500


@pytest.mark.long
def test_comparison_pictures_may_take_a_share_of_the_training(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of pictures costs as much as 54 samples: nobody gets it for 3 steps who does not ask for it."""
    monkeypatch.setattr(results, "CHEAP_PICTURES", 0.0)
    left_out = train(output_dir=tmp_path / "short", num_comparison_images=None)
    assert "icom: no comparison pictures: they would take about" in left_out.out
    assert "--num_comparison_images 1 draws them" in left_out.out
    assert not (tmp_path / "short" / "comparison.png").exists()
    assert "comparison.png" not in (tmp_path / "short" / "README.md").read_text()

    asked = train(output_dir=tmp_path / "asked", num_comparison_images=1)
    assert re.search(r"icom: drawing 2 pictures for comparison.png, about \d+ s \(--num_comp", asked.out)
    assert picture(tmp_path / "asked" / "comparison.png").size == (64, 132)

    long = train(output_dir=tmp_path / "long", num_comparison_images=None, max_train_steps=300)
    assert "icom: drawing 2 pictures for comparison.png" in long.out
    assert picture(tmp_path / "long" / "comparison.png").size == (64, 132)


@pytest.mark.long
def test_cheap_comparison_pictures_are_always_drawn(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "CHEAP_PICTURES", 1000.0)  # a busy machine is slow
    assert train(output_dir=tmp_path, num_comparison_images=None, max_train_steps=1).code == 0
    assert picture(tmp_path / "comparison.png").size == (64, 132)


@pytest.mark.long
def test_scale_lr_multiplies(tmp_path: Path, train: Train) -> None:
    assert train(output_dir=tmp_path, scale_lr=True, train_batch_size=2, gradient_accumulation_steps=3).code == 0
    first = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert first["lr"] == pytest.approx(6e-2)


def test_pickled_copy_on_request(tmp_path: Path, train: Train) -> None:
    assert train(output_dir=tmp_path, no_safe_serialization=True).code == 0
    old = torch.load(tmp_path / "learned_embeds.bin", weights_only=True)
    assert torch.equal(old["<robot>"], rows(tmp_path))
    assert load_embedding(tmp_path / "learned_embeds.safetensors")[0] == "<robot>"


ICOM_COMMAND = (
    "--pretrained_model_name_or_path=bundled --train_data_dir=bundled --learnable_property=object "
    "--placeholder_token=<dicoo> --initializer_token=toy --resolution=64 --train_batch_size=1 --seed=7 "
    "--gradient_accumulation_steps=1 --max_train_steps=3 --learning_rate=2.0e-03 --scale_lr "
    "--lr_scheduler=constant --lr_warmup_steps=3 --output_dir=OUT --mixed_precision bf16 --save_as_full_pipeline"
)
"""ICOM's README, but for model, pictures, picture size, number of steps and folder."""

LAUNCHERS = {
    "icom": ["-m", "icom", "train"],
    "script": ["textual_inversion_icom.py"],
    "module": ["-m", "textual_inversion_icom"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/single_cpu.yaml"),
        "textual_inversion_icom.py",
    ],
}


@pytest.mark.parametrize("launcher", [long("icom"), long("script"), long("module"), "accelerate"])
def test_every_way_to_start_is_the_same_program(tmp_path: Path, launcher: str) -> None:
    """ICOM's command line as it stands; the embedding it gives is the same everywhere."""
    from diffusers import StableDiffusionPipeline

    arguments = ICOM_COMMAND.replace("OUT", str(tmp_path)).split()
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], *arguments], cwd=ROOT, capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    learned = load_file(tmp_path / "learned_embeds.safetensors")["<dicoo>"]
    EMBEDDINGS.append(learned)
    assert torch.equal(learned, EMBEDDINGS[0])
    pipeline = StableDiffusionPipeline.from_pretrained(tmp_path)
    token = pipeline.tokenizer.convert_tokens_to_ids("<dicoo>")
    assert torch.equal(pipeline.text_encoder.get_input_embeddings().weight[token], learned[0])


EMBEDDINGS: list[torch.Tensor] = []


@pytest.mark.long
def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path, train: Train) -> None:
    """Real processes and the real gloo; equal up to the order of float32 sums."""
    options = {"max_train_steps": 5, "save_steps": 5}
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(output_dir=one, train_batch_size=2, **options).code == 0
    arguments = train_arguments(output_dir=two, **options)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "textual_inversion_icom.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "total batch 2 (1 x 2 processes" in done.stdout
    torch.testing.assert_close(rows(one), rows(two), rtol=0, atol=1e-6)
