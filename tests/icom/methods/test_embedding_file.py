"""icom.methods.embedding_file: embeddings of other tools, `icom convert`, `--embedding` from the Hub and as FILE=word.

Guards icom.methods.embedding_file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from icom.config.words import placeholder_tokens
from icom.methods.embedding_file import load_embedding, save_embedding
from icom.models import loading, pipelines
from tests.support.command import Result, Run, assert_message, assert_refused
from tests.support.fake_hub import FakeHub, Repository

ROWS = torch.randn(2, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """This process's Hub, with an empty cache and nobody logged in."""
    from huggingface_hub import constants

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(os.environ["HF_ENDPOINT"], hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def a1111(rows: torch.Tensor, name: str | None) -> dict[str, Any]:
    """What the web UI's training tab saves."""
    return {
        "string_to_token": {"*": 265},
        "string_to_param": {"*": rows},
        "name": name,
        "step": 1499,
        "sd_checkpoint": "81761151",
        "sd_checkpoint_name": "v1-5-pruned",
    }


LAYOUTS: dict[str, tuple[Any, str]] = {
    "diffusers": ({"<cat>": ROWS}, "<cat>"),
    "diffusers of 2022, one vector, 1-D": ({"<cat>": ROWS[0]}, "<cat>"),
    "half precision": ({"<cat>": ROWS.half()}, "<cat>"),
    "bfloat16": ({"<cat>": ROWS.bfloat16()}, "<cat>"),
    "a parameter on its own graph": ({"<cat>": torch.nn.Parameter(ROWS.clone())}, "<cat>"),
    "A1111": (a1111(ROWS, "my-cat"), "my-cat"),
    "A1111, training still": (a1111(torch.nn.Parameter(ROWS.half()), "my-cat"), "my-cat"),
    "A1111 without a name": (a1111(ROWS, None), "old-file"),
    "A1111 named *": (a1111(ROWS, "*"), "old-file"),
    "A1111 with a sentence for a name": (a1111(ROWS, "my cat"), "old-file"),
    "kohya": ({"emb_params": ROWS}, "old-file"),
    "a list of one": ([{"<cat>": ROWS}], "<cat>"),
    "a list of vectors": ([{"<cat>": ROWS[0]}, {"<cat>_1": ROWS[1]}], "<cat>"),
    "bare": (ROWS, "old-file"),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(tmp_path: Path, layout: str, legacy: bool) -> None:
    content, token = LAYOUTS[layout]
    path = tmp_path / "old-file.pt"
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    read, rows = load_embedding(path)
    assert read == token
    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    expected = ROWS[:1] if "1-D" in layout else ROWS
    torch.testing.assert_close(rows, expected, atol=1e-2, rtol=1e-2)
    if "half" not in layout and "16" not in layout and "still" not in layout:
        assert torch.equal(rows, expected)


@pytest.mark.parametrize("layout", ["diffusers", "diffusers of 2022, one vector, 1-D", "half precision", "A1111"])
@pytest.mark.usefixtures("_here")
def test_converted_file_is_in_diffusers_what_the_old_one_was(icom: Run, layout: str) -> None:
    """diffusers reads both; token and rows are the same, and of full precision."""
    content, token = LAYOUTS[layout]
    torch.save(content, "old.pt")
    result = icom("convert", "old.pt")
    assert result.code == 0, result.err
    tables = []
    for file in ("old.pt", "old.safetensors"):
        model = loading.load(loading.find("bundled"), torch.float32)
        pipeline = pipelines.pipeline_of(model)
        pipeline.load_textual_inversion(file)
        ids = [pipeline.tokenizer.convert_tokens_to_ids(name) for name in placeholder_tokens(token, 2)]
        tables.append(model.text_encoder.get_input_embeddings().weight[ids])
        assert len(pipeline.tokenizer) == 807 + (1 if "1-D" in layout else 2)
    assert torch.equal(*tables)
    assert load_file("old.safetensors")[token].dtype == torch.float32


@pytest.mark.usefixtures("_here")
def test_convert_says_what_became_of_it(icom: Run) -> None:
    torch.save({"emb_params": ROWS.half()}, "cat toy.pt")
    result = icom("convert", "cat toy.pt")
    assert result.code == 0, result.err
    assert "cat toy.safetensors: cat-toy, 2 x 128, float32; opens in diffusers, A1111 and ComfyUI" in result.out
    assert "by its file's name: this one is `cat toy` in A1111 and `embedding:cat toy` in ComfyUI." in result.out
    assert_refused(icom("convert", "cat toy.pt=<mine>"), 1, "cat toy.safetensors exists already", "--output")
    assert icom("convert", "cat toy.pt=<mine>", "--output", "mine.safetensors").code == 0
    assert set(load_file("mine.safetensors")) == {"<mine>"}
    result = icom("convert", "cat toy.pt=<mine>", "--output", "no/where.safetensors")
    assert_refused(result, 1, "Cannot write no/where.safetensors: No such file", "Choose another --output.")


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize("command", [("convert", "old.pt"), ("generate", "--prompt=x", "--embedding", "old.pt")])
@pytest.mark.usefixtures("_here")
def test_pickled_code_is_not_run(icom: Run, command: tuple[str, ...]) -> None:
    torch.save({"<cat>": ROWS, "extra": Harmful()}, "old.pt")
    assert_refused(icom(*command), 1, "old.pt holds posix.system beside tensors", "Ask for a safetensors file")
    assert not Path("harmed").exists()
    torch.load("old.pt", weights_only=False)
    assert Path("harmed").exists()  # it would have


BAD = [
    ({"clip_l": torch.zeros(2, 768), "clip_g": torch.zeros(2, 1280)}, "several text encoders (clip_l, clip_g): SDXL"),
    ({"state_dict": {"unet": ROWS}}, "holds 1 entries; an embedding file has one"),
    ({"string_to_param": {"*": ROWS, "**": ROWS}}, "holds 2 entries"),
    ([{"<cat>": ROWS}, {"<dog>": ROWS[:, :64]}], "rows of several widths (64, 128)"),
    ([], "holds a list and no tensors"),
    (3, "holds a int and no tensors"),
    ({"<cat>": torch.zeros(2, dtype=torch.long)}, "expected (vectors, width)"),
    ({"<cat>": ROWS / 0}, "not finite"),
    ({"string_to_param": torch.nn.ParameterDict({"*": ROWS})}, "holds torch.nn.modules.container.ParameterDict beside"),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=[message for _, message in BAD])
@pytest.mark.usefixtures("_here")
def test_no_embedding(icom: Run, content: Any, message: str) -> None:
    torch.save(content, "old.pt")
    assert_refused(icom("convert", "old.pt"), 1, "old.pt", message)
    assert not Path("old.safetensors").exists()


@pytest.mark.usefixtures("_here")
def test_one_of_several_words(icom: Run) -> None:
    torch.save({"<cat>": ROWS, "<dog>": 2 * ROWS}, "old.pt")
    assert_refused(icom("convert", "old.pt"), 2, "old.pt holds several words (<cat>, <dog>)", "old.pt=<cat>")
    assert icom("convert", "old.pt=<dog>", "--output", "dog.safetensors").code == 0
    assert torch.equal(load_file("dog.safetensors")["<dog>"], 2 * ROWS)


@pytest.mark.usefixtures("_here")
def test_damaged_and_foreign_files(icom: Run) -> None:
    save_file({"clip_g": torch.zeros(1, 1280), "clip_l": torch.zeros(1, 768)}, "xl.safetensors")
    assert_refused(icom("convert", "xl.safetensors"), 1, "several text encoders (clip_l, clip_g)")
    torch.save({"<cat>": ROWS}, "old.pt")
    content = Path("old.pt").read_bytes()
    Path("old.pt").write_bytes(content[: len(content) // 2])
    assert_refused(icom("convert", "old.pt"), 1, "old.pt is damaged (", "Fetch it again")
    Path("old.pt").write_bytes(b"PK")
    assert_refused(icom("convert", "old.pt"), 1, "old.pt is damaged (")
    Path("old.pt").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert_refused(icom("convert", "old.pt"), 1, "old.pt is not a safetensors file, or damaged")
    with Path("old.pt").open("wb") as file:
        file.truncate(2**30)
    assert_refused(icom("convert", "old.pt"), 1, "too large for an embedding (1024 MB): a whole model?")
    assert_refused(icom("convert", "out/gone.bin"), 1, "out/gone.bin does not exist")


@pytest.mark.usefixtures("_here")
def test_own_pickled_copy_draws_the_same(train: Run, icom: Run) -> None:
    """--no_safe_serialization's learned_embeds.bin, and a header of 128 bytes, which begins as pickles do."""
    assert train(output_dir="run", no_safe_serialization=True, num_vectors=2).code == 0
    for name in ("learned_embeds.bin", "learned_embeds.safetensors"):
        result = draw(icom, "a <robot>", "--embedding", f"run/{name}", "--output_dir", name)
        assert result.code == 0, result.err
    first, second = (Path(n) / "000-a-robot-seed0.png" for n in ("learned_embeds.bin", "learned_embeds.safetensors"))
    assert first.read_bytes() == second.read_bytes()
    for padding in range(40):
        save_embedding(Path("own.safetensors"), f"<{'x' * padding}>", ROWS)
        if Path("own.safetensors").read_bytes()[0] == 0x80:
            break
    else:
        pytest.fail("no header of 128 bytes")
    assert load_embedding(Path("own.safetensors"))[0] == f"<{'x' * padding}>"


def draw(icom: Run, prompt: str, *arguments: str) -> Result:
    return icom("generate", "--prompt", prompt, "--num_inference_steps=1", "--resolution=32", *arguments)


@pytest.mark.usefixtures("_here")
def test_word_named_anew(icom: Run) -> None:
    torch.save(a1111(ROWS, "toy"), "a=b.pt")
    result = draw(icom, "a toy", "--embedding", "a=b.pt")
    assert_refused(result, 1, "a=b.pt holds toy, which is known already", "--embedding FILE=<my-toy>")
    assert draw(icom, "a <my-toy>", "--embedding", "a=b.pt=<my-toy>").code == 0
    for word in ("", "two words"):
        assert_refused(
            draw(icom, "a toy", "--embedding", f"a=b.pt={word}"), 2, "after the last = comes the word, one without"
        )
    # A word of several vectors whose second token is another's first.
    save_embedding(Path("one.safetensors"), "<my-toy>_1", ROWS)
    result = draw(icom, "a <my-toy>", "--embedding", "one.safetensors", "a=b.pt=<my-toy>")
    assert_refused(result, 1, "a=b.pt holds <my-toy>_1, which is known already")


# The Hub.


@pytest.mark.usefixtures("_here")
def test_embedding_from_the_hub_then_from_the_cache(icom: Run, hub: FakeHub) -> None:
    save_embedding(Path("cat.safetensors"), "<cat-toy>", ROWS)
    torch.save({"<cat-toy>": ROWS + 1}, "cat.bin")
    files = {"learned_embeds.bin": Path("cat.bin").read_bytes(), "README.md": b"", "concept_images/0.jpeg": b""}
    repository = hub.repositories["concepts/cat-toy"] = Repository(files)
    result = draw(icom, "a <cat-toy>", "--embedding", "concepts/cat-toy")
    assert result.code == 0, result.err
    assert hub.downloaded == {"learned_embeds.bin"}
    repository.files["learned_embeds.safetensors"] = Path("cat.safetensors").read_bytes()
    assert icom("convert", "concepts/cat-toy=<mine>").code == 0
    assert torch.equal(load_file("cat-toy.safetensors")["<mine>"], ROWS)  # of both files the safe one
    hub.stop()
    assert icom("convert", "concepts/cat-toy", "--output=again.safetensors").code == 0
    assert torch.equal(load_file("again.safetensors")["<cat-toy>"], ROWS)


@pytest.mark.usefixtures("_here")
def test_embedding_that_cannot_be_had(icom: Run, hub: FakeHub) -> None:
    hub.repositories["some/model"] = Repository({"unet/config.json": b"{}"})
    result = icom("convert", "some/model")
    assert_message(result, 1, "some/model on the Hub has no learned_embeds.safetensors or learned_embeds.bin.")
    assert_message(icom("convert", "no/where"), 1, "No embedding no/where: there is no such file, and no such (public)")
    hub.stop()
    result = icom("convert", "no/where")
    assert_message(result, 1, "cannot be reached and the embedding is not in the cache", "or give a file")
