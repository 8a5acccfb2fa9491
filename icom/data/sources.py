"""Where captioned pictures come from: the one place that decides it by what was written."""

from __future__ import annotations

from icom.config.data import DataOptions
from icom.data.folder import open_folder
from icom.data.records import Source
from icom.data.synthetic import open_synthetic


def open_source(options: DataOptions) -> Source:
    """Open what --train_data_dir names. No picture is decoded yet.

    Raises:
        UsageError: it cannot mean anything, or a filter cannot be parsed.
        IcomError: missing, empty, without captions, or with an index that does not fit.
    """
    if options.train_data_dir.startswith("synthetic:"):
        return open_synthetic(options.train_data_dir)
    return open_folder(options)
