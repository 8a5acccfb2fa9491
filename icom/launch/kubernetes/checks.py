"""What Kubernetes or the pods would refuse, found before anything is made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from icom.config.captions import BUILT_IN
from icom.config.finetune import FinetuneConfig
from icom.config.launch import LaunchKubernetesConfig
from icom.config.train import TrainConfig
from icom.config.trainings import TrainingConfig
from icom.data.remote import is_remote
from icom.errors import UsageError

_LONGEST_NAME = 45
"""The operators append -launcher-xxxxx, -node-0-12-xxxxx and the like, and 63 is the most for all."""
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){_LABEL.pattern}(\.{_LABEL.pattern})*")
_QUANTITY = re.compile(r"(\d+(\.\d*)?|\.\d+)(m|[kMGTPE]|[KMGTPE]i)?")
_LABEL_PART = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NODE_LABEL = re.compile(rf"({_SUBDOMAIN.pattern}/)?{_LABEL_PART}=({_LABEL_PART})?".replace("(?=.{1,253}$)", ""))
_ON_THE_VOLUME = (
    *("output_dir", "train_data_dir", "caption_templates", "class_data_dir", "concepts_list"),
    *("index", "idx_to_prompt", "from_scratch", "weights_from", "ema_from"),
)
"""Options that are folders or files, whatever they look like; of others only what is one by its looks."""
_MAYBE_PATHS = ("pretrained_model_name_or_path", "tokenizer_name", "initial_embedding", "cache_dir")
"""Not each training has all of these."""


def check(config: LaunchKubernetesConfig, training: TrainingConfig) -> None:
    """Look at the options alone.

    Raises:
        UsageError: all that is wrong with them.
    """
    problems = [*_of_names(config), *_of_amounts(config), *_of_training(config, training)]
    if problems:
        raise UsageError("\n".join(problems) if len(problems) == 1 else "\n- ".join(["This cannot work:", *problems]))


def _of_names(config: LaunchKubernetesConfig) -> Iterator[str]:
    rule = "small letters, digits and -, with a letter first and none of the - at the end"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", config.name) or len(config.name) > _LONGEST_NAME:
        yield f"--name {config.name!r}: Kubernetes takes {rule}; here at most {_LONGEST_NAME}, for what is appended."
    if config.namespace is not None and not _LABEL.fullmatch(config.namespace):
        yield f"--namespace {config.namespace!r}: Kubernetes takes small letters, digits and -, at most 63."
    for option in ("pvc", "service_account", "env_secret"):
        name = getattr(config, option)
        if name is not None and not _SUBDOMAIN.fullmatch(name):
            yield f"--{option} {name!r}: a name in Kubernetes is small letters, digits, - and dots, at most 253."
    if not re.fullmatch(r"[^\s@:/][^\s]*", config.image):
        yield f"--image {config.image!r} is none: REGISTRY/icom:TAG, as `docker pull` takes it."
    for label in config.node_selector.split(",") if config.node_selector is not None else []:
        if not _NODE_LABEL.fullmatch(label):
            yield (
                f"--node_selector: {label!r} is no label. For instance node.kubernetes.io/instance-type=m7i.8xlarge; "
                "several with commas between them."
            )


def _of_amounts(config: LaunchKubernetesConfig) -> Iterator[str]:
    for option, least in (("nodes", 1), ("gpus", 0), ("max_restarts", 0)):
        if getattr(config, option) < least:
            yield f"--{option} {getattr(config, option)}: at least {least}."
    for option, example in (("cpu", "15 or 7500m"), ("memory", "32Gi (2^30 bytes each) or 32G")):
        amount = getattr(config, option)
        if amount is not None and not _QUANTITY.fullmatch(amount):
            yield f"--{option} {amount!r}: Kubernetes writes amounts as {example}."


def _of_training(config: LaunchKubernetesConfig, training: TrainingConfig) -> Iterator[str]:
    mount = PurePosixPath(config.mount_path)
    if not mount.is_absolute() or ".." in mount.parts or ":" in config.mount_path or len(mount.parts) < 2:
        yield f"--mount_path {config.mount_path!r}: a folder in the pods, for instance /data."
        return
    where = f"the volume of --pvc {config.pvc}, which is {mount} in the pods (--mount_path)"
    for option in _ON_THE_VOLUME:
        value = getattr(training, option, None)
        if value is None or _is_no_file(training, option, value):
            continue
        if not _lies_below(value, mount):
            yield (
                f"--{option} {value} does not lie on {where}: for instance {mount / (Path(value).name or option)}. "
                + ("What is written elsewhere ends with the pod." if option == "output_dir" else _COPY)
            )
    for option in _MAYBE_PATHS:
        value = getattr(training, option, None)
        if value and _is_path(value) and not _lies_below(value, mount):
            yield f"--{option} {value} does not lie on {where}. " + _COPY
    prompts = training.prompts_file if isinstance(training, TrainConfig) else None
    if prompts and not _lies_below(prompts, mount):
        yield f"--sample_prompts {prompts} does not lie on {where}. " + _COPY
    if training.resume_from_checkpoint not in (None, "latest"):
        yield (
            f"--resume_from_checkpoint {training.resume_from_checkpoint}: each restart of a pod would go back to it. "
            "`latest`, which is added where nothing is said, goes on from the last one."
        )
    if training.hub_token:
        yield (
            "--hub_token would stand in the manifests. Put it into a Secret (kubectl create secret generic hub "
            "--from-file=HF_TOKEN=FILE) and name that: --env_secret hub."
        )


_COPY = "Copy it there first (docs/kubernetes.md#pictures)."


def _is_no_file(training: TrainingConfig, option: str, value: str) -> bool:
    """Whether what would be a file elsewhere ships with icom, is made up, or lies behind an address."""
    if isinstance(training, FinetuneConfig):
        return (option, value) == ("from_scratch", "model") or is_remote(value) or value.startswith("synthetic:")
    if option == "caption_templates":
        return value == BUILT_IN
    return option == "train_data_dir" and value.partition(":")[0] == "bundled"


def _is_path(value: str) -> bool:
    """Whether it is no Hub id, `bundled` or random:ARCH."""
    return value.startswith(("/", "~", ".")) or Path(value).exists()


def _lies_below(value: str, mount: PurePosixPath) -> bool:
    path = PurePosixPath(value)
    return mount in path.parents and ".." not in path.parts
