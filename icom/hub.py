"""Upload of a result to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from icom.errors import IcomError

PRIVATE = [".*", "checkpoint-*", "earlier/*", "logs/*", "wandb/*", "validation/*", "*.tmp"]
"""Patterns in --output_dir that stay at home."""


def create_repository(name: str, token: str | None) -> str:
    """Make sure that the repository exists and that we may write to it, before any time is spent on training.

    Args:
        name: repository, with or without its owner.
        token: None for the stored one.

    Returns:
        The full id, owner/name.

    Raises:
        IcomError: not logged in, no right to write, or the Hub cannot be reached.
    """
    from huggingface_hub import create_repo
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(create_repo(name, token=token, exist_ok=True).repo_id)
    except HfHubHTTPError as error:
        raise IcomError(
            f"The Hub refuses {name} ({_status(error)}). Log in with `hf auth login` or set $HF_TOKEN to a token "
            "that may write, or drop --push_to_hub."
        ) from error
    except Exception as error:
        raise _unreachable(error) from error


def upload(folder: Path, repository: str, token: str | None) -> str:
    """Upload the results in `folder` (no checkpoints, no logs).

    Returns:
        The address of the repository.

    Raises:
        IcomError: the upload failed; the local files are intact.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(token=token)
    try:
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Textual inversion with icom",
            ignore_patterns=PRIVATE,
        )
    except HfHubHTTPError as error:
        raise IcomError(
            f"The Hub refused the upload to {repository} ({_status(error)}). Everything is in {folder}; "
            f"try again with `hf upload {repository} {folder}`."
        ) from error
    except Exception as error:
        raise _unreachable(error) from error
    return f"{api.endpoint}/{repository}"


def _status(error: Exception) -> str:
    response = getattr(error, "response", None)
    return f"HTTP {response.status_code}" if response is not None else "no answer"


def _unreachable(error: Exception) -> IcomError:
    # huggingface_hub lets its HTTP client's own exceptions through, and which client that is changes.
    return IcomError(
        f"The Hub cannot be reached ({type(error).__name__}). Check the network or drop --push_to_hub."
    )
