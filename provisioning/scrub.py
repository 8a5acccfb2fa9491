"""Take out of a machine what must not be in an image of it: keys, tokens, history, logs, what makes it this machine.

Runs on the machine, as root and on its own (Python 3.9, nothing else): `sudo python3 scrub.py --instance i-0abc`, or
`sudo python3 - --instance i-0abc` with this file on stdin. Afterwards no new ssh connection gets in: host keys and
authorized keys are gone until cloud-init's next boot.

Links are never followed, and other file systems than the root's are left alone (/tmp may be one). What is removed is
overwritten first, because a snapshot of the disk also holds the blocks of deleted files. One file of cloud-init stays,
the instance's id: it tells a second run that this is the right machine, and the next instance has another one.

Exit code 0: clean. 1: something could not be removed, or the search at the end found more; stderr names it. 2: not this
instance; nothing was touched.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

INSTANCE_ID = "var/lib/cloud/data/instance-id"

# Patterns of what is removed, with all that is in it. Below the root:
SYSTEM = {
    "ssh host keys": ("etc/ssh/ssh_host_*", "etc/ssh/icom_new_key*"),
    "state of cloud-init": ("var/lib/cloud/*",),
    # Else every node that starts from the image shuts down when this one would have.
    "icom's end of this node": (
        *("etc/systemd/system/icom-end.*", "etc/systemd/system/*.wants/icom-end.*"),
        "var/lib/systemd/timers/stamp-icom-end.*",
    ),
    "temporary files": ("tmp/*", "var/tmp/*"),
    "journal and crash dumps": (
        *("var/log/journal/*", "var/crash/*"),
        *("var/lib/systemd/coredump/*", "var/lib/apport/coredump/*"),
    ),
    "mail": ("var/mail/*", "var/spool/mail/*"),
    "DHCP leases": ("var/lib/dhcp/*", "var/lib/dhclient/*", "var/lib/NetworkManager/*.lease"),
    "identity of this machine": (
        *("var/lib/dbus/machine-id", "var/lib/systemd/credential.secret", "var/lib/NetworkManager/secret_key"),
        *("var/lib/systemd/random-seed", "var/lib/urandom/random-seed", "var/lib/random-seed"),
        *("boot/loader/random-seed", "boot/efi/loader/random-seed", "efi/loader/random-seed"),
        *("var/lib/amazon/ssm/*", "var/lib/ubuntu-advantage/private/*"),
    ),
}
# Below every home folder:
HOMES = {
    "ssh folders": (".ssh",),
    "tokens and passwords": (
        *(".aws", ".boto", ".s3cfg", ".config/gcloud", ".azure", ".config/rclone", ".kube/config", ".vault-token"),
        *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".huggingface/token"),
        *(".netrc", ".git-credentials", ".config/git/credentials", ".config/gh", ".config/hub", ".gnupg"),
        *(".docker/config.json", ".config/wandb", ".comet.config", ".kaggle", ".config/kaggle"),
        *(".pypirc", ".config/pip", ".pip", ".npmrc", ".pgpass", ".my.cnf", ".Xauthority", ".ICEauthority"),
    ),
    "history": (
        *(".*_history", ".*_history-*", ".history", ".lesshst*", ".local/state/lesshst", ".viminfo*", ".wget-hsts"),
        *(".local/share/fish/fish_history", ".zsh_sessions", ".ipython/profile_default/history.sqlite*"),
        *(".local/state/*_history", ".local/state/nvim/shada"),
    ),
}
# Below the home folders of people:
PEOPLE = {"icom's records of clusters": ("hosts", ".local/share/icom/clusters", ".config/icom/environment.sh")}
# What shells and PAM read: lines that set a token go, the rest stays.
SYSTEM_STARTUP = (
    *("etc/environment", "etc/environment.d/*", "etc/profile", "etc/profile.d/*"),
    *("etc/bash.bashrc", "etc/bashrc", "etc/zsh/*"),
)
HOME_STARTUP = (
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile"),
    *(".pam_environment", ".config/environment.d/*"),
)
SETS_TOKEN = re.compile(
    rb"(?<!\w)(?:AWS_[A-Z0-9_]+|HF_TOKEN|HF_API_TOKEN|HUGGING_?FACE_HUB_TOKEN|HUGGINGFACE_TOKEN|WANDB_API_KEY"
    rb"|COMET_API_KEY|KAGGLE_KEY|GH_TOKEN|GITHUB_TOKEN|ICOM_SECRET)="
)

# What keys and tokens look like, wherever they are.
BREAK = rb"(?:\\r|\\n|\s)+"  # also as JSON writes it
PRIVATE_KEY = re.compile(
    rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----" + BREAK + rb"(?:[A-Za-z-]+: [^\r\n\\]*" + BREAK + rb")*"
    rb"[A-Za-z0-9+/=]{16}|\APuTTY-User-Key-File-"
)
TOKEN = re.compile(
    rb"\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{36}|github_pat_\w{22}|(?:AKIA|ASIA)[A-Z0-9]{16}\b(?<!EXAMPLE)"
    rb"|(?i:aws_secret_access_key)[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9+/]{40}|WANDB_API_KEY[\"']?\s*[=:]\s*[\"']?[0-9a-f]{40})"
)
SECRET_NAMES = re.compile(
    r"authorized_keys.*|id_(rsa|dsa|ecdsa|ed25519)|ssh_host_.*|\.netrc|\.git-credentials|\.boto|\.pypirc|stored_tokens"
)
LARGEST = 1 << 20
"""Bytes of the largest file that is searched; keys and tokens are in small ones."""

# Folders of packages, whose tests bring keys that are nobody's secret.
PACKAGES = ("site-packages", "dist-packages", "node_modules", "python3.*")
ENVIRONMENT = ("conda-meta", "pyvenv.cfg")
PACKAGE_CACHES = (".cache/pip", ".cache/uv", ".conda/pkgs")

FIRST_PERSON, NOBODY = 1000, 65534


@dataclass
class Tree:
    """The file tree of a machine."""

    root: Path
    failed: list[str] = field(default_factory=list)
    """What could not be looked at or removed, and why."""

    def fail(self, path: Path, error: OSError) -> None:
        """Take note; the rest is scrubbed all the same."""
        if not isinstance(error, FileNotFoundError):  # the system goes on working: its files come and go
            self.failed.append(f"{named(path)}: {error.strerror}")


def named(path: Path) -> str:
    """A path in a form that any terminal can show."""
    return ascii(str(path))[1:-1]


def inside(tree: Tree, folder: Path) -> list[Path]:
    """What is in a folder, without other file systems; nothing if it is a link or no folder."""
    try:
        info = folder.lstat()
        names = [entry.name for entry in os.scandir(folder)] if stat.S_ISDIR(info.st_mode) else []
    except OSError as error:
        tree.fail(folder, error)
        return []
    found = []
    for path in (folder / name for name in sorted(names)):
        try:
            if path.lstat().st_dev == info.st_dev or path == tree.root / "tmp":
                found.append(path)
        except OSError as error:
            tree.fail(path, error)
    return found


def find(tree: Tree, pattern: str, start: Path) -> list[Path]:
    """What a pattern fits, from a folder on; never through a link or into another file system."""
    found = [start]
    for part in pattern.split("/"):
        found = [path for folder in found for path in inside(tree, folder) if fnmatchcase(path.name, part)]
    return found


def below(tree: Tree, top: Path) -> list[Path]:
    """A path and all that is below it, folders before what is in them."""
    paths = [top]
    for path in paths:  # grows on the way
        paths += inside(tree, path)
    return paths


def overwrite(path: Path, content: bytes = b"") -> None:
    """Write `content` and zeros over a file's own blocks; it keeps its length."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "wb") as file:
        info = os.fstat(file.fileno())
        file.write(content)
        rest = min(info.st_size, info.st_blocks * 512) - len(content)  # with holes it may be longer than the disk
        for done in range(0, rest, LARGEST):
            file.write(bytes(min(LARGEST, rest - done)))
        file.flush()
        os.fdatasync(file.fileno())


def remove(tree: Tree, top: Path) -> int:
    """Remove a path with all that is in it, but the instance's id; how many files that were."""
    count = 0
    for path in reversed(below(tree, top)):
        try:
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode):
                if not any(path.iterdir()):  # else it holds the id, or another file system
                    path.rmdir()
            elif path != tree.root / INSTANCE_ID:
                if stat.S_ISREG(info.st_mode) and info.st_nlink == 1:  # another name of it may be one that stays
                    with suppress(OSError):  # a program that runs from there; the removal counts
                        overwrite(path)
                path.unlink()
                count += 1
        except OSError as error:
            tree.fail(path, error)
    return count


def read(tree: Tree, path: Path) -> bytes:
    """A small file's content; nothing for links, folders, devices and large files."""
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > LARGEST:
            return b""
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read()
    except OSError as error:
        tree.fail(path, error)
        return b""


def change(tree: Tree, path: Path, content: bytes) -> int:
    """Give a file another content and keep its place, owner and mode; 1 if that worked."""
    try:
        overwrite(path, content)
        os.truncate(path, len(content))
    except OSError as error:
        tree.fail(path, error)
        return 0
    return 1


def make_empty(tree: Tree, path: Path) -> int:
    """Empty a file; 1 if there was something in it."""
    info = path.lstat()
    return change(tree, path, b"") if stat.S_ISREG(info.st_mode) and info.st_size else 0


def drop_token_lines(tree: Tree, path: Path) -> int:
    """Remove the lines of a startup file that set a token; 1 if there were any."""
    content = read(tree, path)
    kept, continued = [], False
    for line in content.splitlines(keepends=True):
        if continued or SETS_TOKEN.search(line):
            if line[:1].isspace() and not continued:  # perhaps all that an `if` has in it
                kept.append(b":\n")
            continued = line.rstrip(b"\r\n").endswith(b"\\")
        else:
            kept.append(line)
    left = b"".join(kept)
    return change(tree, path, left) if left != content else 0


def homes(tree: Tree) -> tuple[list[str], list[str]]:
    """Home folders, named from the root on: those of people, and those of all accounts."""
    people = {"root", *(f"home/{path.name}" for path in inside(tree, tree.root / "home") if not path.is_symlink())}
    accounts = set()
    for line in os.fsdecode(read(tree, tree.root / "etc/passwd")).splitlines():
        words = line.split(":")
        if len(words) < 7 or not words[2].isdigit() or not words[5].startswith("/"):
            continue
        home = os.path.normpath(words[5]).strip("/")
        accounts.add(home)
        if home and (int(words[2]) == 0 or FIRST_PERSON <= int(words[2]) != NOBODY):
            people.add(home)
    return sorted(people), sorted(people | accounts)


def reach(tree: Tree, names: Iterable[str]) -> list[Path]:
    """The homes of these names that exist and can be reached."""
    found = []
    for name in names:
        literal = re.sub(r"([*?[])", r"[\1]", name)
        found += find(tree, literal, tree.root) if name else [tree.root]
    return found


def people_files(tree: Tree, people: Iterable[Path]) -> list[Path]:
    """Every path in people's homes and in /etc/ssh, without what packages bring."""
    paths = {path for folder in find(tree, "etc/ssh", tree.root) for path in below(tree, folder)}
    for home in people:
        todo = [home]
        for folder in todo:
            entries = inside(tree, folder)
            environment = any(path.name in ENVIRONMENT for path in entries)
            cache = folder in [home / name for name in PACKAGE_CACHES]
            packages = folder != home and any(fnmatchcase(folder.name, name) for name in PACKAGES)
            if environment:  # what its owner can put a token into
                wanted = ("envs/*", "conda-meta/state", "etc/conda/activate.d/*")
                todo += [path for pattern in wanted for path in find(tree, pattern, folder)]
            elif not (cache or packages):
                todo += entries
        paths.update(todo)
    return sorted(paths)


def is_hub_token(path: Path, content: bytes) -> bool:
    """Whether it is a token of Hugging Face, in the folder that HF_HOME names or somewhere else."""
    named_so = path.name in ("token", "stored_tokens") and bool(content)
    return named_so and ((path.parent / "hub").is_dir() or bool(TOKEN.search(content)))


def scrub(tree: Tree) -> dict[str, int]:
    """Remove everything; what kind of thing -> how many files."""
    people, accounts = (reach(tree, names) for names in homes(tree))
    counts: dict[str, int] = {}
    for kinds, places in ((SYSTEM, [tree.root]), (HOMES, accounts), (PEOPLE, people)):
        for kind, patterns in kinds.items():
            found = [path for place in places for pattern in patterns for path in find(tree, pattern, place)]
            counts[kind] = sum(remove(tree, path) for path in found)
    counts["private keys elsewhere"] = 0
    for path in people_files(tree, people):
        content = read(tree, path)
        if is_hub_token(path, content):
            counts["tokens and passwords"] += remove(tree, path)
        elif PRIVATE_KEY.search(content):
            counts["private keys elsewhere"] += remove(tree, path)
    startup = [path for pattern in SYSTEM_STARTUP for path in find(tree, pattern, tree.root)]
    startup += [path for home in accounts for pattern in HOME_STARTUP for path in find(tree, pattern, home)]
    counts["startup files with tokens (lines)"] = sum(drop_token_lines(tree, path) for path in startup)
    logs = [path for folder in find(tree, "var/log", tree.root) for path in below(tree, folder)]
    counts["logs (emptied)"] = sum(make_empty(tree, path) for path in logs)
    counts["machine-id (emptied)"] = sum(make_empty(tree, path) for path in find(tree, "etc/machine-id", tree.root))
    return counts


def out_of_reach(tree: Tree, home: str) -> bool:
    """Whether a home exists, but behind a link or on another file system."""
    path, device = tree.root, tree.root.lstat().st_dev
    for part in home.split("/"):
        path /= part
        try:
            info = path.lstat()
        except OSError:
            return False
        if stat.S_ISLNK(info.st_mode) or info.st_dev != device:
            return True
    return False


def still_there(tree: Tree) -> list[str]:
    """Search what is left, by what keys and tokens look like instead of where they should be."""
    people, _ = homes(tree)
    hidden = [tree.root / home for home in people if out_of_reach(tree, home)]
    found = [f"{named(path)}: a home behind a link or on another file system" for path in hidden]
    for path in people_files(tree, reach(tree, people)):
        content = read(tree, path)
        if PRIVATE_KEY.search(content):
            found.append(f"{named(path)}: a private key")
        elif TOKEN.search(content):
            found.append(f"{named(path)}: a token")
        elif content and SECRET_NAMES.fullmatch(path.name):
            found.append(f"{named(path)}: its name is that of a secret")
    for path in (path for folder in find(tree, "etc/systemd", tree.root) for path in below(tree, folder)):
        if "icom-end" in path.name:
            found.append(f"{named(path)}: would end the nodes made from the image")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Scrub this EC2 instance before an image is made of it.")
    parser.add_argument("--instance", required=True, help="id of this instance; any other machine is left alone")
    parser.add_argument("--root", default="/", help="the machine's file tree")
    options = parser.parse_args()
    tree = Tree(Path(options.root).resolve())
    here = [os.fsdecode(read(tree, path)).strip() for path in find(tree, INSTANCE_ID, tree.root)]
    if not options.instance or here != [options.instance]:
        place = named(tree.root / INSTANCE_ID)
        known = f"{place} says {here[0]!a}" if here else f"there is no {place}"
        print(f"scrub: this is not {options.instance}: {known}. Nothing was touched.", file=sys.stderr)
        return 2
    for kind, count in scrub(tree).items():
        print(f"{count:6} {kind}")
    left = still_there(tree)
    for text in tree.failed:
        print(f"scrub: could not scrub {text}", file=sys.stderr)
    for text in left:
        print(f"scrub: still there: {text}", file=sys.stderr)
    return 1 if left or tree.failed else 0


if __name__ == "__main__":
    sys.exit(main())
