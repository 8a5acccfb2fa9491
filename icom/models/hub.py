"""Upload of a result to the Hugging Face Hub, and download of a model's files."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from icom.errors import IcomError, UsageError
from icom.models.parts import PARTS

RESULTS = (
    *("README.md", "config.yaml", "comparison.png", "samples.png", "loss.png"),
    *("learned_embeds.safetensors", "learned_embeds-steps-*.safetensors", "learned_embeds.bin"),
)
"""What of textual inversion's --output_dir is uploaded. Lists of what goes, not of what stays: the folder may hold
anything else."""

PIPELINE = ("model_index.json", "scheduler/*", "tokenizer/*", *(f"{part.name}/*" for part in PARTS))
"""A whole pipeline, and nothing else that lies beside it."""


def create_repository(name: str, token: str | None) -> str:
    """Make sure that the repository exists and that we may write to it, before any time is spent on training.

    Args:
        name: repository, with or without its owner.
        token: None for the stored one.

    Returns:
        The full id, owner/name.

    Raises:
        UsageError: the Hub allows no such name.
        IcomError: not logged in, no right to write, or the Hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=token)
    try:
        repository = str(api.create_repo(name, exist_ok=True).repo_id)
        # For someone else's public repository `exist_ok` is content. This asks the Hub how it would take a file, which
        # needs the right to write, and uploads nothing.
        api.preupload_lfs_files(repository, [CommitOperationAdd("README.md", b"")])
    except HFValidationError as error:
        raise UsageError(
            f"The Hub allows no repository named {name!r}: letters, digits, `-`, `_` and `.` only. Name one with "
            "--hub_model_id."
        ) from error
    except HfHubHTTPError as error:
        raise IcomError(
            f"The Hub refuses {name} ({_reason(error)}). Log in with `hf auth login` or set $HF_TOKEN to a token "
            "that may write, or drop --push_to_hub."
        ) from error
    except Exception as error:
        # huggingface_hub lets its HTTP client's own exceptions through, and which client that is changes.
        raise IcomError(
            f"The Hub cannot be reached ({_reason(error)}). Check the network or drop --push_to_hub."
        ) from error
    return repository


def upload(folders: Mapping[Path, Sequence[str]], repository: str, token: str | None, message: str) -> str:
    """Upload results to the top of a repository (no checkpoints, no logs).

    Args:
        folders: folder -> patterns of what goes.
        repository: from `create_repository`.
        token: None for the stored one.
        message: of the commits, one for each folder.

    Returns:
        The address of the repository.

    Raises:
        IcomError: the upload failed; the local files are intact.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        for folder, files in folders.items():
            api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=message, allow_patterns=list(files)
            )
    except Exception as error:
        # Whatever it was: training is done, and the user has to hear that nothing of it is lost.
        again = [
            shlex.join(["hf", "upload", repository, str(folder), ".", *(f"--include={pattern}" for pattern in files)])
            for folder, files in folders.items()
        ]
        raise IcomError(
            f"The upload to {repository} failed ({_reason(error)}). Everything is in {', '.join(map(str, folders))}; "
            "try again (logged in with `hf auth login`):\n  " + "\n  ".join(again)
        ) from error
    return f"{api.endpoint}/{repository}"


def snapshot(name: str, revision: str | None, patterns: list[str], what: str = "model") -> Path:
    """Fetch the files of a repository that match, into the cache; what is there already is not fetched.

    Args:
        name: owner/name.
        revision: branch, tag or commit; None for the main branch.
        patterns: glob patterns.
        what: is looked for, for messages.

    Returns:
        The folder in the cache; its name is the commit.

    Raises:
        IcomError: no such repository, no right to it, or the Hub cannot be reached and the cache does not have it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    instead = "a folder with the model; `bundled` works without a network" if what == "model" else "a file"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise IcomError(f"{name} is gated: accept its licence on the Hub and log in (`hf auth login`).") from error
    except RevisionNotFoundError as error:
        raise IcomError(f"{name} on the Hub has no revision {revision!r}.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise IcomError(
            f"No {what} {name}: there is no such {'folder' if what == 'model' else 'file'}, and no such (public) "
            "repository on the Hub."
        ) from error
    except HfHubHTTPError as error:
        raise IcomError(
            f"The Hub refuses {name} (HTTP {error.response.status_code}). Is the stored token ($HF_TOKEN or "
            "`hf auth login`) still valid?"
        ) from error
    except Exception as error:
        # LocalEntryNotFoundError: the Hub did not answer and the cache does not hold it. The HTTP client's own
        # exceptions come through too, and which client that is changes.
        if isinstance(error, OSError) and error.errno is not None:
            raise IcomError(
                f"Cannot write the cache {constants.HF_HUB_CACHE}: {error.strerror}. Name a folder with room with "
                "$HF_HOME."
            ) from error
        raise IcomError(
            f"Cannot get {name}: the Hub ({constants.ENDPOINT}) cannot be reached and the {what} is not in the cache. "
            f"Check the network or proxy, or give {instead}."
        ) from error


def file_names(name: str, commit: str) -> list[str]:
    """All files of a repository; none where the Hub does not say."""
    from huggingface_hub import HfApi

    try:
        return HfApi().list_repo_files(name, revision=commit)
    except Exception:  # it is only for a better message, and any of an HTTP client's errors may come
        return []


def _reason(error: BaseException) -> str:
    """The Hub's status, else the kind of error; no text from outside, for that may quote the token."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if response is not None:
            return f"HTTP {response.status_code}"
        cause = cause.__cause__
    return type(error).__name__
