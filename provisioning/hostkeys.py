"""Key pairs that are made here: the ssh key of a cluster, and the first host key of each node.

A node's first host key reaches it through its user data, so that the very first connection can be verified.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KeyPair:
    """An ed25519 key pair in OpenSSH's formats."""

    private: str
    public: str
    """`ssh-ed25519 AAAA…`, without a comment."""


def make_key() -> KeyPair:
    """A new key pair from the system's random numbers."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private.decode(), public.decode())
