"""One string for everything that has to be the same on all hosts: code, pictures, model, files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from icom.config.data import DataOptions
from icom.data.remote import is_remote
from icom.errors import IcomError
from icom.models.parts import PARTS

_PACKAGE = Path(__file__).parent.parent
_CHUNK = 2**22
_PARTS = (*(part.name for part in PARTS), "scheduler", "tokenizer")
_SUFFIXES = (".json", ".txt", ".safetensors")


def code() -> str:
    """Of the package: its modules, and the model and pictures that ship with it."""
    files = [path for path in _PACKAGE.rglob("[!.]*") if path.is_file() and path.suffix != ".pyc"]
    return of_files(_PACKAGE, files)


def pictures(folder: str) -> str:
    """Of a picture folder, with the captions in it, as training would read it.

    Raises:
        IcomError: from `list_pictures`.
    """
    from icom.data.images import files_of, folder_of, list_pictures

    list_pictures(folder)
    return of_files(folder_of(folder), files_of(folder))


def data(options: DataOptions) -> str:
    """Of captioned pictures: what their source itself is told by. "" for what only the run looks at.

    Raises:
        IcomError: there are none, or they cannot be read.
    """
    from icom.data.sources import open_source

    return "" if left_to_the_run(options) else open_source(options).digest


def left_to_the_run(options: DataOptions) -> str:
    """Why these data are not looked at beforehand, but by the processes when they start; "" where they are."""
    place = options.train_data_dir
    if is_remote(place):
        return "do not lie on the machines"
    folder = Path(place).expanduser()
    if not (any(folder.rglob("*.tar")) if folder.is_dir() else place.endswith(".tar")):
        return ""
    from icom.data.latent_set import SET
    from icom.data.tars import index_there

    # Else all tars would be read, which takes longer than anybody waits for an answer.
    return "" if (folder / SET).is_file() or index_there(options) else "have no index beside them"


def model(name: str, tokenizer_name: str | None, revision: str | None, variant: str | None) -> str:
    """Of a model: the contents of a folder, or the commit of a Hub id. Nothing is downloaded.

    A folder is read whole: for SD1.5, 4 GB, that takes some ten seconds.

    Raises:
        IcomError: it is not on this machine, or not whole.
    """
    from icom.models import loading
    from icom.models.single_file import TOKENIZER_HOME

    found = [_tokenizer(tokenizer_name)] if tokenizer_name else []
    if name == "bundled" or name.startswith("random:"):
        loading.find(name)
        found.insert(0, name)  # its files are part of the code
    elif not loading.is_hub_id(name):
        source = loading.find(name, tokenizer_name=tokenizer_name, variant=variant)
        if source.file:
            found = found or [_tokenizer(TOKENIZER_HOME)]
            found.insert(0, f"{file(source.file.path)} {source.file.prediction}")
        else:
            assert source.folder is not None
            files = model_files(source.folder, variant, own_tokenizer=not tokenizer_name)
            found.insert(0, of_files(source.folder, files))
    else:
        snapshot = _cached(name, revision)
        try:
            loading.find(str(snapshot), tokenizer_name=tokenizer_name, variant=variant)
        except IcomError as error:
            raise IcomError(f"{error} Fetch it there: {_download_command(name, revision)}") from error
        found.insert(0, f"commit {snapshot.name}")
    return " ".join(found)


def of_files(root: Path, files: Iterable[Path]) -> str:
    """SHA-256 over names (below `root`) and contents, in order of name."""
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(f"{path.relative_to(root).as_posix()}\n{file(path)}\n".encode())
    return whole.hexdigest()


def file(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        IcomError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise IcomError(f"Cannot read {path}: {error.strerror}.") from error
    return digest.hexdigest()


def model_files(folder: Path, variant: str | None, *, own_tokenizer: bool) -> list[Path]:
    """What a run loads: of the weights, those of the variant."""
    parts = _PARTS if own_tokenizer else _PARTS[:-1]
    files = [path for part in parts for path in (folder / part).glob("*") if path.suffix in _SUFFIXES]
    return [path for path in files if path.suffix != ".safetensors" or _variant(path) == variant]


def _variant(weights: Path) -> str | None:
    """Of model.safetensors none; of model.fp16.safetensors and model.fp16-00001-of-00002.safetensors fp16."""
    inner = weights.name.split(".")[1:-1]
    return inner[0].split("-")[0] if inner else None


def _tokenizer(name: str) -> str:
    from icom.models import loading

    folder = Path(name).expanduser()
    if loading.is_hub_id(name):
        return f"tokenizer commit {_cached(name, None).name}"
    if not folder.is_dir():
        raise IcomError(f"No such tokenizer folder: {name}.")
    return f"tokenizer {of_files(folder, tokenizer_files(folder))}"


def tokenizer_files(folder: Path) -> list[Path]:
    """What a run loads of a folder that --tokenizer_name names."""
    return [path for path in folder.iterdir() if path.suffix in _SUFFIXES]


def _cached(name: str, revision: str | None) -> Path:
    """The folder of a Hub id in this machine's cache; its name is the commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from icom.models.loading import MOVED

    name = MOVED.get(name, name)
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise IcomError(
            f"{name} is not in the Hub's cache. Fetch it there: {_download_command(name, revision)}"
        ) from None


def _download_command(name: str, revision: str | None) -> str:
    return f"hf download {name}" + (f" --revision {revision}" if revision else "")
