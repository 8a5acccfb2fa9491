"""Several words at once: each is the run that it is alone.

Guards icom.training.concepts, icom.config.concepts and what backends forget between runs.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file

from icom import backends
from icom.config.concepts import Concepts, load_trainings
from icom.config.train import TrainConfig, load_train_config, made_of
from icom.data.images import BUNDLED_CONCEPTS, read_picture
from icom.data.sampling import gaussian_noise
from icom.data.transform import Transform, pixels
from icom.errors import UsageError
from icom.models import loading, pipelines
from icom.training.material import open_material
from icom.training.run import prepare
from icom.training.step import loss_of, optimizer_step
from icom.training.train import train as run_training
from tests.support.checkpoints import assert_same_tensors
from tests.support.command import TRAIN, Result, assert_message, assert_refused, train_arguments
from tests.support.ranks import Ranks
from tests.support.waiting import send_at

Train = Callable[..., Result]
LIST: dict[str, object] = {"placeholder_token": None, "train_data_dir": None}
"""What each word has of its own."""


@pytest.fixture
def words(tmp_path: Path) -> list[dict[str, Any]]:
    """Concepts that differ in pictures, shapes, captions and settings."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for path in sorted((BUNDLED_CONCEPTS / "red-moon").iterdir())[:3]:
        shutil.copy(path, photos)
        (photos / path.name).with_suffix(".txt").write_text("a <moon> in the dark")
    (tmp_path / "class").mkdir()
    shutil.copy(next((BUNDLED_CONCEPTS / "blue-heart").iterdir()), tmp_path / "class")
    return [
        {"placeholder_token": "<heart>", "train_data_dir": "bundled:blue-heart", "train_batch_size": 2},
        {
            **{"placeholder_token": "<moon>", "initializer_token": "a moon", "train_data_dir": str(photos)},
            **{"num_vectors": 2, "resolution": 32, "learning_rate": 3e-3, "seed": 3, "validation_share": 0.5},
            **{"checkpointing_steps": 2},
        },
        {
            **{"placeholder_token": "<star>", "train_data_dir": "bundled:orange-ring", "enable_bucket": True},
            **{"with_prior_preservation": True, "class_data_dir": str(tmp_path / "class"), "num_class_images": 1},
            **{"class_prompt": "a photo of a <star>", "use_ema": True},
        },
    ]


def write(folder: Path, words: object) -> Path:
    file = folder / "list.yaml"
    file.write_text(yaml.safe_dump(words))
    return file


def alone(train: Train, word: dict[str, Any], output: Path, **options: object) -> Path:
    result = train(**options | {k: True if v is True else v for k, v in word.items()}, output_dir=output)
    assert result.code == 0, result
    return output


def assert_same_run(one: Path, other: Path) -> None:
    """All numbers: rows, checkpoints with what was chosen, losses."""
    names = {path.relative_to(one) for path in one.rglob("*") if path.suffix == ".safetensors"}
    assert names == {path.relative_to(other) for path in other.rglob("*") if path.suffix == ".safetensors"}
    assert names
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for state in one.glob("checkpoint-*/state.json"):
        mine, theirs = (json.loads((folder / state.relative_to(one)).read_text()) for folder in (one, other))
        for part in ("choices", "identity", "next_sample"):
            assert mine[part] == theirs[part]
    for log in ("metrics.jsonl", "validation.jsonl"):
        assert losses(one / log) == losses(other / log)


def losses(log: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()] if log.exists() else []


def test_every_word_has_the_bits_of_a_run_alone(tmp_path: Path, train: Train, words: list[dict[str, Any]]) -> None:
    """With the engine, whose layers are packed for what comes first."""
    output = tmp_path / "out"
    result = train(concepts_list=write(tmp_path, words[:2]), output_dir=output, engine="on", **LIST)
    assert result.code == 0, result
    for number, name in enumerate(("heart", "moon")):
        assert_same_run(output / name, alone(train, words[number], tmp_path / f"alone-{name}", engine="on"))
        assert f"concept {number + 1} of 2 <{name}>: 3/3" in result.err
        assert losses(output / name / "metrics.jsonl")
    together = load_file(output / "learned_embeds.safetensors")
    assert {word: tuple(rows.shape) for word, rows in together.items()} == {"<heart>": (1, 128), "<moon>": (2, 128)}
    for word, rows in together.items():
        own = load_file(output / word.strip("<>") / "learned_embeds.safetensors")
        assert torch.equal(rows, own[word])
    (row,) = (line for line in result.out.splitlines() if line.startswith("<moon>"))
    assert row.split()[1] == "3/3"
    assert float(row.split()[2]) == pytest.approx(sum(losses(output / "moon/metrics.jsonl")) / 3, abs=1e-4)

    # What is done is passed over; what has changed since is not.
    written = {path: path.stat().st_mtime_ns for path in output.glob("*/checkpoint-*/state.json")}
    words[1]["max_train_steps"] = 4
    options = {"concepts_list": write(tmp_path, words[:2]), "resume_from_checkpoint": "latest", **LIST}
    again = train(output_dir=output, engine="on", **options)
    assert again.code == 0, again
    assert "concept 1 of 2 <heart>: done already" in again.out
    assert "resumed after step 3" in again.out
    assert all(path.stat().st_mtime_ns == when for path, when in written.items())
    whole = alone(train, words[1], tmp_path / "whole", engine="on")
    assert losses(output / "moon/metrics.jsonl") == losses(whole / "metrics.jsonl")


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_buckets_classes_and_two_ranks(
    count: int, tmp_path: Path, train: Train, ranks: Callable[..., Ranks], words: list[dict[str, Any]]
) -> None:
    """The process of the words and those of each of them alone have as many ranks; one that diverges stops no other."""
    astray = {"placeholder_token": "<astray>", "train_data_dir": "bundled", "learning_rate": 1e30}
    file = write(tmp_path, [astray, *words[::-1]])
    if count == 1:
        results = [train(concepts_list=file, output_dir=tmp_path / "rank0" / "out", **LIST)]
    else:
        results = ranks(2, concepts_list=file, **LIST).results()
    assert [result.code for result in results] == [1] * count, results
    told = "1 of 4 concepts have no result: concept 1 of 4 <astray>: The loss became nan"
    assert sum(told in " ".join(result.err.split()) for result in results) == 1, results
    for word in words:
        name = str(word["placeholder_token"]).strip("<>")
        folder = tmp_path / "alone" / name
        if count == 1:
            alone(train, word, folder / "rank0" / "out")
        else:
            done = ranks(2, folder=folder, **word).results()
            assert [result.code for result in done] == [0, 0], done
        assert_same_run(tmp_path / "rank0" / "out" / name, folder / "rank0" / "out")


@pytest.mark.long
def test_ctrl_c_goes_on_in_the_middle(tmp_path: Path, train: Train, words: list[dict[str, Any]]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words[1]["max_train_steps"] = 12
    options = {"concepts_list": write(tmp_path, words[:2]), **LIST}
    assert train(output_dir=whole, **options).code == 0
    with pytest.MonkeyPatch.context() as patch:
        send_at(2, parts / "moon" / "metrics.jsonl", signal.SIGINT, patch)
        stopped = train(output_dir=parts, **options)
    assert_message(stopped, 130, "concept 2 of 2 <moon>: stopped after step", "--resume_from_checkpoint latest")
    assert (parts / "learned_embeds.safetensors").exists()
    resumed = train(output_dir=parts, resume_from_checkpoint="latest", **options)
    assert resumed.code == 0, resumed
    assert "concept 1 of 2 <heart>: done already" in resumed.out
    assert losses(parts / "moon/metrics.jsonl") == losses(whole / "moon/metrics.jsonl")
    assert_same_tensors(parts / "moon/checkpoint-12", whole / "moon/checkpoint-12")
    for name in ("learned_embeds.safetensors", "moon/learned_embeds.safetensors"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


def test_word_that_diverges_stops_no_other(tmp_path: Path, train: Train, words: list[dict[str, Any]]) -> None:
    words[0]["learning_rate"] = 1e30
    output = tmp_path / "out"
    result = train(concepts_list=write(tmp_path, words[:2]), output_dir=output, **LIST)
    assert_message(result, 1, "1 of 2 concepts have no result: concept 1 of 2 <heart>: The loss became nan at step 2")
    assert load_file(output / "learned_embeds.safetensors").keys() == {"<moon>"}
    assert not (output / "heart" / "learned_embeds.safetensors").exists()
    words[0]["learning_rate"] = 1e-3
    options = {"resume_from_checkpoint": "latest", **LIST}
    again = train(concepts_list=write(tmp_path, words[:2]), output_dir=output, **options)
    assert again.code == 0, again
    assert "concept 2 of 2 <moon>: done already" in again.out
    assert load_file(output / "learned_embeds.safetensors").keys() == {"<heart>", "<moon>"}


def test_goes_on_in_its_own_precision(tmp_path: Path, train: Train, words: list[dict[str, Any]]) -> None:
    """`auto` is what the checkpoints say, also of words that have none yet."""
    options = {"output_dir": tmp_path / "out", "engine": "off", **LIST}
    assert train(concepts_list=write(tmp_path, words[:1]), mixed_precision="bf16", **options).code == 0
    options |= {"mixed_precision": "auto", "resume_from_checkpoint": "latest"}
    result = train(concepts_list=write(tmp_path, words[1::-1]), **options)
    assert result.code == 0, result
    assert "bf16: the checkpoint's" in result.out
    assert "concept 2 of 2 <heart>: done already" in result.out
    settings = yaml.safe_load((tmp_path / "out" / "moon" / "config.yaml").read_text())
    assert settings["mixed_precision"] == "bf16"


def test_file_with_all_words_draws(tmp_path: Path, train: Train, icom: Train, words: list[dict[str, Any]]) -> None:
    """As the files of single words do, with the model that they were learned for; in diffusers word by word."""
    output = tmp_path / "out"
    assert train(concepts_list=write(tmp_path, words[:2]), output_dir=output, max_train_steps=1, **LIST).code == 0
    drawn = []
    for files in ([output], [output / "heart", output / "moon"]):
        embeddings = [str(file / "learned_embeds.safetensors") for file in files]
        arguments = ["--prompt", "a <heart> beside a <moon>", "--num_inference_steps", "2", "--resolution", "64"]
        folder = tmp_path / f"drawn-{len(files)}"
        result = icom("generate", "--embedding", *embeddings, *arguments, "--output_dir", str(folder))
        assert result.code == 0, result
        drawn.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert drawn[0] == drawn[1]
    every = str(output / "learned_embeds.safetensors")
    assert icom("generate", "--embedding", every, "--prompt", "a <moon>", "--output_dir", str(tmp_path)).code == 0
    wrong = icom("generate", "--embedding", f"{every}=<sun>", "--prompt", "a <sun>", "--output_dir", str(tmp_path))
    assert_message(wrong, 2, "holds <heart>, <moon>, and not <sun>")
    assert_message(icom("convert", every), 2, "holds several words (<heart>, <moon>)", f"{every}=<heart>")
    pipeline = pipelines.pipeline_of(loading.load(loading.find("bundled"), torch.float32))
    for word, rows in load_file(every).items():
        pipeline.load_textual_inversion({word: rows}, token=word)
    table = pipeline.text_encoder.get_input_embeddings().weight
    (token,) = pipeline.tokenizer.encode("<moon>_1", add_special_tokens=False)
    assert torch.equal(table[token], load_file(every)["<moon>"][1])


def test_diffusers_list(tmp_path: Path) -> None:
    """examples/custom_diffusion's form; what belongs to prior preservation counts with it only, as there."""
    theirs = [
        {
            **{"instance_prompt": "photo of a <new1> cat", "class_prompt": "cat"},
            **{"instance_data_dir": "./data/cat", "class_data_dir": "./real_reg/samples_cat/"},
        },
        {"instance_prompt": "photo of a <new2> pot", "instance_data_dir": "./data/pot", "initializer_token": "pot"},
    ]
    file = tmp_path / "list.json"
    file.write_text(json.dumps(theirs, indent="\t"))
    found = load_trainings({"concepts_list": str(file), "initializer_token": "cat", "output_dir": "out"})
    assert isinstance(found, Concepts)
    cat, pot = found.concepts
    assert (cat.placeholder_token, cat.initializer_token, cat.train_data_dir) == ("<new1>", "cat", "./data/cat")
    assert (cat.instance_prompt, cat.class_data_dir, cat.output_dir) == ("photo of a <new1> cat", None, "out/new1")
    assert (pot.placeholder_token, pot.initializer_token, pot.output_dir) == ("<new2>", "pot", "out/new2")
    theirs[0]["class_prompt"] = "photo of a <new1>"
    file.write_text(json.dumps(theirs[:1]))
    flags = {"concepts_list": str(file), "initializer_token": "cat", "with_prior_preservation": True}
    found = load_trainings(flags)
    assert isinstance(found, Concepts)
    assert found.concepts[0].class_data_dir == "./real_reg/samples_cat/"


CAPTIONS = ("a <mug> beside a <bear>", "a <mug>", "the <BEAR> in the dark")


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Three pictures of two things."""
    folder = tmp_path / "scenes"
    folder.mkdir()
    for path, caption in zip(sorted((BUNDLED_CONCEPTS / "red-moon").iterdir()), CAPTIONS, strict=False):
        shutil.copy(path, folder)
        (folder / path.name).with_suffix(".txt").write_text(caption)
    return folder


JOINT: dict[str, Any] = {
    **{"placeholder_token": ["<mug>", "<bear>"], "initializer_token": ["toy", "star"], "num_vectors": [1, 2]},
}


class _Lookup(torch.nn.Module):
    """A table of which some rows have gradients."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


def test_words_of_the_same_pictures_are_those_of_a_plain_loop(tmp_path: Path, scenes: Path) -> None:
    """Stock parts, a table that has the new rows in it, AdamW over each word; no gradient for what is not named."""
    settings = {"train_data_dir": str(scenes), "resolution": 64, "train_batch_size": 2, "learning_rate": 1e-2}
    settings |= {"max_train_steps": 4, "seed": 3, "cache_dir": str(tmp_path), "adam_weight_decay": 0.1}
    config = made_of(TrainConfig, [JOINT | settings], None)
    backend, _ = backends.resolve("cpu", "no")
    model, plain = (loading.load(loading.find("bundled"), torch.float32) for _ in range(2))
    run = prepare(config, backend, Accelerator(cpu=True), model, open_material(config))
    table = plain.text_encoder.get_input_embeddings().weight.detach()
    toy, star = (plain.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("toy", "star"))
    plain.tokenizer.add_tokens(["<mug>", "<bear>", "<bear>_1"])
    rows = [table[[toy]].clone().requires_grad_(), table[[star, star]].clone().requires_grad_()]
    optimizer = torch.optim.AdamW(rows, lr=1e-2, weight_decay=0.1)
    named = set()
    for step in range(4):
        losses = []
        for sample in (run.stream[2 * step], run.stream[2 * step + 1]):
            said = CAPTIONS[sample.picture].lower().replace("<bear>", "<bear> <bear>_1")
            ids = plain.tokenizer(said, padding="max_length", max_length=77, return_tensors="pt").input_ids
            plain.text_encoder.set_input_embeddings(_Lookup(torch.cat([table, *rows])))
            states = plain.text_encoder(ids)[0]
            path = sorted(scenes.glob("*.png"))[sample.picture]
            image = pixels(read_picture(path), Transform(64, center_crop=False), flip=sample.flip)
            posterior = plain.vae.encode(image[None]).latent_dist
            of_vae, noise = gaussian_noise(sample, tuple(posterior.mean.shape[1:]))
            latents = (posterior.mean + posterior.std * of_vae) * plain.vae.config["scaling_factor"]
            timestep = torch.tensor([sample.timestep])
            noisy = plain.noise_scheduler.add_noise(latents, noise[None], timestep)
            losses.append(((plain.unet(noisy, timestep, states).sample - noise) ** 2).mean())
            gradients = torch.autograd.grad(losses[-1], rows, retain_graph=True)
            loss_of(run, [sample]).backward()
            for token, mine, theirs in zip(("<mug>", "<bear>"), run.method.parameters.values(), gradients, strict=True):
                assert mine.grad is not None
                torch.testing.assert_close(mine.grad, theirs, rtol=1e-3, atol=1e-6)
                assert bool(mine.grad.any()) == (token in said)
                named.add((token, token in said))
            run.optimizer.zero_grad(set_to_none=True)
        optimizer.zero_grad()
        mean = (losses[0] + losses[1]) / 2
        mean.backward()
        optimizer.step()
        loss = optimizer_step(run, 2 * step)().loss
        assert loss == pytest.approx(mean.item(), rel=1e-4)
    assert len(named) == 4  # each word was in some captions and not in others
    assert run.method.parameters.keys() == {"<mug>", "<bear>"}
    for mine, theirs in zip(run.method.parameters.values(), rows, strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=0, atol=1e-5)


def test_list_with_words_of_the_same_pictures(tmp_path: Path, train: Train, icom: Train, scenes: Path) -> None:
    """A file of each word and files with all; it goes on to the same bits, and its config.yaml makes them again."""
    words = [JOINT | {"train_data_dir": str(scenes)}, {"placeholder_token": "<moon>", "train_data_dir": "bundled"}]
    output, options = tmp_path / "out", {"max_train_steps": 2, **LIST}
    result = train(concepts_list=write(tmp_path, words), output_dir=output, **options)
    assert result.code == 0, result
    assert "384 trainable numbers (1 x 128 + 2 x 128)" in result.out
    both = output / "mug-bear"
    learned = load_file(both / "learned_embeds.safetensors")
    assert {word: len(rows) for word, rows in learned.items()} == {"<mug>": 1, "<bear>": 2}
    for word, rows in learned.items():
        assert torch.equal(load_file(both / f"{word.strip('<>')}.safetensors")[word], rows)
    assert load_file(output / "learned_embeds.safetensors").keys() == {"<mug>", "<bear>", "<moon>"}
    again = tmp_path / "again"
    result = icom("train", "--config", str(both / "config.yaml"), "--output_dir", str(again), "--max_train_steps", "3")
    assert result.code == 0, result
    options |= {"max_train_steps": 3, "resume_from_checkpoint": "latest"}
    assert train(concepts_list=write(tmp_path, words), output_dir=output, **options).code == 0
    assert_same_tensors(again / "checkpoint-3", both / "checkpoint-3")
    assert losses(again / "metrics.jsonl") == losses(both / "metrics.jsonl")
    words[0]["num_vectors"] = [2, 2]
    changed = train(concepts_list=write(tmp_path, words), output_dir=output, **options | {"max_train_steps": 4})
    assert_message(changed, 1, "This is not the run of the checkpoint; different: num_vectors")


@pytest.mark.long
def test_two_ranks_learn_words_of_the_same_pictures_as_one_does(
    tmp_path: Path, train: Train, ranks: Callable[..., Ranks], scenes: Path
) -> None:
    file = tmp_path / "both.yaml"
    file.write_text(yaml.safe_dump(JOINT | {"train_data_dir": str(scenes)}))
    options = {"config": file, "initializer_token": None, **LIST}
    results = ranks(2, **options).results()
    assert [result.code for result in results] == [0, 0], results
    assert train(output_dir=tmp_path / "one", gradient_accumulation_steps=2, **options).code == 0
    one, two = (
        load_file(folder / "learned_embeds.safetensors") for folder in (tmp_path / "one", tmp_path / "rank0/out")
    )
    assert one.keys() == two.keys() == {"<mug>", "<bear>"}
    for word, rows in one.items():
        torch.testing.assert_close(two[word], rows, rtol=0, atol=1e-5)  # sums in another order


BOTH = "- placeholder_token: [<mug>, <bear>]\n  train_data_dir: "
HEART = "- placeholder_token: <heart>\n  train_data_dir: bundled:blue-heart\n"
BAD = [
    (None, 2, ("Cannot read --concepts_list", "No such file")),
    ("", 2, ("has to hold a list of concepts", "holds nothing")),
    ("[]", 2, ("is empty",)),
    ("a: b", 2, ("holds a mapping",)),
    ("- [", 2, ("Cannot read --concepts_list", "line 2")),
    ("- <heart>", 2, ("entry 1 (line 1) is a text", "has to be a mapping")),
    (f"{HEART}- {{}}\n", 2, ("entry 2 (line 3): Missing: placeholder_token, train_data_dir",)),
    (f"{HEART}- placeholder_token: <moon>\n", 2, ("entry 2 (line 3): Missing: train_data_dir",)),
    (f"{HEART}  num_vectos: 2\n", 2, ("Unknown option `num_vectos`", "entry 1 (line 1)", "mean `num_vectors`")),
    (f"{HEART}  num_vectors: many\n", 2, ("Bad value for `num_vectors`", "entry 1 (line 1)", "'many'")),
    (f"{HEART}  num_vectors: 0\n", 2, ("entry 1 (line 1): --num_vectors has to be at least 1",)),
    (f"{HEART}  mixed_precision: bf16\n", 2, ("entry 1 (line 1): mixed_precision is the same for all",)),
    (f"{HEART}  enable_cuda_graph: true\n", 2, ("enable_cuda_graph is the same for all concepts",)),
    (f"{HEART}  output_dir: there\n", 2, ("output_dir is the same for all concepts",)),
    (f"{HEART}  on: box\n", 2, ("entry 1 (line 1): on does not go with --concepts_list",)),
    (HEART * 2, 2, ("entry 2 (line 3): the token <heart> is that of", "entry 1 (line 1) already")),
    (HEART + HEART.replace("heart>", "Heart>"), 2, ("the token <Heart> is that of",)),
    (f"{HEART}  num_vectors: 2\n" + HEART.replace("heart>", "heart>_1"), 2, ("the token <heart>_1 is that of",)),
    (HEART + HEART.replace("<heart>", "(heart)"), 2, ("(heart) would be written to the folder heart",)),
    (f"{HEART}- instance_prompt: a cat\n", 2, ("entry 2 (line 3): The instance_prompt 'a cat' is to have a new word",)),
    (f"{HEART}  instance_prompt: a cat\n", 2, ("concept 1 of 1 <heart>: --instance_prompt 'a cat' does not say",)),
    (f"{HEART}  caption_templates: builtin\n  instance_prompt: a <heart>\n", 2, ("--instance_prompt takes the place",)),
    (HEART + HEART.replace("<heart>", "<b>").replace("blue-heart", "x"), 1, ("concept 2 of 2 <b>: No bundled",)),
    (HEART + HEART.replace("<heart>", "toy"), 2, ("concept 2 of 2 toy: The vocabulary has 'toy' already",)),
    (f"{HEART}  initializer_token: a moon\n", 2, ("concept 1 of 1 <heart>: --initializer_token 'a moon' is 2 tokens",)),
    (f"{BOTH}bundled:red-moon\n", 1, ("concept 1 of 1 <mug> and <bear>: Nothing that is said", "names <bear>")),
    (f"{BOTH}x\n  num_vectors: [1, 2, 3]\n", 2, ("entry 1 (line 1): num_vectors has 3 values for 2 words",)),
    (BOTH.replace("bear", "mug") + "x\n", 2, ("entry 1 (line 1): The token <mug> is that of <mug> already",)),
    (BOTH.replace("<bear>", "(mug)") + "x\n", 2, ("<mug> and (mug) need different ones",)),
    (f"{BOTH}x\n- placeholder_token: <bear>\n  train_data_dir: x\n", 2, ("the token <bear> is that of",)),
    (f"{BOTH}bundled\n  instance_prompt: a <mug>\n", 1, ("Nothing that is said", "names <bear>")),
    (f"{HEART}  num_vectors: 90\n", 2, ("concept 1 of 1 <heart>: --num_vectors 90 makes captions",)),
]


@pytest.mark.parametrize(("text", "code", "parts"), BAD, ids=[str(row[0])[-40:] for row in BAD])
def test_bad_lists(text: str | None, code: int, parts: tuple[str, ...], tmp_path: Path, train: Train) -> None:
    """Said before the first word is learned."""
    file = tmp_path / "list.yaml"
    if text is not None:
        file.write_text(text)
    result = train(concepts_list=file, output_dir=tmp_path / "out", **LIST)
    assert_refused(result, code, *parts)
    assert not (tmp_path / "out" / "heart").exists()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"placeholder_token": "<x>"}, ("--placeholder_token does not go with --concepts_list", "each concept")),
        ({"initial_embedding": "x"}, ("--initial_embedding does not go with",)),
        ({"push_to_hub": True}, ("--push_to_hub does not go with", "resume_from_checkpoint latest --push_to_hub")),
        ({"save_as_full_pipeline": True}, ("--save_as_full_pipeline does not go with",)),
        ({"on": "box"}, ("--on does not go with",)),
        ({"resume_from_checkpoint": "checkpoint-5"}, ("--resume_from_checkpoint takes `latest`",)),
    ],
)
def test_options_that_do_not_go_with_a_list(
    options: dict[str, object], parts: tuple[str, ...], tmp_path: Path, train: Train
) -> None:
    (tmp_path / "list.yaml").write_text(HEART)
    given = LIST | {"concepts_list": tmp_path / "list.yaml", "output_dir": tmp_path} | options
    assert_refused(train(**given), 2, *parts)


def test_tune_takes_no_list(icom: Train, tmp_path: Path) -> None:
    words = train_arguments(output_dir=tmp_path, learning_rate=None)[1:]
    assert_refused(icom("tune", *words, "--concepts_list=x"), 2, "--concepts_list is for `icom train`")


def test_train_of_python_takes_no_list(tmp_path: Path) -> None:
    """It would learn the word beside the list, and none of its own."""
    with pytest.raises(UsageError, match="load_trainings reads it"):
        run_training(load_train_config(TRAIN | {"concepts_list": "words.yaml", "output_dir": str(tmp_path)}))
