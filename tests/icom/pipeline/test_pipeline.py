"""From a list of addresses to a trained UNet: all stages, parts, marks. Guards icom.pipeline and icom.config.pipeline.

With Slurm: tests/icom/pipeline/test_pipeline_slurm.py.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from icom.cli import parse
from icom.config.data import DataOptions
from icom.config.pipeline import load_pipeline_config, parse_numbers, stages_of, to_numbers
from icom.data.sources import open_source
from icom.errors import UsageError
from tests.support.command import ROOT, Result, assert_message, start_python
from tests.support.picture_server import caption, picture, pictures
from tests.support.waiting import wait_until

Icom = Callable[..., Result]
File = Callable[..., Path]
COUNT = 26
LEARN = {"max_train_steps": 2, "train_batch_size": 2, "seed": 1, "mixed_precision": "no", "report_to": "none"}
STAGES: dict[str, dict[str, Any]] = {
    "download": {"source": "${sources}", "parts": 3, "samples_per_shard": 4, "retries": 0, "timeout": 5},
    "reorganise": {"parts": 2, "samples_per_shard": 5},
    "index": {},
    "precompute": {"parts": 2, "resolution": [32], "samples_per_shard": 6},
    "train": LEARN | {"resolution": 32},
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    with pictures() as made:
        yield made


@pytest.fixture
def file(server: tuple[str, list[tuple[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> File:
    """Write a list of COUNT addresses, one of them dead, and pipeline.yaml with some of the stages."""
    monkeypatch.chdir(tmp_path)
    address, asked = server
    asked.clear()
    rows = [{"url": f"{address}/{n}.png", "caption": caption(n), "number": n} for n in range(COUNT)]
    rows[7]["url"] = f"{address}/gone"
    Path("urls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(*names: str, **changed: Any) -> Path:
        content: dict[str, Any] = {"output_dir": "work"}
        for name in names or STAGES:
            content[name] = dict(STAGES[name])
        if "download" in content:
            content["download"] |= {"source": "urls.jsonl", "allow_private_addresses": True}
        for key, value in changed.items():
            content[key] = (content.get(key) or {}) | value if isinstance(value, dict) else value
        path = tmp_path / "pipeline.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def go(icom: Icom, file: Path, *words: str) -> Result:
    return icom("data", "pipeline", str(file), *words)


def states(result: Result) -> dict[str, list[str]]:
    """Stage -> parts, whole, unfinished, failed, not begun, as the last table says."""
    lines = [line.split("  ") for line in result.out.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {row[0]: row[1:] for row in rows if row and row[0].split()[0] in STAGES and len(row) == 6}


def test_from_addresses_to_weights(file: File, icom: Icom) -> None:
    """Everything that could be fetched is trained on; once more there is nothing to do; more steps are done alone."""
    path = file()
    done = go(icom, path)
    assert done.code == 0, done
    assert states(done) == {
        "download": ["3", "3", "–", "–", "–"],
        "reorganise": ["2", "2", "–", "–", "–"],
        **{name: ["1", "1", "–", "–", "–"] for name in ("index", "train")},
        "precompute": ["2", "2", "–", "–", "–"],
    }
    tars = open_source(DataOptions(train_data_dir="work/reorganise"))
    found = {tars.read(number).caption: tars.read(number).picture for number in range(len(tars))}
    wanted = {caption(number): number for number in range(COUNT) if number != 7}
    assert len(tars) == COUNT - 1 and found.keys() == wanted.keys()
    for text, number in wanted.items():
        with Image.open(io.BytesIO(picture(number))) as drawn:
            assert found[text].tobytes() == drawn.tobytes()
    latents = open_source(DataOptions(train_data_dir="work/precompute"))
    assert latents.kind == "latents" and len(latents) == COUNT - 1
    assert Path("work/train/current_pipeline/model_index.json").exists()
    assert len(Path("work/train/metrics.jsonl").read_text().splitlines()) == 2
    again = go(icom, path)
    assert again.code == 0 and "all stages are whole: nothing to do" in again.out
    more = go(icom, path, "train.max_train_steps=3")
    assert more.code == 0 and "resumed after step 2" in more.out and "icom: precompute" not in more.out


COLLECT = ("download", "reorganise", "index")


def bytes_in(folder: str) -> dict[str, bytes]:
    return {path.as_posix(): path.read_bytes() for path in sorted(Path(folder).rglob("*.tar"))}


def test_parts_are_done_again_by_name(
    file: File, icom: Icom, server: tuple[str, list[tuple[str, str]]], tmp_path: Path
) -> None:
    """Those alone, and all that was made from them, which has to be said: results are removed."""
    path, (_, asked) = file(*COLLECT), server
    assert go(icom, path).code == 0
    before, list_of_files = bytes_in("work"), sorted(Path("work").rglob("*"))
    asked.clear()
    words = ("download.redo=3,1", "reorganise.redo=all", "index.redo=all")
    assert_message(
        go(icom, path, *words[:1]),
        2,
        "parts 1,3 of 3 of download to be done, but reorganise, index: made from what was there before",
        "reorganise.redo=all index.redo=all",
    )
    assert_message(go(icom, path, *words[:2]), 2, "but index: made from what")
    assert not asked and bytes_in("work") == before
    again = go(icom, path, *words)
    assert again.code == 0, again
    fetched = {int(name.strip("/").partition(".")[0]) for name, _ in asked if name.endswith(".png")}
    assert fetched == {n for n in range(COUNT) if n // 4 % 3 in (0, 2)} - {7}
    assert bytes_in("work") == before and sorted(Path("work").rglob("*")) == list_of_files
    # A part of the tars of N: the others are not touched.
    Path("work/reorganise/00001-00000.tar").write_bytes(b"")
    times = {name: name.stat().st_mtime_ns for name in Path("work/reorganise").glob("00002-*")}
    assert go(icom, path, "reorganise.redo=1", "index.redo=all").code == 0
    assert bytes_in("work") == before and {name: name.stat().st_mtime_ns for name in times} == times


def test_what_others_put_there_is_not_removed(file: File, icom: Icom) -> None:
    path = file("download")
    Path("work/download").mkdir(parents=True)
    Path("work/download/mine.txt").write_text("mine")
    assert_message(go(icom, path, "download.redo=all"), 1, "was not made by `icom data download`")
    assert Path("work/download/mine.txt").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_pipelines_go_on(number: signal.Signals, file: File, icom: Icom, tmp_path: Path) -> None:
    """The part under way is unfinished, those before it are whole, and the same command goes on to the same bytes."""
    hold = tmp_path / "hold"
    hold.touch()
    with pictures(held=hold) as (address, asked):
        path = file("download", "reorganise", download={"timeout": 60})
        rows = Path("urls.jsonl").read_text().splitlines()
        rows[20] = json.dumps({"url": f"{address}/held/20.png", "caption": caption(20)})  # of part 3
        Path("urls.jsonl").write_text("\n".join(rows))
        words = ("-m", "icom", "data", "pipeline", str(path))
        process = start_python(*words, environment=os.environ, folder=tmp_path)
        wait_until(lambda: any(name.startswith("/held") for name, _ in asked))
        assert states(go(icom, path, "--state"))["download"] == ["3", "2 (1-2)", "1 (3)", "–", "–"]
        assert_message(go(icom, path), 1, "Another run is writing to")
        process.send_signal(number)
        if number != signal.SIGKILL:
            wait_until(lambda: not hold.unlink(missing_ok=True))
        process.communicate()
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
        hold.unlink(missing_ok=True)
        assert states(go(icom, path, "--state")) == {
            "download": ["3", "2 (1-2)", "1 (3)", "–", "–"],
            "reorganise": ["2", "–", "–", "–", "2"],
        }
        asked.clear()
        done = go(icom, path)
        assert done.code == 0, done
        assert "icom: download, part 3 of 3" in done.out and "part 1 of 3" not in done.out
        found = open_source(DataOptions(train_data_dir="work/reorganise", cache_dir=str(tmp_path / "cache")))
        assert [found.read(n).caption for n in range(len(found))] == [caption(n) for n in range(COUNT) if n != 7]


def test_parts_that_fail(file: File, icom: Icom) -> None:
    """Their mark says why; what comes after them waits; those before them stay."""
    path = file(*COLLECT, download={"max_failed_share": 0})
    done = go(icom, path)
    assert_message(done, 1, "failed: download, part 2 of 3", "1 of 8 downloads failed")
    state = go(icom, path, "--state")
    assert state.code == 0
    assert states(state) == {
        "download": ["3", "1 (1)", "–", "1 (2)", "1 (3)"],
        "reorganise": ["2", "–", "–", "–", "2"],
        "index": ["1", "–", "–", "–", "1"],
    }
    assert "download, part 2: 1 of 8 downloads failed" in state.out
    more = go(icom, path, "download.max_failed_share=0.2")
    assert more.code == 0 and states(more)["download"] == ["3", "3", "–", "–", "–"]


def test_stages_that_are_off(file: File, icom: Icom) -> None:
    """They are not done; what reads them needs them whole; without the section nothing is known of them."""
    path = file(*COLLECT)
    off = "download.run=false"
    assert_message(
        go(icom, path, off), 2, "reorganise reads what download makes, which is switched off", "parts 1-3 of 3"
    )
    assert go(icom, path, "reorganise.run=false", "index.run=false").code == 0
    assert not Path("work/reorganise").exists()
    done = go(icom, path, off)
    assert done.code == 0 and states(done)["download (off)"] == ["3", "3", "–", "–", "–"]
    assert_message(go(icom, path, off, "download.redo=2"), 2, "redo is 2, and run is false")
    others = file("reorganise", "index", output_dir="other", reorganise={"source": "work/download"})
    assert go(icom, others).code == 0
    assert list(bytes_in("other").values()) == list(bytes_in("work/reorganise").values())


def test_one_part_alone(file: File, icom: Icom) -> None:
    """As a scheduler of any kind would start it."""
    path = file("download", "reorganise")
    only = ("--stage", "download", "--part")
    assert go(icom, path, *only, "2").code == 0
    assert_message(go(icom, path, "--stage", "reorganise", "--part", "1"), 1, "Not whole: parts 1,3 of 3 of download")
    for part in "31":
        assert go(icom, path, *only, part).code == 0
    assert go(icom, path, "--stage", "reorganise", "--part", "1").code == 0
    assert states(go(icom, path, "--state"))["reorganise"] == ["2", "1 (1)", "–", "–", "1 (2)"]
    assert_message(go(icom, path, *only, "4"), 2, "out of range: there are parts 1 to 3")
    assert_message(go(icom, path, "--stage", "train", "--part", "1"), 2, "the file has no such section")
    assert_message(go(icom, path, "--stage", "download"), 2, "--stage and --part belong together")


def test_dry_run_prints_the_stages_commands(file: File, icom: Icom) -> None:
    """Which mean what the sections say, and nothing is done."""
    changed = {"filters": {"number": ">=3", "or": [{"width": 64}]}, "center_crop": True, "dataloader_num_workers": 2}
    path = file(precompute=changed, train={"validation_prompts": ["a red circle", "it's"], "use_ema": True})
    done = go(icom, path, "--dry_run")
    assert done.code == 0 and not Path("work").exists()
    commands = [shlex.split(line) for line in done.out.splitlines()]
    stages = stages_of(load_pipeline_config({"file": str(path)}))
    wanted = [
        (stage.options, f"{part}/{stage.parts}" if stage.parts > 1 else None)
        for stage in stages.values()
        for part in range(1, stage.parts + 1)
    ]
    assert len(commands) == len(wanted) == 9
    for (icom_, *command), (options, part) in zip(commands, wanted, strict=True):
        made = dataclasses.asdict(parse(command)) | ({"part": None} if part else {})
        assert icom_ == "icom" and made == dataclasses.asdict(options) and (not part or command[-1] == part)


def test_another_pipelines_folder(file: File, icom: Icom) -> None:
    assert go(icom, file("download")).code == 0
    for changed, parts in (
        ({"url_column": "link"}, ("begun with another download.url_column ('url')", "('link')", "download.redo=all")),
        ({"parts": 2}, ("begun with another download.parts (3)",)),
    ):
        assert_message(go(icom, file("download", download=changed)), 2, *parts)
    assert go(icom, file("download", download={"threads": 2, "timeout": 7})).code == 0
    done = go(icom, file("download", download={"parts": 2, "samples_per_shard": 30, "redo": "all"}))
    assert done.code == 0 and [path.name for path in Path("work/download").glob("*.tar")] == ["00000.tar"]


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"dowload": {}}, ("Unknown option `dowload`", "Did you mean `download`?")),
        ({"download": {"sample_per_shard": 3}}, ("yaml, download: Unknown option `sample_per_shard`", "Did you mean")),
        ({"download": {"samples_per_shard": 0}}, ("download: --samples_per_shard has to be at least 1",)),
        ({"download": {"parts": 0}}, ("download: --parts has to be at least 1",)),
        ({"download": {"parts": "many"}}, ("download: Bad value for `parts`",)),
        ({"download": {"redo": "3-5"}}, ("download: redo: '3-5' is out of range: there are parts 1 to 3",)),
        ({"download": {"redo": "5-3"}}, ("download: redo: '5-3' names no parts",)),
        ({"download": {"redo": "one"}}, ("download: redo: 'one' names no parts", '"3-5,8", or "all"')),
        ({"download": {"redo": 0}}, ("download: redo: '0' is out of range",)),
        ({"download": {"part": "1/2"}}, ("download: `part` is what the pipeline gives",)),
        ({"download": {"source": "???"}}, ("Missing: download.source", "download.source=VALUE")),
        ({"download": {"source": "${url}"}}, ("url",)),
        ({"download": {"source": "${oc.env:HOME}"}}, ("asks for the environment variable 'HOME'",)),
        ({"index": {"parts": 2}}, ("index: Unknown option `parts`",)),
        ({"precompute": {"resolution": [33]}}, ("precompute: --resolution has to be a multiple of 8",)),
        ({"train": {"learning_rate": -1}}, ("train: --learning_rate has to be a positive number",)),
        ({"slurm": {"nodes": 2}}, ("download: slurm.nodes is for training alone",)),
        ({"slurm": {"wait": True}}, ("slurm.wait is not for pipelines",)),
        ({"slurm": {"partitions": "x"}}, ("Unknown option `partitions`", "Did you mean `partition`?")),
        ({"train": {"slurm": {"at_once": 0}}}, ("train: slurm.at_once has to be a number of parts",)),
        ({"launcher": "ssh"}, ("Bad value for `launcher`",)),
        ({"output_dir": "???"}, ("Missing: output_dir",)),
    ],
)
def test_files_that_cannot_work(changed: dict[str, Any], parts: tuple[str, ...], file: File, icom: Icom) -> None:
    assert_message(go(icom, file(**changed), "--dry_run"), 2, *parts)


def test_the_page_has_a_file_that_works(tmp_path: Path) -> None:
    """docs/pipeline.md."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/pipeline.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "laion.yaml").write_text(text)
    stages = stages_of(load_pipeline_config({"file": str(tmp_path / "laion.yaml")}))
    assert {name: (stage.parts, stage.slurm.time, stage.needs) for name, stage in stages.items()} == {
        "download": (64, "8:00:00", None),
        "reorganise": (8, "8:00:00", "download"),
        "index": (1, "8:00:00", "reorganise"),
        "precompute": (32, "8:00:00", "index"),
        "train": (1, "2-00:00:00", "precompute"),
    }


def test_files_without_what_is_needed(file: File, icom: Icom, tmp_path: Path) -> None:
    assert_message(go(icom, file("reorganise")), 2, "reorganise: no stage before it says what it reads. Give it source")
    assert_message(go(icom, file("train")), 2, "train: no stage before it", "Give it train_data_dir")
    (tmp_path / "none.yaml").write_text("output_dir: x\n")
    assert_message(go(icom, tmp_path / "none.yaml"), 2, "has no stage")
    assert_message(go(icom, tmp_path / "missing.yaml"), 2, "No such configuration file")
    Path("urls.jsonl").write_text('{"link": "x", "caption": "y"}\n')
    assert_message(go(icom, file("download")), 1, "failed: download, part 1", "no column 'url' (--url_column)")


def test_numbers_of_parts() -> None:
    for parts in ([1], [1, 2, 3], [2, 4, 5, 6, 9], list(range(3, 10)), [1, 3, 5, 7, 9]):
        assert list(parse_numbers(to_numbers(parts), 9)) == parts
    assert parse_numbers(" 3-5, 8 ,4", 9) == (3, 4, 5, 8)
    assert parse_numbers("all", 3) == (1, 2, 3)
    for text in ("", "-3", "3-", "1,,2", "１"):
        with pytest.raises(UsageError, match="names no parts"):
            parse_numbers(text, 9)
