"""No learned word without effect goes unnoticed, in captions and in prompts.

Guards icom.methods.prompts and icom.methods.embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from icom.config.words import placeholder_tokens
from icom.data.captions import TEMPLATES
from icom.errors import UsageError
from icom.methods.embedding import add_words, check_captions
from icom.methods.embedding_file import Word, save_embedding
from icom.methods.prompts import as_taught, check_prompts
from icom.models import loading
from tests.support.command import Result, Run, assert_message, assert_refused

Draw = Callable[..., Result]
LONG = "a red star " * 26
"""More tokens than the text encoder reads."""


def word(token: str, vectors: int) -> Word:
    return Word(token, torch.zeros(vectors, 128), Path("learned_embeds.safetensors"), Path("learned_embeds"))


def check(prompts: list[str], *words: Word, negative: str | None = None) -> list[str]:
    """check_prompts with the bundled tokenizer, taught as diffusers does."""
    tokenizer = loading.load_tokenizer(loading.find("bundled"))
    for one in words:
        tokenizer.add_tokens(placeholder_tokens(one.token, len(one.rows)))
    return check_prompts(tokenizer, prompts, negative, words)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The word <mine> for the bundled model, of two vectors."""
    path = tmp_path / "mine.safetensors"
    save_embedding(path, "<mine>", torch.randn(2, 128, generator=torch.Generator().manual_seed(0)))
    return path


@pytest.fixture
def draw(icom: Run, tmp_path: Path) -> Draw:
    """Draw small pictures in one step to tmp_path/out."""
    options = ("--num_inference_steps=1", "--resolution=32", f"--output_dir={tmp_path / 'out'}")
    return lambda *arguments: icom("generate", *options, *arguments)


# Refused.


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a photo of a toy"], "teaches <mine>, and no prompt says it: it would have no effect. Write it"),
        (["a photo of mine", "learned_embeds", "< mine >"], "no prompt says it"),
        (["a <mine>", "a <yours>"], "The prompt 'a <yours>' says <yours>, which nothing teaches"),
        (["a <mine>", "embedding:mine"], "says embedding:mine, which nothing teaches"),
        (["<mine> <lora:toy:1>"], "says <lora:toy:1>, which nothing teaches"),
        ([f"{LONG} <mine>"], "reads 75 tokens, and <mine> in the prompt 'a red star"),
        (["a " * 74 + "<mine>"], "reads 75 tokens, and <mine>_1 in the prompt"),  # its second vector alone
        (["<mine>", "a " * 75 + "<mine>"], "and <mine> in the prompt 'a a"),
    ],
    ids=str,
)
def test_word_without_effect_is_refused(prompts: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        check(prompts, word("<mine>", 2))
    assert message in str(error.value)


def test_word_that_nothing_teaches(draw: Draw, tmp_path: Path) -> None:
    result = draw("--prompt", "a photo of <mine>")
    assert_refused(result, 2, "says <mine>, which nothing teaches", "Name its file with --embedding")
    result = draw("--prompt", "a photo", "--negative_prompt", "<mine>")
    assert_refused(result, 2, "The prompt '<mine>' says <mine>, which nothing teaches")
    assert not list(tmp_path.rglob("*.png"))


def test_embedding_that_no_prompt_says(draw: Draw, mine: Path, tmp_path: Path) -> None:
    result = draw("--prompt", "a photo of mine", f"--embedding={mine}")
    assert_refused(result, 2, f"{mine} teaches <mine>, and no prompt says it", '--prompt "a photo of <mine>"')
    # Without guidance a negative prompt does nothing.
    negative = ("--negative_prompt", "<mine>")
    result = draw("--prompt", "a photo", f"--embedding={mine}", *negative, "--guidance_scale=1")
    assert_refused(result, 2, "no prompt says it")
    assert not list(tmp_path.rglob("*.png"))
    assert draw("--prompt", "a photo", f"--embedding={mine}", *negative).err.count("icom:") == 0


@pytest.mark.parametrize(("token", "vectors", "prompt"), [("obo", 1, "a robot"), ("obo", 2, "a robot, obo")])
def test_word_inside_another(token: str, vectors: int, prompt: str) -> None:
    with pytest.raises(UsageError, match=r"obo is read inside another word. Name it anew, as in .* FILE=<my-obo>"):
        check([prompt], word(token, vectors))


def test_word_of_a_whole_pipeline_is_cut_off(tmp_path: Path) -> None:
    """Saved in the model's own tokenizer, without --embedding."""
    tokenizer = loading.load_tokenizer(loading.find("bundled"))
    tokenizer.add_tokens(["<mine>", "<mine>_1"])
    tokenizer.save_pretrained(tmp_path)
    tokenizer = loading.load_tokenizer(loading.ModelSource("bundled", loading.BUNDLE, tokenizer=tmp_path))
    assert check_prompts(tokenizer, ["a <mine>"], None, []) == []
    with pytest.raises(UsageError, match="and <mine>_1 in the prompt"):
        check_prompts(tokenizer, ["a " * 74 + "<mine>"], None, [])


# Warned of.


def test_what_the_limit_cuts_off_is_said(draw: Draw, mine: Path) -> None:
    result = draw("--prompt", f"<mine> {LONG}, a blue car", f"--embedding={mine}")
    cut = "this is left out: 'red star a red star , a blue car'"  # 73 of 3 x 26 + 4 tokens stand beside the two
    assert_message(result, 0, "reads 75 tokens; of the prompt '<mine> a red star", cut)


def test_exactly_as_many_tokens_as_are_read() -> None:
    """73 and the two of the word; the tokenizer itself says how long that is."""
    tokenizer = loading.load_tokenizer(loading.find("bundled"))
    assert len(tokenizer("a " * 73).input_ids) == 75
    assert check(["a " * 73 + "<mine>"], word("<mine>", 2)) == []
    (warning,) = check(["<mine> " + "a " * 74], word("<mine>", 2))
    assert "this is left out: 'a '" in warning


def test_prompts_without_the_word_among_others() -> None:
    (warning,) = check(["a toy", "a <mine>"], word("<mine>", 2))
    assert warning == "the prompt 'a toy' says none of the learned words: --embedding has no effect on it."
    assert check(["a toy", "a car"], word("<mine>", 2), negative="a <mine>") == []
    assert check(["a <mine>", "a <yours>"], word("<mine>", 1), word("<yours>", 3)) == []


# Read as meant.


def test_another_case_gets_all_rows(draw: Draw, mine: Path, tmp_path: Path) -> None:
    """diffusers finds <MINE> in the vocabulary and then no <MINE> to put the second vector beside."""
    assert as_taught("a <MINE> and <Mine>", [word("<mine>", 2)]) == "a <mine> and <mine>"
    assert draw("--prompt", "a <MINE>", "a <mine>", f"--embedding={mine}").code == 0
    first, second = (path.read_bytes() for path in sorted((tmp_path / "out").iterdir()))
    assert first == second


def test_options_that_are_repeated_add_up(draw: Draw, mine: Path, tmp_path: Path) -> None:
    save_embedding(tmp_path / "yours.safetensors", "<yours>", torch.randn(1, 128))
    result = draw(
        *("--prompt", "a <mine>", "--embedding", str(mine), "--seed", "1", "2", "--prompt", "a <yours>", "a toy"),
        *("--embedding", str(tmp_path / "yours.safetensors"), "--seed", "3"),
    )
    assert result.code == 0, result.err
    prompts = ("000-a-mine", "001-a-yours", "002-a-toy")
    expected = {f"{prompt}-seed{seed}.png" for prompt in prompts for seed in (1, 2, 3)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected


# Captions.


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("token", ["<mine>", "<Mine>", "sks-toy", "r0b0t", "\U0001f4a1"])
def test_words_that_leave_captions_alone(kind: str, token: str) -> None:
    """Thirteen vectors: <x>_1 is the beginning of <x>_10."""
    tokenizer = loading.load_tokenizer(loading.find("bundled"))
    plain = [tokenizer(template.format("")).input_ids for template in TEMPLATES[kind]]
    add_words(tokenizer, token, "toy", 13)
    tokens = placeholder_tokens(token, 13)
    check_captions(tokenizer, TEMPLATES[kind], tokens)
    for template, without in zip(TEMPLATES[kind], plain, strict=True):
        ids = tokenizer(template.format(" ".join(tokens))).input_ids
        assert ids == [*without[:-1], *range(807, 820), without[-1]]


def test_captions_are_those_of_the_run() -> None:
    """Only the style's captions say "painting"."""
    for kind in TEMPLATES:
        tokenizer = loading.load_tokenizer(loading.find("bundled"))
        add_words(tokenizer, "ainting", "toy", 1)
        if kind == "style":
            with pytest.raises(UsageError, match="in the style of ainting' becomes 'a</w> p</w> ainting in</w>"):
                check_captions(tokenizer, TEMPLATES[kind], ["ainting"])
        else:
            check_captions(tokenizer, TEMPLATES[kind], ["ainting"])
