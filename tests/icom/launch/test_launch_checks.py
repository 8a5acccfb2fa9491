"""The checks before a start, with the real probe in a process per host.

A stand-in for `ssh` runs the command that it is given on this machine, and makes it differ by the host's name; the real
one is in tests/icom/launch/test_training_on_hosts.py.

Guards icom.launch.checks, probe and digests.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from icom.config.finetune import load_finetune_config
from icom.config.train import load_train_config
from icom.data.images import BUNDLED_CONCEPTS
from icom.launch import checks, digests, probe
from icom.launch.checks import HostProblem, Target, check
from icom.launch.probe import Answer, Contents, Request, from_line, notice_of, read_answer, to_line
from icom.models.loading import BUNDLE
from tests.support.command import ROOT, Run

SSH = """#!/bin/sh
while :; do
    case $1 in -o) shift 2;; -*) shift;; *) break;; esac
done
host=$1
shift
case $host in
    refuses) echo "$host: Permission denied (publickey)." >&2; exit 255;;
    changed)
        echo "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @" >&2
        echo "Host key verification failed." >&2
        exit 255;;
    hangs) exec sleep 300;;
    talks) echo "Welcome!"; echo "icom-probe is not what this is";;
    ccl) export PYTHONPATH="$ELSEWHERE/ccl:$PYTHONPATH";;
    other-torch) export PYTHONPATH="$ELSEWHERE/torch:$PYTHONPATH";;
    old) export PYTHONPATH="$ELSEWHERE/old:$PYTHONPATH";;
    elsewhere) cd / ; set -- "$(echo "$*" | sed "s#$HERE#$ELSEWHERE#")";;
    no-folder) set -- "$(echo "$*" | sed "s#$HERE#/no/such#")";;
    no-python) set -- "$(echo "$*" | sed "s#/bin/python#/bin/no-python#")";;
esac
exec sh -c "$*"
"""


def pictures(folder: Path, *concepts: str) -> None:
    """One picture of each concept."""
    folder.mkdir()
    for concept in concepts:
        first = sorted((BUNDLED_CONCEPTS / concept).iterdir())[0]
        shutil.copy(first, folder / f"{concept}.png")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with pictures; beside it what is different on other hosts."""
    folder, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for root in (folder, elsewhere):
        root.mkdir()
    pictures(folder / "photos", "red-moon")
    pictures(elsewhere / "photos", "blue-heart")
    for place, package in (("torch", "torch"), ("ccl", "oneccl_bind_pt")):
        other = elsewhere / place / f"{package}-1.2.3.dist-info"
        other.mkdir(parents=True)
        (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2.3\n")
    (elsewhere / "old/icom").mkdir(parents=True)
    (elsewhere / "old/icom/__init__.py").touch()
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(folder))
    monkeypatch.setenv("ELSEWHERE", str(elsewhere))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def request_(port: int) -> Request:
    """What a run on the bundled model asks."""
    return Request(
        contents=Contents("photos", "bundled", tokenizer=None, revision=None, variant=None, files=[]),
        mpirun="/bin/sh",
        interface="lo",
        address="127.0.0.1",
        port=port,
        listens=False,
        word=secrets.token_hex(8),
        environment={},
    )


def reading(request: Request, **contents: Any) -> Request:
    """The same, on something else."""
    return replace(request, contents=replace(request.contents, **contents))


def ask(request: Request, *names: str) -> dict[str, list[tuple[str, str]]]:
    """Host -> what stops the start there; `first` is this machine, all others are behind ssh."""
    targets = [Target(name, name == "first", 1) for name in names]
    found: dict[str, list[tuple[str, str]]] = {}
    # Their PYTHONPATH is the stand-in's business.
    for problem in check(targets, request, {}):
        if problem.stops:
            found.setdefault(problem.host, []).append((problem.what, problem.fix))
    return found


def test_hosts_that_are_alike(here: Path, request_: Request) -> None:
    """Also where a login shell talks."""
    assert ask(request_, "first", "b", "talks") == {}


def test_all_that_is_wrong_is_told_at_once(here: Path, request_: Request) -> None:
    hosts = ["first", "refuses", "changed", "ccl", "other-torch", "elsewhere", "no-folder", "no-python", "old", "fine"]
    found = ask(request_, *hosts)
    assert list(found) == hosts[1:-1]
    told = {host: [what for what, _ in problems] for host, problems in found.items()}
    assert told["refuses"] == ["ssh: refuses: Permission denied (publickey)."]
    assert told["ccl"] == ["oneccl_bind_pt 1.2.3, but none on first"]
    assert told["other-torch"] == [f"torch 1.2.3, but {metadata.version('torch')} on first"]
    assert told["elsewhere"] == ["pictures: not the same as on first"]
    assert told["no-folder"] == [f"no folder {here}"]
    assert told["no-python"][0].endswith("/bin/python")
    # An editable installation finds the new parts of the package beside its old ones.
    assert any(words in told["old"][0] for words in ("No module named", "cannot import name"))
    fixes = {host: problems[0][1] for host, problems in found.items()}
    assert fixes["refuses"] == "ssh-copy-id refuses: mpirun cannot type a password"
    assert "ssh-keygen -R changed" in fixes["changed"]
    assert "git pull" in fixes["old"]
    assert "rsync" in fixes["elsewhere"]


def test_host_that_hangs_is_cut_off(here: Path, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SECONDS_PER_HOST", 0.2)
    assert ask(request_, "hangs") == {"hangs": [("no answer within 0.2 s", "see what it is doing: ssh hangs uptime")]}


def test_first_host_out_of_reach_is_the_only_problem(here: Path, request_: Request) -> None:
    """The others are not blamed for not reaching it."""
    assert list(ask(request_, "refuses", "b")) == ["refuses"]


@pytest.fixture
def somebody_else(request_: Request) -> Iterator[None]:
    """Another program on the port."""
    with socket.create_server(("127.0.0.1", request_.port)) as server:

        def serve() -> None:
            try:
                while True:
                    server.accept()[0].close()
            except OSError:
                return

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_port_that_is_taken(here: Path, request_: Request, somebody_else: None) -> None:
    found = ask(request_, "first", "b")
    assert list(found) == ["first"]
    ((what, fix),) = found["first"]
    assert what == f"cannot listen on 127.0.0.1 port {request_.port}: Address already in use"
    assert "MASTER_PORT=" in fix


def test_address_that_cannot_be_reached(request_: Request) -> None:
    problem = probe._connect(request_)
    assert problem is not None
    assert "cannot be reached: Connection refused" in problem[0]


def test_another_program_is_not_taken_for_rank_0(request_: Request, somebody_else: None) -> None:
    problem = probe._connect(request_)
    assert problem is not None
    assert "something else than the first host" in problem[0]


def test_port_can_be_used_right_after_the_check(here: Path, request_: Request) -> None:
    """Without SO_REUSEADDR: no connection may linger on this side."""
    assert ask(request_, "first", "b", "c") == {}
    with socket.socket() as server:
        server.bind(("127.0.0.1", request_.port))


def test_what_is_missing_on_the_only_host(here: Path, request_: Request) -> None:
    (here / "photos/broken.png").write_bytes(b"no picture")
    asked = replace(
        reading(request_, model="no/where", files=["run.yaml"]),
        interface="no0",
        mpirun="/no/mpirun",
        address="203.0.113.1",
    )
    told = [what for what, _ in ask(asked, "first")["first"]]
    assert [line.split("\n")[0] for line in told] == [
        f"cannot listen on 203.0.113.1 port {asked.port}: Cannot assign requested address",
        "no /no/mpirun",
        "Cannot read run.yaml: No such file or directory.",
        "In the picture folder photos, repair or remove:",
        "no network interface no0",
        "no/where is not in the Hub's cache",
    ]


def test_too_many_processes_are_a_warning(here: Path, request_: Request) -> None:
    (problem,) = check([Target("first", True, 10_000)], request_, {})
    assert not problem.stops
    assert problem.what.startswith("10000 processes share ")


def test_captions_and_templates_are_part_of_what_is_compared(here: Path) -> None:
    """Of `icom train`, whose pictures have them beside them."""
    options = {"train_data_dir": "photos", "placeholder_token": "<x>", "initializer_token": "toy"}
    assert Contents.of(load_train_config(options | {"caption_templates": "t.txt"})).files == ["t.txt"]
    assert Contents.of(load_train_config(options | {"caption_templates": "builtin"})).files == []
    assert Contents.of(load_train_config(options | {"sample_prompts": ["p.txt"]})).files == ["p.txt"]
    assert Contents.of(load_train_config(options | {"sample_prompts": ["a [name]"]})).files == []
    without = digests.pictures("photos")
    (here / "photos/red-moon.txt").write_text("<x>")
    one = digests.pictures("photos")
    (here / "photos/red-moon.txt").write_text("a <x>")
    assert len({without, one, digests.pictures("photos")}) == 3


@pytest.mark.long
def test_captioned_pictures_are_compared_as_the_run_tells_them(here: Path, request_: Request, tmp_path: Path) -> None:
    def asked(place: str) -> Request:
        flags = {"train_data_dir": place, "from_scratch": "unet.yaml"}
        return replace(request_, contents=Contents.of(load_finetune_config(flags)))

    for root in (here, tmp_path / "elsewhere"):
        (root / "photos/blue-heart.png").unlink(missing_ok=True)
        pictures(root / "captioned", "red-moon")
        (root / "captioned/red-moon.txt").write_text("a red moon")
        (root / "unet.yaml").touch()
    assert ask(asked("captioned"), "first", "elsewhere") == {}
    (tmp_path / "elsewhere/captioned/red-moon.txt").write_text("a moon")
    (tmp_path / "elsewhere/unet.yaml").unlink()
    told = [what for what, _ in ask(asked("captioned"), "first", "elsewhere")["elsewhere"]]
    assert told == ["Cannot read unet.yaml: No such file or directory.", "pictures: not the same as on first"]
    (here / "captioned/red-moon.txt").unlink()
    assert "No captions in captioned" in ask(asked("captioned"), "first")["first"][0][0]
    assert notice_of(asked("captioned").contents) == notice_of(request_.contents) == ""


def test_data_that_only_the_run_looks_at(here: Path, icom: Run) -> None:
    """What lies elsewhere, and tars that would have to be read from end to end."""

    def digest(place: str) -> tuple[str, str]:
        options = load_finetune_config({"train_data_dir": place})
        return digests.data(options), notice_of(Contents.of(options))

    (here / "tars").mkdir()
    (here / "moon.txt").write_text("a red moon")
    for number in range(2):
        with tarfile.open(here / f"tars/{number}.tar", "w") as tar:
            tar.add(here / "photos/red-moon.png", "moon.png")
            tar.add(here / "moon.txt", "moon.txt")
    for place, why in (("s3://bucket/{0..9}.tar", "do not lie on the machines"), ("tars", "have no index beside them")):
        found, notice = digest(place)
        assert not found and f"icom: the data {place} {why}" in notice
    assert icom("data", "index", "tars").code == 0
    (both, notice), (one, _) = digest("tars"), digest("tars/0.tar")
    assert both and one and both != one and not notice


def test_models_are_compared_by_content(here: Path, request_: Request, tmp_path: Path) -> None:
    for root in (here, tmp_path / "elsewhere"):
        shutil.copytree(BUNDLE, root / "model")
        shutil.rmtree(root / "photos")
        pictures(root / "photos", "red-moon")
    asked = reading(request_, model="model")
    assert ask(asked, "first", "elsewhere") == {}
    weights = tmp_path / "elsewhere/model/unet/diffusion_pytorch_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert [what for what, _ in ask(asked, "first", "elsewhere")["elsewhere"]] == ["model: not the same as on first"]


def test_models_of_the_hub_are_compared_by_commit(here: Path, request_: Request, tmp_path: Path) -> None:
    """From the cache, without a network: nobody listens at the tests' HF_ENDPOINT."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub/models--some--model"
    shutil.copytree(BUNDLE, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    asked = reading(request_, model="some/model")
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert check([Target("first", True, 1), Target("b", False, 1)], asked, cache) == []
    (problem,) = check([Target("first", True, 1)], reading(asked, revision="v2"), cache)
    assert problem.fix == "Fetch it there: hf download some/model --revision v2"
    shutil.rmtree(repository / "snapshots" / commit / "vae")
    (problem,) = check([Target("first", True, 1)], asked, cache)
    assert "lacks vae/" in problem.what


def test_digest_of_a_model_is_of_what_a_run_loads(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLE, folder)
    plain = digests.model(str(folder), None, None, None)
    shutil.copy(
        folder / "unet/diffusion_pytorch_model.safetensors", folder / "unet/diffusion_pytorch_model.fp16.safetensors"
    )
    (folder / "README.md").write_text("other")
    assert digests.model(str(folder), None, None, None) == plain
    (folder / "scheduler/scheduler_config.json").write_text("{}")
    assert digests.model(str(folder), None, None, None) != plain
    shutil.copytree(BUNDLE / "tokenizer", tmp_path / "words")
    other = digests.model(str(folder), str(tmp_path / "words"), None, None)
    (tmp_path / "words/merges.txt").write_text("")
    assert digests.model(str(folder), str(tmp_path / "words"), None, None) != other


def test_answers_are_read_back_and_nothing_else() -> None:
    answer = Answer({"icom": "1"}, {"pictures": "ab"}, 4, [("what", "fix")])
    message = from_line(to_line(json.loads(json.dumps(asdict(answer)))))
    assert message is not None
    assert read_answer(message) == answer
    assert from_line("Last login: today\n") is None
    for wrong in (
        {},
        message | {"cores": "4"},
        message | {"versions": {"icom": 1}},
        message | {"digests": []},
        message | {"problems": [["one"]]},
        message | {"more": 1},
    ):
        with pytest.raises(ValueError, match="has "):
            read_answer(wrong)


def test_table_stops_the_start_unless_all_are_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    from icom.launch.checks import show_problems

    show_problems([HostProblem("a[1]", "is [red]", "do", stops=False), HostProblem("b", "is wrong", "repair")])
    assert [line.split() for line in capsys.readouterr().err.splitlines()[1:]] == [
        ["!", "a[1]", "is", "[red]", "do"],
        ["✗", "b", "is", "wrong", "repair"],
    ]
