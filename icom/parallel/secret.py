"""The secret that the processes of a run share, and signatures made with it.

It comes in the environment, from the launcher (docs/security.md): never on a command line, which `ps` shows to
everybody, and never in a file of the run. Without one the processes work as well; then the key is empty, and whoever
can read the signatures can make them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping

from icom.errors import UsageError

SECRET = "ICOM_SECRET"
"""The variable."""
SIGNATURE_BYTES = 32

_FORM = re.compile(r"[0-9a-fA-F]{32,1024}")


def new_secret() -> str:
    """256 random bits, in hexadecimal digits."""
    return secrets.token_hex(32)


def find_secret(environment: Mapping[str, str]) -> bytes:
    """The key of this process; empty where nobody gave it a secret.

    Raises:
        UsageError: the secret is none; it is not shown.
    """
    text = environment.get(SECRET, "")
    if text and not _FORM.fullmatch(text):
        raise UsageError(
            f"{SECRET} is no secret: it takes 32 hexadecimal digits or more, the same for all processes of a run "
            f"(export {SECRET}=$(openssl rand -hex 32)). `icom launch mpirun` makes one by itself."
        )
    return text.lower().encode()


def sign(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, each with its length, so that no two lists of parts read the same."""
    return hmac.new(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), hashlib.sha256).digest()


def is_signed(signature: bytes, key: bytes, *parts: bytes) -> bool:
    """Whether somebody with the key made that signature over these parts; takes the same time whatever differs."""
    return hmac.compare_digest(signature, sign(key, *parts))
