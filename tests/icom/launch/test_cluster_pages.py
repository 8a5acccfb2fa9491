"""docs/kubernetes.md and docs/other-launchers.md: their command lines exist, their files start what they say.

Nothing of them runs on a cluster here. Guards these pages, docs/launchers and provisioning/eksctl.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
import yaml
from botocore import xform_name

from icom.cli import parse
from icom.parallel.place import find_place
from tests.support.command import ROOT, Run

PAGES = [ROOT / "docs" / name for name in ("kubernetes.md", "other-launchers.md")]
LAUNCHERS = ROOT / "docs" / "launchers"
OF_AWS_ITSELF = {("ecr", "get-login-password")}
"""Commands that are the command line's own, and no operation of the service's."""
FOR_ALL = {"query", "output", "region"}


def commands(page: Path) -> Iterator[str]:
    for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield from filter(None, block.replace("\\\n", " ").splitlines())


def of_aws(line: str) -> Iterator[list[str]]:
    """The calls of `aws` in a line, those in $(…) too."""
    inner = re.search(r"\$\((aws [^()]*)\)", line)
    if inner:
        yield shlex.split(inner[1])
        line = line.replace(inner[0], "X")
    for part in re.split(r"[|;]| do ", line):
        words = shlex.split(part) if part.count('"') % 2 == 0 else []
        if words[:1] == ["aws"]:
            yield words


def test_calls_of_aws_exist_with_their_options() -> None:
    """By the service models that the AWS command line itself is made from."""
    session = botocore.session.get_session()
    found = set()
    for line in commands(PAGES[0]):
        for _, service, operation, *rest in of_aws(line):
            found.add((service, operation))
            if (service, operation) in OF_AWS_ITSELF:
                continue
            model = session.get_service_model(service)
            names = {xform_name(name, "-"): name for name in model.operation_names}
            assert operation in names, line
            shape = model.operation_model(names[operation]).input_shape
            members = {xform_name(name, "-") for name in shape.members} if shape else set()
            given = {word.removeprefix("--") for word in rest if word.startswith("--")}
            assert given <= members | FOR_ALL, (line, given - members)
            needed = {xform_name(name, "-") for name in shape.required_members} if shape else set()
            # The command line makes up the token that makes a creation happen once.
            assert needed - {"creation-token"} <= given, (line, needed - given)
    made = {operation for _, operation in found if operation.startswith("create-")}
    assert {name.replace("create-", "delete-") for name in made} <= {operation for _, operation in found}
    assert len(found) > 10


def test_icoms_own_command_lines_are_valid(icom: Run) -> None:
    lines = [line.replace("$REGISTRY", "registry") for page in PAGES for line in commands(page)]
    own = [shlex.split(line) for line in lines if line.startswith("icom ")]
    for words in own:
        assert parse(words[1:])
        done = icom(*words[1:3], "--dry_run", *words[3:])
        assert done.code == 0, done
        (job,) = (item for item in yaml.safe_load_all(done.out) if item["kind"] == "Job")
        assert job["spec"]["completions"] == 3
    assert len(own) == 2


def test_files_and_links_are_there() -> None:
    for page in PAGES:
        text = page.read_text()
        for file in re.findall(r"(?:--config-file|-f|--cluster-configuration) ([^\s`-]\S*)", text):
            assert (ROOT / file.rstrip("`)")).exists() or "…" in file, file
        for link, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", text):
            target = page.parent / link if link else page
            assert target.exists() or link == "slurm.md", (page.name, link)
            if anchor:
                headings = {
                    "#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
                    for heading in re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                }
                assert anchor in headings, (page.name, link, anchor)


def test_what_messages_name_is_in_the_page() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGES[0].read_text(), re.MULTILINE)
    code = "".join(path.read_text() for path in (ROOT / "icom" / "launch" / "kubernetes").glob("*.py"))
    anchors = set(re.findall(r"docs/kubernetes\.md#(\w+)", code))
    assert anchors == {"storage", "pictures"} <= {heading.lower() for heading in headings}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (
            "skypilot.yaml",
            {
                "SKYPILOT_NODE_RANK": "2",
                "SKYPILOT_NUM_NODES": "3",
                "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6",
            },
        ),
        ("dstack.yml", {"DSTACK_NODE_RANK": "2", "DSTACK_NODES_NUM": "3", "DSTACK_MASTER_NODE_IP": "10.0.0.4"}),
    ],
)
def test_ranks_of_other_launchers(
    file: str, told: dict[str, str], icom: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's own lines, in bash, with what its launcher tells the third machine; `icom` shows what it got."""
    content = yaml.safe_load((LAUNCHERS / file).read_text())
    lines = content["run"] if "run" in content else "\n".join(content["commands"])
    (tmp_path / "icom").write_text('#!/bin/sh\nenv >environment\nprintf "%s\\n" "$@" >arguments\n')
    (tmp_path / "icom").chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    monkeypatch.chdir(tmp_path)
    bash(lines, told, tmp_path)
    environment = dict(line.split("=", 1) for line in Path("environment").read_text().splitlines() if "=" in line)
    place = find_place({name: environment[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")})
    assert (place.rank, place.world_size, place.master_address, place.master_port) == (2, 3, "10.0.0.4", 29500)
    arguments = Path("arguments").read_text().splitlines()
    assert icom(*arguments, "--print_config").code == 0
    assert "ICOM_SECRET" in (content.get("secrets") or content["env"])


def bash(script: str, told: dict[str, str], folder: Path) -> None:

    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)} | told
    subprocess.run(["bash", "-euc", script], check=True, env=environment, cwd=folder)
