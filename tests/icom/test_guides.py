"""The pages docs/coming-from-*.md: each of their command lines runs word for word, each option in them exists.

Guards docs/coming-from-*.md.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from icom.cli import COMMANDS, parse
from icom.data.images import BUNDLED_CONCEPTS
from icom.models.loading import BUNDLE
from tests.support.clone import TORCH, Clone, make_wheel
from tests.support.command import ROOT, Run, long
from tests.support.fake_hub import FakeHub, point_to

PAGES = sorted((ROOT / "docs").glob("coming-from-*.md"))
SHORTEST = next(page for page in PAGES if page.stem == "coming-from-kohya")
MODEL = "stable-diffusion-v1-5/stable-diffusion-v1-5"
"""On the loopback Hub this is the bundled model."""
PICTURE_FOLDERS = ("cat", "img/10_mychar", "pictures")
EMBEDDING_FOLDERS = ("stable-diffusion-webui/embeddings", "ComfyUI/models/embeddings")
"""What the pages take for granted on their reader's disk."""

SHORTER = {
    r"(--max_train_steps[ =])\d+": r"\g<1>2",
    r"(--resolution[ =])512": r"\g<1>64",
    r"(--mixed_precision[ =])bf16": r"\g<1>no",  # a CPU without it is slower
}
"""All that is changed in a line before it runs. The line as it stands is parsed."""

SCRIPT = "textual_inversion_icom.py"


def commands(page: Path) -> list[str]:
    """The command lines in the page's bash blocks, continued lines in one piece."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


@dataclass
class Reader:
    """Somebody in a clone of icom who types what a page says.

    Attributes:
        clone: `make` builds environments in it from stand-in wheels; the programs in them are this environment's own.
        icom: runs a command in this process.
        entered: lines that changed the shell, such as `source …`.
    """

    clone: Clone
    icom: Run
    entered: list[str] = field(default_factory=list)

    def type(self, line: str) -> None:
        """Run a line; it has to succeed."""
        for how, (_, check) in NOT_RUN.items():
            if re.match(how, line):
                check(self, line)
                return
        parse_training(self, line)
        for written, shorter in SHORTER.items():
            line = re.sub(written, shorter, line)
        words = shlex.split(line, comments=True)
        if words[0] == "icom":
            done = self.icom(*words[1:])
            assert done.code == 0, (line, done)
        else:
            self.shell(line)
        if words[0] == "cp" and words[-1] == "hosts":  # "then name your machines in it"
            Path("hosts").write_text("localhost\n")
        if words[:2] == ["icom", "train"] or SCRIPT in words:
            check_learned(words)

    def shell(self, line: str) -> None:
        """Run a line in bash, after those that changed it."""
        script = "\n".join([*self.entered, line])
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=self.clone.folder,
            env=self.clone.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        if line.split(maxsplit=1)[0] in ("source", "eval", "export"):
            self.entered.append(line)


def training_options(line: str) -> list[str] | None:
    """The options of `icom train` in a line, whoever starts it; None where it is about something else."""
    words = shlex.split(line, comments=True)
    for starts in (["icom", "train"], ["icom", "launch", "mpirun"]):
        if words[: len(starts)] == starts:
            return words[words.index("--") + 1 :] if "--" in words else words[len(starts) :]
    return words[words.index(SCRIPT) + 1 :] if SCRIPT in words else None


def parse_training(reader: Reader, line: str) -> None:
    """The line's training options, as they stand, are valid; other lines are not looked at."""
    options = training_options(line)
    if options is not None:
        printed = reader.icom("train", *options, "--print_config")
        assert printed.code == 0, (line, printed)


def parse_launch(reader: Reader, line: str) -> None:
    parse_training(reader, line)
    words = shlex.split(line, comments=True)
    dry = reader.icom(*words[1:3], "--dry_run", *words[3:])
    assert dry.code == 0 and SCRIPT in dry.out, (line, dry)


def parse_mpirun(reader: Reader, line: str) -> None:
    parse_training(reader, line)
    words = shlex.split(line)
    config = words[words.index("--config_file") + 1]
    assert words[words.index("accelerate") + 1] == "launch" and (ROOT / config).is_file()
    # Rank 0's half of it, alone: no MPI is asked to start anything.
    assert {"-f", "-n", "-ppn"} < set(words[: words.index("accelerate")])


def parse_only(reader: Reader, line: str) -> None:
    parse(shlex.split(line, comments=True)[1:])


def parse_make(reader: Reader, line: str) -> None:
    """`make -n` knows the target; the extra exists; the training that it would start has valid options."""
    words = shlex.split(line, comments=True)
    dry = subprocess.run([words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert dry.returncode == 0, (line, dry)
    extras = "".join(word.removeprefix("EXTRAS=") for word in words if word.startswith("EXTRAS="))
    assert not extras or re.search(rf"^{extras} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for would_run in dry.stdout.splitlines():
        parse_training(reader, would_run)


def look(reader: Reader, line: str) -> None:
    done = reader.icom(*shlex.split(line, comments=True)[1:])
    assert done.code in (0, 1) and "✓" in done.out and "Traceback" not in done.err, done


NOT_RUN: dict[str, tuple[str, Callable[[Reader, str], None]]] = {
    r"make setup-master EXTRAS=": ("needs a network (tests/icom/test_setup_env.py): make -n", parse_make),
    r"make single-node-test": ("minutes on a CPU without bf16 (test_train.py runs such a line): make -n", parse_make),
    r"icom launch mpirun ": ("needs other hosts (tests/icom/launch has them): a dry run", parse_launch),
    r"mpirun ": ("needs other hosts (tests/icom/parallel/test_distributed.py runs it): parsed", parse_mpirun),
    r"icom (provision|teardown)\b": ("needs AWS and costs money (tests/provisioning): parsed", parse_only),
    r"icom train --on ": ("needs the cluster (tests/provisioning/test_train_on.py): parsed", parse_training),
    r"icom doctor\b": ("runs, but whether this machine is fit is not the page's affair", look),
}
"""Lines that do not run as they stand: what they begin with -> why, and what is done instead. All others run."""


def check_learned(words: list[str]) -> None:
    options = dict(zip(words, [*words[1:], ""], strict=True))
    options |= dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    learned = load_file(Path(options["--output_dir"], "learned_embeds.safetensors"))
    vectors = int(options.get("--num_vectors", "1"))
    assert {name: rows.shape[0] for name, rows in learned.items()} == {options["--placeholder_token"]: vectors}


@pytest.fixture
def reader(tmp_path: Path, icom: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """On a disk with the pictures that the pages name, and with a Hub that has the model and dicoo."""
    clone = Clone(tmp_path / "clone")
    make_wheel(clone.wheels, "torch", TORCH)
    for name in (SCRIPT, "accelerate_configs", "hosts.example"):
        (clone.folder / name).symlink_to(ROOT / name)
    for program, module in (("icom", "icom"), ("accelerate", "accelerate.commands.accelerate_cli")):
        (clone.tools / program).write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m {module} "$@"\n')
        (clone.tools / program).chmod(0o755)
    pictures = sorted((BUNDLED_CONCEPTS / "red-moon").glob("*.png"))
    for name in PICTURE_FOLDERS:
        (clone.folder / name).mkdir(parents=True)
        for picture in pictures[:2]:
            shutil.copy(picture, clone.folder / name)
    for name in EMBEDDING_FOLDERS:
        (clone.folder / name).mkdir(parents=True)
    dicoo = tmp_path / "dicoo" / "concept_images"
    dicoo.mkdir(parents=True)
    for index, picture in enumerate(pictures):
        Image.open(picture).convert("RGB").save(dicoo / f"{index}.jpeg")
    monkeypatch.chdir(clone.folder)
    with FakeHub() as hub:
        hub.serve(MODEL, BUNDLE)
        hub.serve("sd-concepts-library/dicoo", dicoo.parent)
        point_to(hub, tmp_path, monkeypatch)
        clone.env |= {"HF_ENDPOINT": hub.url}
        clone.env |= {k: os.environ[k] for k in ("HF_HOME", "HF_HUB_DISABLE_XET", "ICOM_CACHE_DIR", "OMP_NUM_THREADS")}
        yield Reader(clone, icom)


@pytest.mark.parametrize(
    "page", [page if page == SHORTEST else long(page) for page in PAGES], ids=lambda page: page.stem
)
def test_every_command_line_works(reader: Reader, page: Path) -> None:
    """In the page's order, one line after the other, as its reader types them."""
    lines = commands(page)
    assert any(line.startswith("icom generate") or line.startswith("cp ") for line in lines)
    for line in lines:
        reader.type(line)


def test_what_is_not_run_is_still_in_the_pages() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    for how in NOT_RUN:
        assert any(re.match(how, line) for line in lines), f"no line in the pages begins with {how}: remove it here"


GUIDE = """
save_steps save_as_full_pipeline num_vectors pretrained_model_name_or_path revision tokenizer_name train_data_dir
placeholder_token initializer_token learnable_property repeats output_dir seed resolution center_crop train_batch_size
num_train_epochs max_train_steps gradient_accumulation_steps gradient_checkpointing learning_rate scale_lr lr_scheduler
lr_warmup_steps lr_num_cycles dataloader_num_workers adam_beta1 adam_beta2 adam_weight_decay adam_epsilon push_to_hub
hub_token hub_model_id logging_dir mixed_precision allow_tf32 report_to validation_prompt num_validation_images
validation_steps validation_epochs local_rank checkpointing_steps checkpoints_total_limit resume_from_checkpoint
enable_xformers_memory_efficient_attention no_safe_serialization
""".split()
"""The options of the script of Intel's guide."""
GUIDE_TARGETS = """
install-miniconda install-dependencies download-training-images single-node-test setup-stable-diffusion-icom-master
""".split()
"""The targets of its makefile."""


def options_in(help_text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z]\w*", help_text))


@pytest.fixture
def known(icom: Run) -> set[str]:
    """All options of all of icom's commands, as `--help` shows them."""
    return {option for command in COMMANDS for option in options_in(icom(*command.split(), "--help").out)}


def test_every_option_in_the_pages_exists(known: set[str], icom: Run) -> None:
    """In prose and tables; of a table's first column, which is the other tool's, where that is said to be the same."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        if page.stem not in ("coming-from-icom", "coming-from-diffusers"):
            text = re.sub(r"^\|.*?[^\\]\|", "|", text, flags=re.MULTILINE)
        named = {option for code in re.findall(r"`([^`]+)`", text) for option in options_in(code)}
        assert named - known == set(), page.name
        assert len(named) > 10
    assert {f"--{name}" for name in GUIDE} <= options_in(icom("train", "--help").out) and len(GUIDE) == 47


def test_every_target_in_the_pages_exists() -> None:
    named = {target for page in PAGES for target in re.findall(r"`make ([a-z-]+)", page.read_text())}
    guide = (ROOT / "docs" / "coming-from-icom.md").read_text()
    for target in sorted({*named, *GUIDE_TARGETS}):
        dry = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert dry.returncode == 0, dry.stderr
    assert all(f"`{target}`" in guide for target in GUIDE_TARGETS)


def test_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in PAGES:
        assert f"(docs/{page.name})" in readme
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)
