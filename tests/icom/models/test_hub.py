"""Upload to and download from a Hub on loopback.

Guards icom.models.hub and icom.models.loading.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from icom.models.loading import BUNDLE
from tests.support.command import Result, finetune_arguments, start_process, train_arguments
from tests.support.fake_hub import DROP, FakeHub, Repository, point_to

TOKEN = "hf_ThisIsTheSecretOfTheTests"
RESULTS = {"README.md", "config.yaml", "learned_embeds.safetensors", "loss.png", "comparison.png"}
NEEDED = {
    "model_index.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}
Train = Callable[..., Result]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(TOKEN) as hub:
        yield hub


@pytest.fixture
def _use(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to(hub, tmp_path, monkeypatch)


def in_process_of_its_own(hub: FakeHub, home: Path, *arguments: str, **environment: str) -> Result:
    """Run icom as a user does, with HF_ENDPOINT."""
    process = start_process(*arguments, HF_ENDPOINT=hub.url, HF_HOME=str(home), **environment)
    out, err = process.communicate()
    return Result(process.returncode, out, err)


def complete_repository(hub: FakeHub, name: str) -> Repository:
    """The bundled model as its authors would have uploaded a real one: with much that we do not need."""
    repository = hub.serve(name, BUNDLE)
    for extra in (
        *("README.md", "v1-5-pruned.safetensors", "v1-inference.yaml"),
        *("safety_checker/config.json", "safety_checker/model.safetensors", "feature_extractor/config.json"),
        *("text_encoder/pytorch_model.bin", "text_encoder/model.fp16.safetensors"),
        *("unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.fp16.safetensors"),
        *("unet/diffusion_pytorch_model.non_ema.safetensors", "vae/diffusion_pytorch_model.fp16.safetensors"),
    ):
        repository.files[extra] = b"not needed"
    return repository


def everything_below(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


# Upload.


@pytest.mark.long
def test_push_uploads_the_results_and_keeps_the_rest_at_home(hub: FakeHub, tmp_path: Path) -> None:
    out = tmp_path / "my-robot"
    out.mkdir()
    (out / "private-notes.txt").write_text("not yours")
    arguments = train_arguments(
        output_dir=out,
        push_to_hub=True,
        hub_token=TOKEN,
        num_comparison_images=1,
        checkpointing_steps=1,
        validation_prompt="a photo of <robot>",
        validation_steps=3,
        num_validation_images=1,
        report_to="tensorboard",
        logging_dir="events",
        save_steps=2,
    )
    result = in_process_of_its_own(hub, tmp_path / "home", *arguments)
    assert result.code == 0, result.err
    assert f"{hub.url}/alice/my-robot" in result.out
    said = (
        "icom: at the end the embedding and the model card go to alice/my-robot on the Hub. The whole pipeline: with "
        "--save_as_full_pipeline.\n"
    )
    assert result.out.index(said) < result.out.index("Learned <robot>")

    files = hub.repositories["alice/my-robot"].files
    assert set(files) == RESULTS | {"learned_embeds-steps-2.safetensors", ".gitattributes"}
    assert (out / "checkpoint-1").is_dir()
    assert (out / "events").is_dir()
    for name in files.keys() - {".gitattributes"}:
        assert files[name] == (out / name).read_bytes(), name

    _, header, text = files["README.md"].decode().split("---\n", 2)
    card = yaml.safe_load(header)
    assert card["library_name"] == "diffusers"
    assert "textual_inversion" in card["tags"]
    assert "base_model" not in card  # `bundled` is no model on the Hub
    assert "![comparison.png](./comparison.png)" in text
    assert "![loss.png](./loss.png)" in text
    assert "`<robot>`" in text

    seen = b"".join([*hub.bodies, *files.values(), *hub.large.values(), everything_below(tmp_path)])
    assert TOKEN.encode() not in seen
    assert TOKEN not in result.out + result.err
    assert "Traceback" not in result.err


@pytest.mark.usefixtures("_use")
def test_repository_is_created_before_training(hub: FakeHub, train: Train, tmp_path: Path) -> None:
    hub.answers.append(("POST /api/repos/create", 500))
    result = train(output_dir=tmp_path / "out", push_to_hub=True, hub_token=TOKEN)
    assert result.code == 1
    assert "HTTP 500" in result.err
    assert "training" not in result.err  # the progress bar
    assert not (tmp_path / "out" / "learned_embeds.safetensors").exists()


@pytest.mark.usefixtures("_use")
def test_full_pipeline_is_uploaded_and_loads(hub: FakeHub, train: Train, tmp_path: Path) -> None:
    import torch
    from diffusers import StableDiffusionPipeline
    from safetensors.torch import load

    options: dict[str, Any] = {"push_to_hub": True, "hub_token": TOKEN, "hub_model_id": "alice/whole"}
    result = train(output_dir=tmp_path / "out", save_as_full_pipeline=True, **options)
    assert result.code == 0, result.err
    said = "icom: at the end the embedding, the whole pipeline and the model card go to alice/whole on the Hub.\n"
    assert said in result.out
    files = hub.repositories["alice/whole"].files
    assert {"model_index.json", "unet/config.json", "vae/config.json", "learned_embeds.safetensors"} <= set(files)
    assert not [name for name in files if "checkpoint" in name or "metrics" in name]
    downloaded = tmp_path / "downloaded"
    for name, content in files.items():
        (downloaded / name).parent.mkdir(parents=True, exist_ok=True)
        (downloaded / name).write_bytes(content)
    pipeline = StableDiffusionPipeline.from_pretrained(str(downloaded))
    row = pipeline.text_encoder.get_input_embeddings().weight[pipeline.tokenizer.convert_tokens_to_ids("<robot>")]
    assert torch.equal(row, load(files["learned_embeds.safetensors"])["<robot>"][0])

    # A later run in the same folder, without the pipeline: the old one is not sent with it.
    options["hub_model_id"] = "alice/rows"
    assert train(output_dir=tmp_path / "out", seed=8, **options).code == 0
    assert "model_index.json" not in hub.repositories["alice/rows"].files


@pytest.mark.usefixtures("_use")
def test_finetuned_pipeline_is_uploaded_and_draws(hub: FakeHub, icom: Train, tmp_path: Path) -> None:
    """What lies at the top of the repository is the pipeline with the trained weights; nothing else goes there."""
    out = tmp_path / "my-unet"
    options: dict[str, Any] = {"output_dir": out, "push_to_hub": True, "hub_token": TOKEN, "checkpointing_steps": 1}
    words = finetune_arguments(**options, validation_steps=1)
    (tmp_path / "my-unet").mkdir()
    (out / "private-notes.txt").write_text("not yours")
    result = icom(*words, "--validation_prompts", "a red ball")
    assert result.code == 0, result.err
    said = "icom: at the end the pipeline and a model card go to alice/my-unet on the Hub.\n"
    assert result.out.index(said) < result.out.index("Trained 2 steps")
    assert f"on the Hub: {hub.url}/alice/my-unet" in result.out
    files = hub.repositories["alice/my-unet"].files
    own = {"README.md", "config.yaml", "loss.png", "validation/step-2.png"}
    assert set(files) >= NEEDED | own
    assert {name.split("/")[0] for name in set(files) - own} == {
        *("model_index.json", "scheduler", "text_encoder", "tokenizer", "unet", "vae", ".gitattributes"),
    }
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert files[weights] == (out / "current_pipeline" / weights).read_bytes()
    _, header, text = files["README.md"].decode().split("---\n", 2)
    card = yaml.safe_load(header)
    assert card["library_name"] == "diffusers"
    assert "text-to-image" in card["tags"]
    assert "base_model" not in card
    assert "![validation/step-2.png](./validation/step-2.png)" in text
    named = ["--pretrained_model_name_or_path", "alice/my-unet", "--output_dir", str(tmp_path / "drawn")]
    drawn = icom("generate", *named, "--prompt", "a ball", "--resolution=64", "--num_inference_steps=2")
    assert drawn.code == 0, drawn.err

    seen = b"".join([*hub.bodies, *files.values(), *hub.large.values(), everything_below(out)])
    assert TOKEN.encode() not in seen
    assert TOKEN not in result.out + result.err
    assert not [name for name, content in files.items() if str(BUNDLE).encode() in content]

    hub.answers.append(("POST .*/commit/", 500))  # at a second end, where nothing is left to train
    again = icom(*words, "--resume_from_checkpoint=latest")
    assert again.code == 1
    assert "The upload to alice/my-unet failed (HTTP 500)." in again.err
    commands = [shlex.split(line) for line in again.err.splitlines() if line.startswith("  hf upload")]
    assert [command[3] for command in commands] == [str(out / "current_pipeline"), str(out)]
    hub.answers.clear()
    again = icom(*words, "--resume_from_checkpoint=latest")
    assert again.code == 0
    assert "Step 2 was done already: wrote all again" in again.out


@pytest.mark.usefixtures("_use")
def test_bad_token_stops_before_the_unet_is_loaded(hub: FakeHub, icom: Train, tmp_path: Path) -> None:
    words = finetune_arguments(output_dir=tmp_path / "out", push_to_hub=True, hub_token="hf_WrongTokenOfTheTests")
    result = icom(*words)
    assert result.code == 1
    assert "HTTP 401" in result.err
    assert "hf_Wrong" not in result.out + result.err
    assert not (tmp_path / "out/config.yaml").exists()


@pytest.mark.usefixtures("_use")
@pytest.mark.parametrize("token", ["hf_WrongTokenOfTheTests", "hf_Wrong\u00e9Token", "hf_Wrong\nToken", None])
def test_bad_token_stops_before_training(hub: FakeHub, train: Train, tmp_path: Path, token: str | None) -> None:
    result = train(output_dir=tmp_path / "out", push_to_hub=True, hub_token=token)
    assert result.code == 1
    assert "Traceback" not in result.err
    assert "hf_Wrong" not in result.out + result.err
    assert "training" not in result.err
    assert not hub.repositories
    if token in ("hf_WrongTokenOfTheTests", None):
        assert "HTTP 401" in result.err
        assert "hf auth login" in result.err


@pytest.mark.usefixtures("_use")
def test_someone_elses_repository_stops_before_training(hub: FakeHub, train: Train, tmp_path: Path) -> None:
    hub.repositories["bob/robot"] = Repository()  # public: reading it is allowed
    result = train(output_dir=tmp_path / "out", push_to_hub=True, hub_token=TOKEN, hub_model_id="bob/robot")
    assert result.code == 1
    assert "bob/robot (HTTP 403)" in result.err
    assert "training" not in result.err


@pytest.mark.usefixtures("_use")
def test_name_that_the_hub_does_not_allow(hub: FakeHub, train: Train, tmp_path: Path) -> None:
    result = train(output_dir=tmp_path / "my robot", push_to_hub=True, hub_token=TOKEN)
    assert result.code == 2
    assert "'my robot'" in result.err
    assert "--hub_model_id" in result.err
    assert not hub.requests


@pytest.mark.usefixtures("_use")
def test_unreachable_hub_stops_before_training(hub: FakeHub, train: Train, tmp_path: Path) -> None:
    hub.stop()
    result = train(output_dir=tmp_path / "out", push_to_hub=True, hub_token=TOKEN)
    assert result.code == 1
    assert "cannot be reached" in result.err
    assert "training" not in result.err


@pytest.mark.usefixtures("_use")
@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        ("POST .*/commit/", DROP, "RemoteProtocolError"),
        ("POST .*/commit/", 500, "HTTP 500"),
        ("PUT /lfs-store/", 403, "HTTP 403"),
        ("POST /api/validate-yaml", 400, "HTTP 400"),
    ],
)
def test_hub_that_dies_during_the_upload_costs_nothing(
    hub: FakeHub, train: Train, tmp_path: Path, request_: str, status: int, reason: str
) -> None:
    out = tmp_path / "my out put"
    hub.answers.append((request_, status))
    result = train(output_dir=out, push_to_hub=True, hub_token=TOKEN, hub_model_id="robot")
    assert result.code == 1
    assert "Traceback" not in result.err
    assert TOKEN not in result.out + result.err
    assert f"The upload to alice/robot failed ({reason}). Everything is in {out}" in result.err
    assert {path.name for path in out.iterdir()} >= RESULTS - {"comparison.png"}

    if status == DROP:  # the command that the message gives does it, and sends no more than we would have
        hub.answers.clear()
        command = shlex.split(result.err.splitlines()[-1])
        assert command[0] == "hf"
        subprocess.run(
            [sys.executable, "-m", "huggingface_hub.cli.hf", *command[1:]],
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN},
            check=True,
            capture_output=True,
        )
        files = hub.repositories["alice/robot"].files
        assert set(files) == RESULTS - {"comparison.png"} | {".gitattributes"}
        embedding = "learned_embeds.safetensors"
        assert files[embedding] == (out / embedding).read_bytes()


# Download.


@pytest.mark.long
def test_model_from_the_hub_then_from_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    """Also: the model that moved is found at its new place, and told once."""
    moved, place = "runwayml/stable-diffusion-v1-5", "stable-diffusion-v1-5/stable-diffusion-v1-5"
    complete_repository(hub, place)
    home = tmp_path / "home"
    arguments = train_arguments(output_dir=tmp_path / "out", pretrained_model_name_or_path=moved)
    result = in_process_of_its_own(hub, home, *arguments)
    assert result.code == 0, result.err
    assert [line for line in result.err.splitlines() if "runwayml" in line] == [
        f"icom: {moved} is gone from the Hub; taking its copy {place}."
    ]
    assert not [request for request in hub.requests if "runwayml" in request]
    assert hub.downloaded == NEEDED
    assert f"base_model: {place}\n" in (tmp_path / "out" / "README.md").read_text()

    hub.stop()
    arguments = train_arguments(output_dir=tmp_path / "again", pretrained_model_name_or_path=place)
    again = in_process_of_its_own(hub, home, *arguments)
    assert again.code == 0, again.err
    embeddings = [(tmp_path / run / "learned_embeds.safetensors").read_bytes() for run in ("out", "again")]
    assert embeddings[0] == embeddings[1]


@pytest.mark.usefixtures("_use")
def test_variant_and_revision(hub: FakeHub, train: Train, icom: Train, tmp_path: Path) -> None:
    """Only the variant's weights are fetched, of that revision, and `icom generate` takes the same ones."""
    repository = complete_repository(hub, "sd/fp16")
    for part, stem in (("text_encoder", "model"), *((p, "diffusion_pytorch_model") for p in ("unet", "vae"))):
        weights = repository.files.pop(f"{part}/{stem}.safetensors")
        repository.files[f"{part}/{stem}.fp16.safetensors"] = weights
    options = {"variant": "fp16", "revision": repository.commit}
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path="sd/fp16", **options)
    assert result.code == 0, result.err
    large = {name for name in hub.downloaded if name.endswith((".safetensors", ".bin"))}
    assert len(large) == 3
    assert all(name.endswith(".fp16.safetensors") for name in large)
    embedding = str(tmp_path / "out" / "learned_embeds.safetensors")
    drawing = ("--prompt", "a <robot>", "--num_inference_steps", "1", "--output_dir", str(tmp_path / "pictures"))
    result = icom("generate", "--embedding", embedding, *drawing)
    assert result.code == 0, result.err
    assert not [request for request in hub.requests if "/main" in request]


def not_there(hub: FakeHub) -> None:
    """An empty Hub."""


def gated(hub: FakeHub) -> None:
    hub.serve("some/model", BUNDLE).gated = True


def no_pipeline(hub: FakeHub) -> None:
    hub.repositories["some/model"] = Repository({"README.md": b"", "unet/config.json": b"{}"})


def broken(hub: FakeHub) -> None:
    hub.answers.append(("GET /api/models", 500))


def dropping(hub: FakeHub) -> None:
    hub.answers.append(("GET /api/models", DROP))


def no_cdn(hub: FakeHub) -> None:
    hub.serve("some/model", BUNDLE)
    hub.answers.append(("GET /lfs-store/", 403))


@pytest.mark.usefixtures("_use")
@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (not_there, {}, "No model some/model"),
        (not_there, {"pretrained_model_name_or_path": "some/mo--del"}, "No model some/mo--del"),
        (gated, {}, "some/model is gated"),
        (no_pipeline, {}, "lacks scheduler/scheduler_config.json, text_encoder/config.json"),
        (broken, {}, "cannot be reached"),
        (dropping, {}, "cannot be reached"),
        (no_cdn, {}, "refuses some/model (HTTP 403)"),
        (FakeHub.stop, {}, "cannot be reached"),
        (gated, {"revision": "nightly"}, "no revision 'nightly'"),
    ],
)
def test_model_that_cannot_be_had(
    hub: FakeHub,
    train: Train,
    tmp_path: Path,
    prepare: Callable[[FakeHub], object],
    options: dict[str, str],
    message: str,
) -> None:
    prepare(hub)
    result = train(output_dir=tmp_path / "out", **({"pretrained_model_name_or_path": "some/model"} | options))
    assert result.code == 1
    assert message in result.err
    assert "Traceback" not in result.err


@pytest.mark.usefixtures("_use")
def test_stored_token_that_expired(hub: FakeHub, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.serve("some/model", BUNDLE)
    monkeypatch.setenv("HF_TOKEN", "hf_WrongTokenOfTheTests")
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path="some/model")
    assert result.code == 1
    assert "refuses some/model (HTTP 401)" in result.err
    assert "hf_Wrong" not in result.err


@pytest.mark.usefixtures("_use")
def test_cache_that_cannot_be_written(hub: FakeHub, train: Train, tmp_path: Path) -> None:
    hub.serve("some/model", BUNDLE)
    (tmp_path / "cache").write_text("a file where the cache should be")
    result = train(output_dir=tmp_path / "out", pretrained_model_name_or_path="some/model")
    assert result.code == 1
    assert f"Cannot write the cache {tmp_path / 'cache'}" in result.err


@pytest.mark.usefixtures("_use")
def test_tokenizer_from_the_hub(hub: FakeHub, train: Train, tmp_path: Path) -> None:
    complete_repository(hub, "some/model")
    assert train(output_dir=tmp_path / "out", tokenizer_name="some/model").code == 0
    assert {name for name in hub.downloaded if not name.endswith(".json")} == set()


@pytest.mark.usefixtures("_use")
def test_params_downloads_configs_only(hub: FakeHub, icom: Train) -> None:
    complete_repository(hub, "some/model")
    result = icom("params", "some/model", "--json")
    assert result.code == 0, result.err
    assert hub.downloaded == {name for name in NEEDED if name.endswith("config.json") or name == "model_index.json"} - {
        "tokenizer/tokenizer_config.json"
    }
    bundled = icom("params", "bundled", "--json")
    assert json.loads(result.out) == json.loads(bundled.out) | {"model": "some/model"}


@pytest.mark.usefixtures("_use")
def test_params_of_what_is_no_pipeline(hub: FakeHub, icom: Train) -> None:
    no_pipeline(hub)
    result = icom("params", "some/model")
    assert result.code == 1
    assert "lacks scheduler/scheduler_config.json, text_encoder/config.json, vae/config.json" in result.err
