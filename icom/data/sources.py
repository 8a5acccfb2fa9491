"""Where captioned pictures come from: the one place that decides it by what was written."""

from __future__ import annotations

from pathlib import Path

from icom.config.data import DataOptions
from icom.data.folder import open_folder
from icom.data.latent_set import open_latents
from icom.data.parquet import is_pictures, open_parquet
from icom.data.records import Source
from icom.data.remote import PIPE, is_remote
from icom.data.shards import COMPRESSED, walk
from icom.data.synthetic import open_synthetic
from icom.data.tars import open_tars
from icom.errors import UsageError

_TARS = (".tar", *COMPRESSED)
"""Of WebDataset's shards. Compressed ones are refused where they are opened, with the reason."""


def open_source(options: DataOptions) -> Source:
    """Open what --train_data_dir names. No picture is decoded yet.

    Raises:
        UsageError: it cannot mean anything, or a filter cannot be parsed or drops all.
        IcomError: missing, empty, without captions, or with an index that does not fit.
    """
    text = options.train_data_dir
    if text.startswith("synthetic:"):
        if options.filters:
            raise UsageError("--filters: made-up pictures have no metadata.")
        return open_synthetic(text, options.max_train_samples)
    folder = Path(text).expanduser()
    if latents := open_latents(folder):
        if options.filters or options.max_train_samples is not None:
            raise UsageError(
                f"{text} holds latents, and --filters and --max_train_samples choose pictures: give them to "
                "`icom data precompute`."
            )
        return latents
    if is_remote(text) or not folder.is_dir():
        named = text.partition("?")[0] if "://" in text else text  # what follows in an address is no name
        if named.lower().endswith(".parquet"):
            return open_parquet(options)
        if text.startswith(PIPE) or named.lower().endswith((*_TARS, "/")):
            return open_tars(options)
        raise UsageError(
            f"--train_data_dir {text}: no such folder, and no shards, whose names end in .tar or .parquet."
        )
    sizes = walk(folder)
    tars = next((name for name in sizes if name.lower().endswith(_TARS)), None)
    parquet = next((name for name in sizes if is_pictures(name)), None)
    if tars and parquet:
        raise UsageError(
            f"--train_data_dir {text} holds tars ({tars}) and parquet files ({parquet}): name those that are meant by "
            f"a pattern, as in {text.rstrip('/')}/*.tar."
        )
    return open_tars(options) if tars else open_parquet(options) if parquet else open_folder(options, sizes)
