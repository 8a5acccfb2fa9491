"""Where captioned pictures come from: the one place that decides it by what was written."""

from __future__ import annotations

from pathlib import Path

from icom.config.data import DataOptions
from icom.data.folder import open_folder
from icom.data.latent_set import open_latents
from icom.data.records import Source
from icom.data.synthetic import open_synthetic
from icom.errors import UsageError


def open_source(options: DataOptions) -> Source:
    """Open what --train_data_dir names. No picture is decoded yet.

    Raises:
        UsageError: it cannot mean anything, or a filter cannot be parsed.
        IcomError: missing, empty, without captions, or with an index that does not fit.
    """
    if options.train_data_dir.startswith("synthetic:"):
        return open_synthetic(options.train_data_dir)
    if latents := open_latents(Path(options.train_data_dir).expanduser()):
        if options.filters or options.max_train_samples is not None:
            raise UsageError(
                f"{options.train_data_dir} holds latents, and --filters and --max_train_samples choose pictures: give "
                "them to `icom data precompute`."
            )
        return latents
    return open_folder(options)
