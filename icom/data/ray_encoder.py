"""What a worker of Ray Data does: it reads the pictures of a batch, and gives what VAE and text encoder make of them.

A job says what that is: `start`, the `module:function` that makes the function from a range of numbers to bytes;
`config`, the command's options; `versions`, `source` and `encoders`, what the worker has to have as the command has.
"""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from icom.errors import IcomError

if TYPE_CHECKING:
    from icom.backends import Backend
    from icom.config.finetune import FinetuneConfig
    from icom.config.precompute import PrecomputeConfig
    from icom.data.encode import Encoders
    from icom.data.records import Source
    from icom.models.loading import ModelSource


class RayEncoder:
    """Ray Data makes one in each worker, and calls it with a row for each batch.

    Errors that a user can act on are results, so that they come in the batches' order; all others are Ray's.
    """

    def __init__(self, job: str, cpus: int) -> None:
        """Args: JSON; cores to compute on. Loads nothing yet."""
        self._job, self._cpus = job, cpus
        self._encode: Callable[[range], bytes] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Of {start, stop}: {content}, or {message, code} where it cannot be made."""
        try:
            if self._encode is None:
                self._encode = self._start()
            content = self._encode(range(int(row["start"]), int(row["stop"])))
            return {"content": content, "message": "", "code": 0}
        except IcomError as error:
            return {"content": b"", "message": f"{error} (on {socket.gethostname()})", "code": error.exit_code}

    def _start(self) -> Callable[[range], bytes]:
        import torch

        job = json.loads(self._job)
        module, _, function = job["start"].partition(":")
        start = getattr(importlib.import_module(module), function)
        torch.set_num_threads(self._cpus)
        made: Callable[[range], bytes] = start(job)
        torch.set_num_threads(self._cpus)
        return made


def job_of(start: str, settings: Mapping[str, Any], source: Source, encoders: Encoders, **more: Any) -> dict[str, Any]:
    """A job.

    Args:
        start: `module:function`.
        settings: the command's options.
        source: of the pictures.
        encoders: as the command itself loads them.
        more: what `start` needs.
    """
    from icom.training.checkpoint import versions

    return {
        "start": start,
        "config": dict(settings),
        "versions": versions(),
        "source": source.digest,
        "encoders": _digests(encoders),
        **more,
    }


def load(
    job: Mapping[str, Any], config: FinetuneConfig | PrecomputeConfig
) -> tuple[Backend, Source, ModelSource, Encoders]:
    """What a job computes with: backend, pictures, model, encoders.

    Raises:
        IcomError: they are not those of the command.
    """
    from icom import backends
    from icom.data.encode import load_encoders
    from icom.data.sources import open_source
    from icom.models import loading
    from icom.training.checkpoint import versions

    name = config.backend if config.encoder_gpus else "cpu"
    backend, _ = backends.resolve(name, str(config.mixed_precision), "off", cache_dir=config.cache_dir)
    found, wanted = versions(), job["versions"]
    others = [f"{name} {found[name]} instead of {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if others:
        raise IcomError(f"A worker of Ray has other versions: {', '.join(others)}. Install the same everywhere.")
    source = open_source(config)
    if source.digest != job["source"]:
        raise IcomError(
            f"In {config.train_data_dir} a worker of Ray sees other data than the command. All machines have to "
            "see the same, under the same name."
        )
    model = loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    encoders = load_encoders(model, backend)
    if _digests(encoders) != job["encoders"]:
        raise IcomError(
            f"VAE or text encoder of {model.name} are others for a worker of Ray than for the command, or in another "
            "precision. All machines need the same files, and hardware for --mixed_precision."
        )
    return backend, source, model, encoders


def _digests(encoders: Encoders) -> list[str]:
    from icom.models.loading import weights_digest

    return [weights_digest(encoders.vae), weights_digest(encoders.text_encoder)]
