"""Interfaces, and the Hugging Face Hub."""

from __future__ import annotations

import base64
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoResultInTime  # not the built-in one before Python 3.11
from http.client import HTTPException
from urllib.parse import unquote, urlsplit

from icom import machine
from icom.commands.doctor.finding import Finding

_SHORT_SECONDS = 5
"""Patience with the Hub."""


def check_network(environment: Mapping[str, str]) -> list[Finding]:
    """The interfaces, the one that MPI and gloo should use, and whether their settings name real ones."""
    there = machine.interfaces()
    shown = [f"{i.name} {' '.join(i.ipv4 + i.ipv6)}" for i in there if i.up and not i.loopback and i.ipv4 + i.ipv6]
    found = [Finding("network", "note", "; ".join(shown) or "only this machine")]
    master = environment.get("MASTER_ADDR")
    name = machine.interface_towards(master)
    way = f"towards MASTER_ADDR {master}" if master else "of the default route"
    if name:
        fix = f"For several machines: export I_MPI_HYDRA_IFACE={name} GLOO_SOCKET_IFNAME={name}"
        found.append(Finding("for MPI", "ok", f"{name}, {way}", fix))
    elif master:
        fix = "Check its name, and the route to it."
        found.append(Finding("for MPI", "warning", f"no interface leads to MASTER_ADDR {master}", fix))
    else:
        found.append(Finding("for MPI", "note", "no default route: one machine only"))
    for key in ("I_MPI_HYDRA_IFACE", "GLOO_SOCKET_IFNAME"):
        absent = [name for name in environment.get(key, "").split(",") if name and name not in {i.name for i in there}]
        if absent:
            fix = f"unset {key}, or name one of {', '.join(i.name for i in there)}."
            found.append(Finding(key, "warning", f"there is no interface {absent[0]}", fix))
    return found


def check_hub(environment: Mapping[str, str]) -> list[Finding]:
    """Whether models can be downloaded. Needed only for the first run with a model from the Hub."""
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Finding("Hub", "note", "not asked: HF_HUB_OFFLINE is set; local and cached models work")]
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    parts = urlsplit(endpoint)
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    answer: Future[str] = Future()
    # Not of the pool: looking up a name has no timeout, and nobody should wait for it at the end.
    threading.Thread(target=_ask, args=(endpoint, answer), daemon=True).start()
    try:
        problem = answer.result(_SHORT_SECONDS + 1)
    except NoResultInTime:
        problem = f"no answer in {_SHORT_SECONDS} s"
    if not problem:
        return [Finding("Hub", "ok", f"{shown} answers")]
    fix = "Only the bundled model and local folders work; check network, proxy (https_proxy) and HF_ENDPOINT."
    return [Finding("Hub", "warning", f"{shown}: {problem}", fix)]


def _ask(endpoint: str, answer: Future[str]) -> None:
    """Set what is wrong with the server; nothing if it answers like one that has models."""
    parts = urlsplit(endpoint)
    credentials, _, host = parts.netloc.rpartition("@")
    try:
        request = urllib.request.Request(parts._replace(netloc=host).geturl(), method="HEAD")
        if credentials:
            coded = base64.b64encode(unquote(credentials).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {coded}")
        with urllib.request.urlopen(request, timeout=_SHORT_SECONDS):
            answer.set_result("")
    except urllib.error.HTTPError as error:
        error.close()
        # A mirror need not have a front page.
        answer.set_result("" if error.code in (404, 405) else f"answers {error.code} {error.reason}")
    except (OSError, ValueError, HTTPException) as error:
        answer.set_result(str(getattr(error, "reason", error)) or type(error).__name__)
