"""What comes from outside, parsed at the edge: tags, users, addresses, host names, host keys, what a node says.

Each function takes text and gives it back as a type of its own, or raises Malformed. What a file, a shell line or ssh
is told is of these types; lines of files are made by `line`, and what a terminal is shown goes through `plain`.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import unicodedata
from pathlib import Path
from typing import NewType

from icom.errors import IcomError

Role = NewType("Role", str)
"""master, worker-1, worker-2, …, builder."""
InstanceId = NewType("InstanceId", str)
RunTag = NewType("RunTag", str)
"""What stands for one call of `icom provision`."""
Address = NewType("Address", str)
"""An IP address, in numbers."""
UserName = NewType("UserName", str)
HostName = NewType("HostName", str)
"""A name as mpirun and ssh take it: no pattern, no user, no port, no option."""
PublicKey = NewType("PublicKey", str)
"""`ssh-ed25519 AAAA…`: kind and key, without a comment."""
Word = NewType("Word", str)
"""Letters, digits, dots, hyphens and underscores: ids and types of EC2."""

_ROLE = re.compile(r"master|builder|worker-[1-9][0-9]{0,5}")
_INSTANCE_ID = re.compile(r"i-[0-9a-f]{8,17}")
_RUN = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9a-f]{8}")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_BASE = re.compile(r"/?[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_LABEL = re.compile(r"(?!.*\.\.)[A-Za-z0-9_+=,.@][A-Za-z0-9 _+=,.@:/()-]{0,254}")
_WEB_ADDRESS = re.compile(r"https?://[!-~]{1,1000}")
_ACCOUNT = re.compile(r"[0-9]{12}")
_HOME = re.compile(r"/[A-Za-z0-9._/@+-]{0,1000}")
_KEY_KIND = re.compile(r"(ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]{1,60}")

_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(\x07|\x1b\\)|\x9b[0-?]*[ -/]*[@-~]")
"""What terminals obey: CSI with its parameters, and strings (titles, links, clipboards) with their end."""
_LINE_BREAKERS = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's categories that no line of a file may have: control characters, half ones, separators of lines."""


class Malformed(IcomError):
    """What came from outside is not what it should be; nothing was done with it."""


def _of(form: re.Pattern[str], text: object, what: str) -> str:
    if not isinstance(text, str) or not form.fullmatch(text):
        raise Malformed(f"{shown(text)} is {what}.")
    return text


def role(text: object) -> Role:
    """A node's role."""
    return Role(_of(_ROLE, text, "no role of a node: master, worker-1, worker-2, …"))


def instance_id(text: object) -> InstanceId:
    """The id of an EC2 instance."""
    return InstanceId(_of(_INSTANCE_ID, text, "no id of an instance"))


def run_tag(text: object) -> RunTag:
    """The value of the tag icom:run."""
    return RunTag(_of(_RUN, text, "no run of icom provision"))


def base_image(text: object) -> str:
    """The value of the tag icom:base: an id, or a public parameter of AWS."""
    return _of(_BASE, text, "no base image")


def account(text: object) -> str:
    """The number of an AWS account."""
    return _of(_ACCOUNT, text, "no number of an AWS account")


def word(text: object) -> Word:
    """An id or a type of EC2."""
    return Word(_of(_WORD, text, "no such id or name: it has letters, digits, dots, hyphens and underscores alone"))


def label(text: object) -> str:
    """A name that EC2 or IAM lets people give: a key pair's, an instance profile's."""
    return _of(_LABEL, text, "no name that AWS allows")


def web_address(text: object) -> str:
    """An http or https URL: other kinds would read files of this computer."""
    return _of(_WEB_ADDRESS, text, "no address of a web service (https://…)")


def user(text: object) -> UserName:
    """A user on a node."""
    return UserName(_of(_USER, text, "no user: letters, digits, dots, hyphens and underscores, a letter first"))


def host(text: object) -> HostName:
    """A host's name in a hosts file or an ssh config."""
    return HostName(_of(_HOST, text, "not a host's name (letters, digits, dots and hyphens)"))


def address(text: object) -> Address:
    """An IP address, in the one way to write it."""
    try:
        if not isinstance(text, str) or "%" in text:  # a scope is free text
            raise ValueError
        return Address(str(ipaddress.ip_address(text)))
    except ValueError:
        raise Malformed(f"{shown(text)} is no IP address.") from None


def public_key(text: object) -> PublicKey:
    """A public key in OpenSSH's form; a comment behind it is dropped."""
    try:
        if not isinstance(text, str) or len(text.strip().splitlines()) != 1:
            raise ValueError
        kind, blob, *_ = text.split()
        raw = base64.b64decode(blob, validate=True)
        named = raw[4 : 4 + int.from_bytes(raw[:4], "big")].decode("ascii")  # a key begins with its kind, once more
        if not _KEY_KIND.fullmatch(kind) or named != kind:
            raise ValueError
        return PublicKey(f"{kind} {blob}")
    except (ValueError, binascii.Error):
        raise Malformed(f"{shown(text)} is no public key of ssh.") from None


def home(text: object) -> str:
    """The path of a home folder on a node."""
    path = _of(_HOME, text, "no home folder")
    if ".." in path.split("/"):
        raise Malformed(f"{shown(text)} is no home folder.")
    return path


def exit_code(text: object) -> int:
    """An exit code that a node tells."""
    return int(_of(re.compile(r"[0-9]{1,3}"), text, "no exit code"))


def line(*words: str) -> str:
    """A line of a file that others read line by line: ssh_config, known_hosts, a hosts file. Ends with its line break.

    Raises:
        Malformed: a word would end the line, or has characters that nobody sees.
    """
    text = " ".join(words)
    if any(unicodedata.category(character) in _LINE_BREAKERS for character in text):
        raise Malformed(f"{shown(text)} has control characters, and cannot stand in a line of a file.")
    return text + "\n"


def ssh_path(path: Path) -> str:
    """A path as an ssh config takes it: quoted, and nothing in it means anything to ssh.

    Raises:
        Malformed: no ssh config can hold it.
    """
    text = line(str(path)).rstrip("\n")
    if any(sign in text for sign in ('"', "\\", "${")):
        raise Malformed(f"ssh cannot be told of {shown(text)}: choose a path without quotes, backslashes and ${{.")
    return '"' + text.replace("%", "%%") + '"'


def plain(text: str, keep: str = "\n\t") -> str:
    """Text that a terminal shows and does not obey: without escape sequences; other such characters in Python's way.

    Args:
        text: what somebody else may have written.
        keep: characters that nobody sees, and that stay.
    """
    text = _SEQUENCES.sub("", text)
    if "\r" not in keep:
        text = re.sub(r"\r\n?", "\n", text)
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def shown(value: object, most: int = 80) -> str:
    """What somebody else has written, for an error message: in quotes, on one line, not endless."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
