"""`icom train --on CLUSTER`: what a training needs goes to the nodes, mpirun trains on all, the results come back.

The training does not depend on the connection: it runs on the master with its output in a file, which is shown here
while it grows. What of it is where: `~/pushed/NAME-DIGEST` (inputs, on all nodes), `~/runs/DIGEST` (on the master):
the run's folder, its output `log` and its `exit` code. `~/runs/lock` is locked by whatever belongs to a training.
"""

from __future__ import annotations

import hashlib
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from icom import names
from icom.config.captions import BUILT_IN
from icom.config.train import TrainConfig, load_train_config
from icom.config.training import to_yaml
from icom.config.watching import lines_of, read_prompts
from icom.errors import IcomError, Stopped, UsageError
from icom.files import make_writable_folder, write_atomically
from icom.signals import StopRequest
from provisioning.cluster import MASTER
from provisioning.config import WhereConfig, as_options
from provisioning.folder import places_of, ssh_names
from provisioning.openssh import OpenSsh
from provisioning.relay import showing
from provisioning.remote import reachable_folder
from provisioning.script import script
from provisioning.transfer import Upload, upload, upload_of
from provisioning.transport import Transport

BUSY = 75
ASK_SECONDS = 0.2

GPUS = "gpus"
_FILES = ("initial_embedding", "caption_templates")
"""Options that are single files; the others that have to be on the nodes are folders."""
STOP_BY_HAND = "'kill -s INT -- -$(cut -d\" \" -f1 runs/lock)'"  # dash takes no -- after -INT


@dataclass(frozen=True)
class RemoteTraining:
    """A training on a cluster.

    Attributes:
        where: the cluster.
        id: of its folder in ~/runs on the master; the same for the same --output_dir here.
        output: --output_dir, here.
    """

    where: WhereConfig
    id: str
    output: Path

    @property
    def cluster(self) -> str:
        """Its name."""
        return self.where.cluster

    @property
    def by_hand(self) -> str:
        """How to begin a command line that runs something on the master."""
        return f"icom run{as_options(self.where)} --"

    @property
    def name(self) -> str:
        """Of the output folder on the master, in the run's: model cards and the Hub show it."""
        return self.output.name or "run"

    def how_to_go_on(self) -> str:
        """How to go on by hand with a training that has lost us."""
        source, target = shlex.quote(f"runs/{self.id}/{self.name}"), shlex.quote(str(self.output.parent))
        return (
            f"The training may go on on {self.cluster}.\n"
            f"  see it:   {self.by_hand} tail -n 20 -f runs/{self.id}/log\n"
            f"  stop it:  {self.by_hand} {STOP_BY_HAND}\n"
            f"  fetch it: icom pull{as_options(self.where)} {source} {target}"
        )


def train_on(config: TrainConfig) -> None:
    """`icom train --on`. The options have been checked.

    Raises:
        UsageError: there is no such cluster here, or it does not run; nothing was sent.
        IcomError: something here or there is no good, the connection broke, or the training failed, whose exit code
            it has.
        Stopped: a signal came; the training saved, and what it saved is here.
    """
    assert config.on
    inputs = _inputs(config)
    make_writable_folder(Path(config.output_dir))
    output = Path(config.output_dir).resolve()
    # Its key is on this computer alone, and so is the knowledge where it was made.
    places = places_of(config.on)
    where = WhereConfig(cluster=config.on, region=places[0][1] if len(places) == 1 else None)
    training = RemoteTraining(where, hashlib.sha256(str(output).encode()).hexdigest()[:12], output)
    folder = reachable_folder(where, None)
    master = OpenSsh(folder.ssh_config, ssh_names(config.on, MASTER)[0])
    home = check_ready(master, training, config.resume_from_checkpoint)
    there = _options_there(config, inputs, home, training)
    resume = there.pop("resume_from_checkpoint", config.resume_from_checkpoint)
    with tempfile.TemporaryDirectory() as place:
        (file := Path(place, "config.yaml")).write_text(to_yaml(replace(config, **there)))
        options = upload_of("the configuration", Path(place), [file])
        options = replace(options, name=f"config-{options.name[-16:]}")
        upload(master, [*inputs.values(), options], _say)
    words = ["--config", f"{home}/pushed/{options.name}/{file.name}"]
    words += ["--resume_from_checkpoint", resume] if resume else []
    with _second_signal_leaves(training):
        stopped_by = _train(master, training, words, _token(config))
        code, wrote = _outcome(master, training)
        if wrote:
            count = master.fetch(f"runs/{training.id}", training.name, training.output)
            _restore_local_paths(training.output / "config.yaml", config)
            _say(f"fetched {count} files into {config.output_dir}")
    if stopped_by is not None:
        raise Stopped(f"Stopped the training on {training.cluster}.", stopped_by)
    if code:
        error = IcomError(f"The training on {training.cluster} failed.")
        error.exit_code = code
        raise error


def _say(text: str) -> None:
    print(f"icom: {text}", file=sys.stderr, flush=True)


def _inputs(config: TrainConfig) -> dict[str, Upload]:
    """What is on this computer and has to be on the nodes: option -> files. Checked here as every rank will.

    Raises:
        IcomError: pictures, captions or a model are no good.
    """
    from icom.data.caption_reading import read_captions
    from icom.data.class_pictures import pictures_there
    from icom.data.images import files_of, list_pictures
    from icom.launch import digests
    from icom.methods.embedding_file import load_initial_rows
    from icom.models import loading

    found = {}
    read_captions(config, list_pictures(config.train_data_dir))
    if config.train_data_dir.partition(":")[0] != "bundled":
        files = files_of(config.train_data_dir)
        found["train_data_dir"] = upload_of("the pictures", files[0].parent, files)
    if config.caption_templates and config.caption_templates != BUILT_IN:
        file = Path(config.caption_templates).expanduser()
        found["caption_templates"] = upload_of("the templates", file.parent, [file])
    if config.with_prior_preservation and (of_the_class := [one.path for one in pictures_there(config)]):
        if len(of_the_class) < config.num_class_images:
            raise UsageError(
                f"--class_data_dir {config.class_data_dir} has {len(of_the_class)} pictures, and --num_class_images is "
                f"{config.num_class_images}. Where --on trains, either all are drawn or none: give --num_class_images "
                f"{len(of_the_class)}, or an empty folder."
            )
        found["class_data_dir"] = upload_of("the pictures of the class", of_the_class[0].parent, of_the_class)
    model, tokenizer = config.pretrained_model_name_or_path, config.tokenizer_name
    if not loading.is_hub_id(model):
        if Path(model).expanduser().is_file():
            raise UsageError(
                f"--on brings folders, and {model} is a single file. Name a folder in diffusers' layout, or bring the "
                "file with icom push and train there."
            )
        source = loading.find(model, tokenizer_name=None, variant=config.variant)
        if source.folder and source.folder != loading.BUNDLE:
            files = digests.model_files(source.folder, config.variant, own_tokenizer=not tokenizer)
            found["pretrained_model_name_or_path"] = upload_of("the model", source.folder, files)
    if tokenizer and not loading.is_hub_id(tokenizer):
        root = Path(tokenizer).expanduser()
        if not root.is_dir():
            raise IcomError(f"No such tokenizer folder: {tokenizer}.")
        found["tokenizer_name"] = upload_of("the tokenizer", root, digests.tokenizer_files(root))
    if config.initial_embedding:
        load_initial_rows(file := Path(config.initial_embedding).expanduser(), config.num_vectors)
        found["initial_embedding"] = upload_of("the initial embedding", file.parent, [file])
    read_prompts(config)
    checkpoint = Path(config.resume_from_checkpoint or "latest").expanduser()
    if config.resume_from_checkpoint != "latest" and checkpoint.is_dir():
        files = [path for path in checkpoint.iterdir() if path.is_file()]
        found["resume_from_checkpoint"] = upload_of("the checkpoint", checkpoint, files)
    return found


def _options_there(
    config: TrainConfig, inputs: dict[str, Upload], home: str, training: RemoteTraining
) -> dict[str, Any]:
    """Options that are others on the nodes."""
    there: dict[str, Any] = {option: f"{home}/pushed/{some.name}" for option, some in inputs.items()}
    for option in _FILES:
        if option in inputs:
            there[option] += f"/{Path(getattr(config, option)).name}"
    if config.prompts_file:  # a few lines need no file there
        there["sample_prompts"] = lines_of(config)
    there["output_dir"] = f"{home}/runs/{training.id}/{training.name}"
    if config.with_prior_preservation:  # those that are drawn there come back with the output
        there.setdefault("class_data_dir", f"{there['output_dir']}/class_pictures")
    return there


def _token(config: TrainConfig) -> str:
    """The token for the upload. It goes through the connection into the environment, not into a file or a command."""
    if not config.push_to_hub:
        return ""
    from huggingface_hub import get_token

    return config.hub_token or get_token() or ""


def check_ready(master: Transport, training: RemoteTraining, resume: str | None) -> str:
    """The home folder on the nodes.

    Raises:
        UsageError: a training runs there, it does not have what is to be resumed, or its nodes have GPUs.
        IcomError: it answers something else.
    """
    state = script("training", "state", f"{training.id}/{training.name}")
    said = master.run(state, doing="Asking whether it trains").splitlines()
    if said == [GPUS]:
        raise UsageError(
            f"The nodes of {training.cluster} have GPUs, and --on trains on CPUs. Bring the pictures with icom push"
            f"{as_options(training.where)}, and train there: icom ssh{as_options(training.where)}, then "
            "mpirun -f ~/hosts -n N -ppn 1 accelerate launch textual_inversion_icom.py …"
        )
    if said[1:2] not in (["known"], ["new"]) or [line.count(" ") for line in said[2:]] not in ([], [1]):
        raise IcomError(f"{master.name} was asked whether it trains, and answers {names.shown(said)}.")
    home, folder, *trains = names.home(said[0]), *said[1:]
    if trains:
        other = names.word(trains[0].rpartition(" ")[2])
        raise UsageError(
            f"A training runs on {training.cluster} already. See it: {training.by_hand} tail -n 20 -f runs/{other}/log."
            f" Stop it: {training.by_hand} {STOP_BY_HAND}. What it saves: icom pull{as_options(training.where)} "
            f"runs/{other}"
        )
    if folder == "new" and resume == "latest" and any(training.output.glob("checkpoint-*")):
        raise UsageError(
            f"{training.cluster} has never trained into {training.output}, which has checkpoints: `latest` would "
            "start anew. Name the one to send: --resume_from_checkpoint "
            f"{shlex.quote(str(training.output / 'checkpoint-N'))}"
        )
    return home


def _train(master: OpenSsh, training: RemoteTraining, options: list[str], token: str) -> int | None:
    """Start it and show what it says until it ends; the signal that stopped it, if one did.

    Raises:
        UsageError: another one was quicker.
    """
    _say(f"training on {training.cluster}")
    sys.stdout.flush()
    words = master.argv(script("training", "start", str(BUSY), training.id, *options))
    sent = None
    # In a session of its own: Ctrl-C is for us, who pass it on.
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as process,
        showing(process, sys.stderr, sys.stdout),
    ):
        assert process.stdin
        try:
            doing = f"telling the training on {training.cluster} to save and end; then its results come"
            with StopRequest(doing) as stop:
                process.stdin.write(f"{token}\n".encode())
                process.stdin.close()
                while process.poll() is None:
                    if stop.signal_number is not None and sent is None:
                        sent = stop.signal_number
                        master.run(script("training", "stop", training.id), doing="Stopping the training")
                    _wait(process)
        except BrokenPipeError:
            process.wait()
        except BaseException:
            process.kill()
            raise
    if process.returncode == BUSY:
        raise UsageError(f"Another training was quicker to start on {training.cluster}; nothing was started.")
    return sent


def _wait(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(ASK_SECONDS)


def _outcome(master: Transport, training: RemoteTraining) -> tuple[int, bool]:
    """Its exit code, and whether it wrote anything.

    Raises:
        IcomError: the connection broke.
    """
    try:
        outcome = script("training", "outcome", training.id, training.name)
        said = master.run(outcome, doing="Asking how it ended").splitlines()
    except IcomError as error:
        raise IcomError(f"{error}\n{training.how_to_go_on()}") from error
    try:
        code = names.exit_code(said[0] if said else "")
    except names.Malformed:
        raise IcomError(f"Lost the connection to {master.name}. {training.how_to_go_on()}") from None
    return code, len(said) > 1


def _restore_local_paths(path: Path, config: TrainConfig) -> None:
    """Put this computer's names of inputs and output into config.yaml, which `icom generate` and `icom train` read."""
    if path.exists():
        places = (
            *("train_data_dir", "pretrained_model_name_or_path", "tokenizer_name", "output_dir"),
            *("class_data_dir", "sample_prompts", *_FILES),
        )
        here = {name: getattr(config, name) for name in places}
        write_atomically(path, to_yaml(replace(load_train_config({"config": str(path)}), **here)).encode())


@contextmanager
def _second_signal_leaves(training: RemoteTraining) -> Iterator[None]:
    """Inside, a signal that nobody else waits for ends this command, with word of how to go on."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"Left at once. {training.how_to_go_on()}", number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
