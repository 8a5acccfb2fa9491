"""A Hugging Face Hub on loopback: the part of its protocol that `huggingface_hub` speaks for us (without Xet).

Creating a repository, model info, file tree, preupload, LFS batch/upload/verify, commit; downloads with ETag,
X-Repo-Commit and, for large files, the redirect to another store. Everything stays in memory. Errors carry the
X-Error-Code headers of the real Hub: `huggingface_hub` chooses its exceptions by them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

LARGE = (".safetensors", ".bin", ".png", ".pt")
"""Endings that go through LFS."""
DROP = 0
"""As an answer: close the connection without a word."""


@dataclass
class Repository:
    """Files of one repository; there is only the branch main."""

    files: dict[str, bytes] = field(default_factory=dict)
    gated: bool = False

    @property
    def commit(self) -> str:
        """A hash of the content, as Git's is."""
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()


class FakeHub:
    """`with FakeHub() as hub:` … set HF_ENDPOINT to `hub.url`.

    Attributes:
        repositories: id -> files.
        token: the one that is valid; None lets everybody write.
        owner: whose token it is: the namespace of repositories without one.
        requests: what was asked, as "METHOD path".
        bodies: everything that was sent to us.
        answers: (pattern, status): requests whose "METHOD path" matches get that status, or DROP.
    """

    def __init__(self, token: str | None = None, owner: str = "alice") -> None:
        self.repositories: dict[str, Repository] = {}
        self.token = token
        self.owner = owner
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.answers: list[tuple[str, int]] = []
        self.large: dict[str, bytes] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Large files come from another host, where the token must not go; huggingface_hub tells the two by name.
        self.store_url = self.url.replace("127.0.0.1", "localhost")
        # The short interval makes `shutdown` quick.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def serve(self, repository: str, folder: Path) -> Repository:
        """Offer the files of a folder as a repository."""
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.repositories[repository] = Repository(files)
        return self.repositories[repository]

    @property
    def downloaded(self) -> set[str]:
        """Names of the files that somebody fetched (a large file is only asked for here; it comes from elsewhere)."""
        return {r.split("/", 5)[5] for r in self.requests if re.match(r"\w+ /[^/]+/[^/]+/resolve/", r)}

    def stop(self) -> None:
        """Be gone: connections are refused from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def point_to(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point this process to the fake Hub, with an empty cache in `folder` and nobody logged in."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(os.environ["HF_ENDPOINT"], hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0, the default here: a connection per request, so that none outlives its test.
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        asked = f"{self.command} {path}"
        body = self._body()
        hub.requests.append(asked)
        hub.bodies.append(body)
        for pattern, status in hub.answers:
            if re.search(pattern, asked):
                if status != DROP:
                    self._error(status, "", "told to")
                return
        authorization = self.headers.get("Authorization")
        if hub.token and authorization not in (None, f"Bearer {hub.token}"):
            self._error(401, "", "Invalid credentials in Authorization header")
            return
        if self.command in ("POST", "PUT") and hub.token and not authorization and "/lfs-store/" not in path:
            self._error(401, "", "Unauthorized")
            return
        for pattern, answer in _ROUTES:
            match = re.fullmatch(pattern, asked)
            if match:
                answer(self, body, *match.groups())
                return
        self._error(404, "", f"no route for {asked}")

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json")

    def _error(self, status: int, code: str, message: str) -> None:
        content = json.dumps({"error": message}).encode()
        self._send(status, content, X_Error_Code=code, X_Error_Message=message)

    def _repository(self, name: str, revision: str = "main") -> Repository | None:
        """The repository, or None after an error was sent."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            # 401 without a token: the Hub does not tell strangers what is private.
            self._error(404 if self.headers.get("Authorization") else 401, "RepoNotFound", "Repository not found")
        elif revision not in ("main", repository.commit):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository

    # Reading.

    def _info(self, _: bytes, name: str, revision: str | None) -> None:
        repository = self._repository(name, revision or "main")
        if repository is not None:
            siblings = [{"rfilename": file} for file in repository.files]
            self._json({"id": name, "sha": repository.commit, "siblings": siblings, "private": False, "tags": []})

    def _tree(self, _: bytes, name: str, revision: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        entries = []
        for file, content in repository.files.items():
            entry: dict[str, Any] = {
                "type": "file",
                "path": file,
                "size": len(content),
                "oid": hashlib.sha1(content).hexdigest(),
            }
            if file.endswith(LARGE):
                entry["lfs"] = {
                    "oid": hashlib.sha256(content).hexdigest(),
                    "size": len(content),
                    "pointerSize": 134,
                }
            entries.append(entry)
        self._json(entries)

    def _resolve(self, _: bytes, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        if repository.gated:
            self._error(403, "GatedRepo", f"Access to model {name} is restricted")
            return
        if file not in repository.files:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        content = repository.files[file]
        etag = hashlib.sha256(content).hexdigest()
        if file.endswith(LARGE):
            self.hub.large[etag] = content
            self._send(
                302,
                Location=f"{self.hub.store_url}/lfs-store/{etag}",
                X_Repo_Commit=repository.commit,
                X_Linked_Etag=f'"{etag}"',
                X_Linked_Size=str(len(content)),
            )
        else:
            self._send(200, content, ETag=f'"{etag[:40]}"', X_Repo_Commit=repository.commit)

    def _from_store(self, _: bytes, oid: str) -> None:
        self._send(200, self.hub.large[oid], ETag=f'"{oid}"')

    # Writing.

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        owner = asked.get("organization") or self.hub.owner
        name = f"{owner}/{asked['name']}"
        if name in self.hub.repositories:
            self._json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
        elif owner != self.hub.owner:
            self._error(403, "", "You don't have the rights to create a model under this namespace")
        else:
            self.hub.repositories[name] = Repository({".gitattributes": b""})
            self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})

    def _validate_yaml(self, body: bytes) -> None:
        import yaml

        errors = []
        card = json.loads(body)["content"]
        try:
            header = yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1])  # type: ignore[index]
            base = header.get("base_model")
            if base is not None and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", base):
                errors.append({"message": f"base_model {base} is not a valid model id"})
        except (yaml.YAMLError, TypeError) as error:
            errors.append({"message": str(error)})
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _preupload(self, body: bytes, name: str, revision: str) -> None:
        if name.split("/", maxsplit=1)[0] != self.hub.owner:
            self._error(403, "", "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        elif self._repository(name, revision) is not None:
            self._json(
                {
                    "files": [
                        {
                            "path": file["path"],
                            "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                            "shouldIgnore": False,
                        }
                        for file in json.loads(body)["files"]
                    ]
                }
            )

    def _lfs_batch(self, body: bytes, name: str) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            oid = wanted["oid"]
            actions = {
                "upload": {"href": f"{self.hub.url}/lfs-store/{oid}"},
                "verify": {"href": f"{self.hub.url}/{name}.git/info/lfs/verify"},
            }
            objects.append(wanted | ({} if oid in self.hub.large else {"actions": actions}))
        self._json({"transfer": "basic", "objects": objects})

    def _to_store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._error(400, "", "content does not match its oid")
            return
        self.hub.large[oid] = body
        self._send(200)

    def _verify(self, body: bytes, _: str) -> None:
        wanted = json.loads(body)
        good = len(self.hub.large.get(wanted["oid"], b"")) == wanted["size"]
        self._json({}, 200 if good else 404)

    def _commit(self, body: bytes, name: str, revision: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.large[value["oid"]]
        oid = repository.commit
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})


_NAME = r"([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Any]] = [
    (rf"GET /api/models/{_NAME}(?:/revision/(.+))?", _Handler._info),
    (rf"GET /api/models/{_NAME}/tree/([^/]+)", _Handler._tree),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", _Handler._resolve),
    (r"(?:GET|HEAD) /lfs-store/(\w+)", _Handler._from_store),
    (r"POST /api/repos/create", _Handler._create),
    (r"POST /api/validate-yaml", _Handler._validate_yaml),
    (rf"POST /api/models/{_NAME}/preupload/([^/]+)", _Handler._preupload),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _Handler._lfs_batch),
    (r"PUT /lfs-store/(\w+)", _Handler._to_store),
    (rf"POST /{_NAME}\.git/info/lfs/verify", _Handler._verify),
    (rf"POST /api/models/{_NAME}/commit/([^/]+)", _Handler._commit),
]
