"""The store in which the processes of a run meet, and whose word counts there.

torch's TCPStore takes what anybody writes under any name. Here every value is signed together with its name, and what
does not bear the signature of the run is neither parsed nor shown: it ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from icom.errors import IcomError
from icom.parallel.secret import SECRET, SIGNATURE_BYTES, is_signed, sign

MOST_BYTES = 8 * 2**20
"""Of a value: torch's server hangs up on who sends it more."""


class Forged(IcomError):
    """Somebody else writes into this run's store."""


class SignedStore(Store):
    """Another store, whose values are preceded by a signature over name and value.

    What torch's own libraries use to meet (set, get, wait) goes through it as well: they call these methods. A store's
    counters (add) cannot be signed, and fail.
    """

    def __init__(self, unsigned: Any, key: bytes, where: str) -> None:
        """Wrap a store.

        Args:
            unsigned: the store, one of torch's.
            key: of the signatures.
            where: the store's address, for messages.
        """
        super().__init__()
        self.unsigned, self.key, self.where = unsigned, key, where

    def with_key(self, key: bytes) -> SignedStore:
        """The same store, with other signatures."""
        return SignedStore(self.unsigned, key, self.where)

    def clone(self) -> SignedStore:
        """A connection of its own to the same store."""
        return SignedStore(self.unsigned.clone(), self.key, self.where)

    def set(self, name: str, value: str | bytes) -> None:
        """Write a value.

        Raises:
            IcomError: it is too large.
        """
        self.unsigned.set(name, self._signed(name, value))

    def compare_set(self, name: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a value where there is none yet; the value that is there then.

        Raises:
            Forged: it is somebody else's.
        """
        assert not expected, "a store of signed values knows no empty ones"
        return self._checked(name, self.unsigned.compare_set(name, "", self._signed(name, desired)))

    def get(self, name: str) -> bytes:
        """A value, once it is there.

        Raises:
            Forged: it is somebody else's.
        """
        return self._checked(name, self.unsigned.get(name))

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Several values, once all are there.

        Raises:
            Forged: one is somebody else's.
        """
        return [self._checked(name, value) for name, value in zip(names, self.unsigned.multi_get(names), strict=True)]

    def check(self, names: Sequence[str]) -> bool:
        """Whether all of these are there.

        Raises:
            Forged: one is somebody else's.
        """
        return self.unsigned.check(names) and bool(self.multi_get(names) or True)

    def wait(self, names: Sequence[str], *timeout: timedelta) -> None:
        """Until all are there; `get` then tells whose they are."""
        self.unsigned.wait(names, *timeout)

    def forged(self, name: str, value: bytes = b"") -> Forged:
        """The error for a value that this run's processes cannot have written.

        Whichever of two processes reads first tells the user. So the one that has a secret says, too, that the other
        one has none.
        """
        own = f"this process's {SECRET}" if self.key else f"an empty key (this process has no {SECRET})"
        if self.key and _is_signed(value, b"", name):
            own += f", but with an empty key (who wrote it has no {SECRET})"
        return Forged(
            f"What stands in this run's store at {self.where} under {name!r} is not signed with {own}: nothing of it "
            f"was used. Either the processes were given different {SECRET}s (Open MPI needs -x {SECRET}), or another "
            "run or a stranger writes there. Start again, with one secret for all processes, another MASTER_PORT, and "
            "a network that strangers are not on (docs/security.md)."
        )

    def _signed(self, name: str, value: str | bytes) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        if len(content) > MOST_BYTES - SIGNATURE_BYTES:
            raise IcomError(f"{name}: {len(content)} bytes are more than the processes' store takes ({MOST_BYTES}).")
        return sign(self.key, name.encode(), content) + content

    def _checked(self, name: str, value: bytes) -> bytes:
        if len(value) > MOST_BYTES or not _is_signed(value, self.key, name):
            raise self.forged(name, value)
        return value[SIGNATURE_BYTES:]


def _is_signed(value: bytes, key: bytes, name: str) -> bool:
    return is_signed(value[:SIGNATURE_BYTES], key, name.encode(), value[SIGNATURE_BYTES:])
