"""`icom data precompute`: what VAE and text encoder make of captioned pictures, in shards; and `icom data verify`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from icom import backends
from icom.config.precompute import PrecomputeConfig, VerifyConfig
from icom.data import latent_set
from icom.data.damage import Damage
from icom.data.encode import encoder_digests, load_encoders
from icom.data.latent_files import ParquetWriter, TarWriter, Writer
from icom.data.latent_set import MadeWith, Shard, read_shard, shard_path, write_set, write_shard
from icom.data.metadata import need_data_extra
from icom.data.parts import part_of
from icom.data.precompute_work import RayWork, Work
from icom.data.ray_workers import need_ray_extra
from icom.data.records import DamagedRecord
from icom.data.sources import open_source
from icom.data.whole_file import whole_file
from icom.engine.memory import keep_freed_memory
from icom.errors import IcomError, Stopped, UsageError
from icom.files import make_writable_folder, write_error
from icom.models import loading
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.progress import progress
from icom.signals import StopRequest

_PLACES = {
    *("train_data_dir", "index", "idx_to_prompt", "pretrained_model_name_or_path", "tokenizer_name"),
    *("output_dir", "cache_dir", "config"),
}
"""Options that may differ between machines."""


def precompute(config: PrecomputeConfig) -> None:
    """Write the shards that are missing in --output_dir.

    Raises:
        UsageError: options that do not fit together, with the model or with what is in --output_dir.
        IcomError: data, model or disk are no good, or another process is gone.
        Stopped: a signal came; the shards that are whole stay.
    """
    keep_freed_memory()
    with joined(find_place(os.environ)) as group:
        _precompute(config, group)


def verify(config: VerifyConfig) -> None:
    """Compare the shards of a folder with their digests, and say what they are.

    Raises:
        IcomError: some are missing, cut or altered; names them.
    """
    source = latent_set.verify(Path(config.folder).expanduser())
    made = source.made_with
    print(
        f"whole: {source.describe()}, made with the encoders of {made.model} (VAE {made.vae[:12]}) by icom {made.icom}"
    )


def _precompute(config: PrecomputeConfig, group: Group) -> None:
    """All that the processes do together."""
    part, parts = part_of(config.part, os.environ)
    if config.format == "parquet":
        need_data_extra("--format parquet")
    if config.encoder_workers:
        need_ray_extra()
    source = open_source(config)
    if source.kind != "pictures":
        raise UsageError(f"{config.train_data_dir} holds latents already: name the pictures with --train_data_dir.")
    if not len(source):
        raise IcomError(f"There are no pictures in {config.train_data_dir} (--train_data_dir).")
    options = {name: value for name, value in dataclasses.asdict(config).items() if name not in _PLACES}
    group.agree("The options", options | {"part": f"{part}/{parts}"})
    group.agree("The data", {"digest": source.digest, "pictures": len(source)})
    # The engine's attention is chosen by measuring, and would give other bits on other days.
    backend, reason = backends.resolve(
        config.backend, config.mixed_precision, "off", cache_dir=config.cache_dir, place=group.place
    )
    output = Path(config.output_dir).expanduser()
    make_writable_folder(output)
    model = loading.find(
        config.pretrained_model_name_or_path,
        tokenizer_name=config.tokenizer_name,
        revision=config.revision,
        variant=config.variant,
    )
    digests = encoder_digests(model)
    group.agree("The model", digests | {"dtype": str(backend.dtype)})
    encoders = load_encoders(model, backend)
    here = Work(config, source, encoders, backend)
    empty = here.states([""])
    made = here.made_with(model.name, digests, empty)
    write_set(output, made, empty[0])

    damage = Damage(config.max_damaged_share, f"in {config.train_data_dir}")
    mine = [number for number in range(made.shards) if number % parts == part - 1][group.rank :: group.size]
    missing = []
    for number in progress(mine, "looking for whole shards", "shard", disable=not group.leads):
        shard = read_shard(output, number, made, digest=True)
        if shard is None:
            missing.append(number)
        else:
            _count(damage, shard)
    if group.leads:
        of_part = f", part {part} of {parts}" if parts > 1 else ""
        alone = "" if group.size == 1 else " by this process"
        precision = str(backend.dtype).removeprefix("torch.")
        print(f"icom: {source.describe()}; encoders on {backend.device} in {precision} ({reason})", flush=True)
        print(f"icom: {len(missing)} of {len(mine)} shards to make{alone}{of_part} in {output}", flush=True)
    total = sum(len(made.numbers(number)) for number in missing)
    work: Work | RayWork = here
    if config.encoder_workers and missing:
        work = RayWork(config, source, encoders, made, missing)
    del encoders, here
    with (
        StopRequest("finishing this batch; shards that are whole stay") as stop,
        progress(None, "latents", "picture", total=total, disable=not group.leads or not missing) as bar,
        work,
    ):
        for number in missing:
            _make(work, output, made, number, damage, stop, bar)
    group.wait_for_everyone()
    if group.leads:
        _conclude(config, output, made)


def _make(
    work: Work | RayWork,
    output: Path,
    made: MadeWith,
    number: int,
    damage: Damage,
    stop: StopRequest,
    bar: Any,
) -> None:
    """Make one shard.

    Raises:
        IcomError: too many records are damaged, or the disk is full.
        Stopped: a signal came; nothing is left of the shard.
    """
    path = shard_path(output, number, made)
    records, damaged = 0, []
    try:
        with whole_file(path) as file:
            writer: Writer
            if made.format == "parquet":
                writer = ParquetWriter(file, made.to_json(), made.resolutions)
            else:
                writer = TarWriter(file)
            for batch in work.kept(made.numbers(number)):
                if stop.signal_number is not None:
                    raise Stopped(f"stopped. {_GO_ON}", stop.signal_number)
                kept = []
                for one in batch:
                    if isinstance(one, DamagedRecord):
                        damage.bad(one)
                        damaged.append((one.key, one.reason))
                    else:
                        damage.good()
                        kept.append(one)
                damage.check()
                writer.add(kept)
                records += len(kept)
                bar.update(len(batch))
            places = writer.finish()
        write_shard(output, number, made, Shard(file.size, file.hexdigest(), records, damaged, places))
    except OSError as error:
        raise IcomError(f"{write_error(path, error)} {_GO_ON}") from error


_GO_ON = "The shards that are whole stay: give the same command again to go on."


def _count(damage: Damage, shard: Shard) -> None:
    damage.known(shard.records, [DamagedRecord(key, reason) for key, reason in shard.damaged])


def _conclude(config: PrecomputeConfig, output: Path, made: MadeWith) -> None:
    """Say what there is now, other parts' shards included.

    Raises:
        IcomError: all is there, and too much of it damaged.
    """
    shards = [read_shard(output, number, made, digest=False) for number in range(made.shards)]
    whole = [shard for shard in shards if shard is not None]
    damage = Damage(config.max_damaged_share, f"in {config.train_data_dir}")
    for shard in whole:
        _count(damage, shard)
    if len(whole) == made.shards:
        damage.check(complete=True)
    left_out = f", {damage.damaged:,} damaged ones left out" if damage.damaged else ""
    megabytes = sum(shard.bytes for shard in whole) / 1e6
    size = f"{megabytes / 1e3:,.1f} GB" if megabytes >= 1e3 else f"{megabytes:.1f} MB"
    rest = made.shards - len(whole)
    print(
        f"{damage.read - damage.damaged:,} pictures in {len(whole):,} shards, {size}, in {output}{left_out}"
        + (f"; {rest:,} shards of other parts are not there yet" if rest else "")
    )
