"""What each command can be told.

One option has one name: the flag, the YAML key and the dataclass field are the same word. Precedence is
defaults < `--config FILE` < flags. The training options that diffusers' `textual_inversion.py` has keep its names,
meanings and defaults; the few deliberate differences are in the docstring of the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from icom.errors import UsageError
from icom.models.architectures import ArchitectureName

REQUIRED: Any = "???"
"""OmegaConf's mark for a value that has to come from the configuration file or a flag."""

_Item = TypeVar("_Item")
Repeatable = tyro.conf.UseAppendAction[list[list[_Item]]]
"""An option that takes several values and may be repeated: --prompt a b --prompt c is [[a, b], [c]]."""

Precision = Literal["no", "fp16", "bf16"]

PrecisionName = Literal["auto", "no", "fp16", "bf16"]
"""What --mixed_precision takes; `auto` becomes one of the others before anything is computed."""

BackendName = Literal["auto", "cpu", "ipex", "cuda"]

EngineName = Literal["auto", "on", "off"]

CollectivesName = Literal["auto", "gloo", "ccl", "mpi", "nccl"]

LrScheduler = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


ConceptName = Literal["blue-heart", "green-star", "orange-ring", "purple-square", "red-moon", "yellow-cross"]
"""The keys of icom.world.concepts.CONCEPTS, for the command line."""

BUNDLED_DEFAULTS = {
    "resolution": 64,
    "train_batch_size": 4,
    "max_train_steps": 500,
    "learning_rate": 1e-2,
    "num_vectors": 1,
    "mixed_precision": "auto",
}
"""Defaults for the bundled model, found by measuring (docs/bundled-model.md); all others have diffusers' own."""


@dataclass(kw_only=True)
class TrainConfig:
    """Learn a new word for Stable Diffusion from a handful of pictures (textual inversion).

    Example: icom train --train_data_dir photos --placeholder_token "<dicoo>" --initializer_token toy
    --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 --mixed_precision auto
    """

    # What is learned, from what.
    pretrained_model_name_or_path: str = "bundled"
    """The frozen model: a Hub id, a folder, a .safetensors file, `bundled`, or `random:ARCH` (sd15, sd2-base, sd21,
    tiny) to measure."""
    train_data_dir: str = REQUIRED
    """Required. A folder with the pictures and nothing else, or one that ships with icom, such as bundled:red-moon."""
    placeholder_token: str = REQUIRED
    """Required. The new word, for instance "<dicoo>". It must not be in the vocabulary yet."""
    initializer_token: str = REQUIRED
    """Required. What the new word starts from: a word the model knows, or a phrase of up to --num_vectors tokens."""
    initial_embedding: str | None = None
    """Start the rows from this learned_embeds.safetensors, and not from --initializer_token."""
    learnable_property: Literal["object", "style"] = "object"
    """Chooses the captions: "a photo of a …" or "a painting in the style of …"."""
    num_vectors: int = 1
    """Rows to train. More hold more detail and take more of the prompt; they start from the initializer's tokens."""
    tokenizer_name: str | None = None
    """Tokenizer to use instead of the model's own: a Hub id or a folder."""
    revision: str | None = None
    """Git revision (branch, tag or commit) of a model on the Hub."""
    variant: str | None = None
    """Variant of the model files, for instance fp16."""

    # Pictures.
    resolution: int = 512
    """Pictures are resized to resolution x resolution pixels; a multiple of 8 (bundled model: 64)."""
    center_crop: bool = False
    """Cut the middle square out before resizing. Without it a picture that is not square is squeezed."""
    repeats: int = 100
    """How often each picture comes up in one epoch."""
    dataloader_num_workers: int = 0
    """Threads that decode pictures while the latent cache is filled; 0: the main one. Steps load nothing."""
    cache_dir: str | None = None
    """Folder of the latent cache. Default: $ICOM_CACHE_DIR, else $XDG_CACHE_HOME/icom, else ~/.cache/icom."""

    # Optimisation.
    train_batch_size: int = 16
    """Pictures per device and forward pass. CPUs gain nothing from more than 1; memory grows with it."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step."""
    max_train_steps: int | None = 5000
    """Optimizer steps. Given together with --num_train_epochs it takes precedence; `None` lets the epochs decide."""
    num_train_epochs: int = 100
    """Passes over pictures x repeats. Given without --max_train_steps it decides (diffusers would take 5000 steps)."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    scale_lr: bool = False
    """Multiply the learning rate by batch size x accumulation x number of processes."""
    lr_scheduler: LrScheduler = "constant"
    """Learning rate over the steps."""
    lr_warmup_steps: int = 500
    """Optimizer steps of linear warm-up (schedules other than `constant`)."""
    lr_num_cycles: int = 1
    """Hard restarts of `cosine_with_restarts`."""
    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.999
    """Decay of AdamW's second moment."""
    adam_weight_decay: float = 1e-2
    """AdamW's decoupled weight decay; it acts on the learned rows."""
    adam_epsilon: float = 1e-8
    """Term in AdamW's denominator."""
    seed: int | None = None
    """Seed of everything random. Default: drawn at start, printed, and kept in config.yaml."""

    # Machine.
    backend: BackendName = "auto"
    """What computes. `auto`: a GPU, else stock PyTorch, or IPEX where it was measured faster; it says why."""
    engine: EngineName = "auto"
    """`on`: packed frozen weights, attention as measured to be fastest here; `off`: stock layers; `auto`: by size."""
    collectives: CollectivesName = "auto"
    """What several processes talk with. `auto`: nccl on GPUs, ccl where oneCCL's bindings are installed, else gloo."""
    mixed_precision: PrecisionName | None = None
    """Precision of the frozen model; the rows stay float32. `auto`: bf16 where the CPU or GPU has instructions for it,
    else `no`; a run that resumes keeps its own. Default: what `accelerate launch` has, else `no` (bundled: `auto`)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    allow_tf32: bool = False
    """Allow TF32 in float32 products and convolutions on NVIDIA GPUs (no effect on CPUs)."""
    compile: bool = False
    """Compile the UNet with torch.compile: faster steps after minutes of compiling (--backend cuda only)."""
    enable_xformers_memory_efficient_attention: bool = False
    """Use xFormers' attention in the UNet (GPUs; xFormers has to be installed)."""
    local_rank: int = -1
    """Accepted for old launchers; the launcher's environment decides."""

    # Results.
    output_dir: str = "text-inversion-model"
    """Folder for embeddings, checkpoints, logs and pictures."""
    save_steps: int = 500
    """Write learned_embeds-steps-N.safetensors every so many steps."""
    save_as_full_pipeline: bool = False
    """Also write the whole pipeline, with the new word in it, to --output_dir."""
    no_safe_serialization: bool = False
    """Also write learned_embeds.bin (a pickle) for tools from before safetensors."""
    num_comparison_images: int | None = None
    """Pictures of the concept made before and after training with the same noise (comparison.png); 0: none. Default: 1,
    unless drawing would take more than a quarter of the training's time (and more than 10 s)."""

    # Checkpoints.
    checkpointing_steps: int = 500
    """Write checkpoint-N, from which training can resume, every so many steps."""
    checkpoints_total_limit: int | None = None
    """Keep only so many checkpoints, the newest (and one more until the next step proves the newest good)."""
    resume_from_checkpoint: str | None = None
    """A checkpoint folder, or `latest`: the newest complete one; it starts anew where there is none. Bit-exact."""

    # Watching it.
    validation_prompt: str | None = None
    """Prompt to draw during training, for instance "a photo of <dicoo> on the beach"."""
    num_validation_images: int = 4
    """Pictures per validation."""
    validation_steps: int = 100
    """Validate every so many steps."""
    validation_epochs: int | None = None
    """Deprecated: use --validation_steps."""
    report_to: Literal["auto", "tensorboard", "wandb", "comet_ml", "all", "none"] = "auto"
    """Tracker for loss, learning rate and validation pictures. `auto`: tensorboard where it is installed."""
    logging_dir: str = "logs"
    """Folder for TensorBoard, below --output_dir."""

    # Hub.
    push_to_hub: bool = False
    """Upload the embedding to the Hugging Face Hub, with a model card. diffusers' script always uploads the whole
    pipeline; here --save_as_full_pipeline adds it."""
    hub_token: str | None = None
    """Token for the upload. Default: the one from `hf auth login` or $HF_TOKEN. Never written to any file."""
    hub_model_id: str | None = None
    """Repository for the upload. Default: the name of --output_dir."""

    # This command.
    config: str | None = None
    """YAML file with these options; flags go before it. ${…} interpolates, ??? marks what has to be given."""
    print_config: bool = False
    """Print the effective configuration as YAML and stop."""
    on: str | None = None
    """Train on this cluster of `icom provision`: pictures and models go there, --output_dir comes back."""


@dataclass(kw_only=True)
class GenerateConfig:
    """Draw pictures with a learned word.

    Example: icom generate --embedding out/learned_embeds.safetensors --prompt "a photo of <dicoo>"
    """

    embedding: Repeatable[str] = field(default_factory=list)
    """Learned words: files (learned_embeds.safetensors, .bin, .pt) or Hub ids; FILE=<word> names the word anew."""
    prompt: Repeatable[str] = field(default_factory=list)
    """One or several prompts."""
    prompts_file: str | None = None
    """Text file with one prompt per line; empty lines and lines that start with # are skipped."""
    negative_prompt: str | None = None
    """What the pictures should not show."""
    pretrained_model_name_or_path: str | None = None
    """The model to draw with. Default: the one in the config.yaml beside the first embedding, else `bundled`."""
    tokenizer_name: str | None = None
    """Tokenizer to use instead of the model's own."""
    revision: str | None = None
    """Git revision of a model on the Hub."""
    variant: str | None = None
    """Variant of the model files, for instance fp16."""
    seed: Repeatable[int] = field(default_factory=list)
    """One or several seeds (default: 0); each prompt is drawn once per seed. A picture depends on those two alone."""
    num_images_per_prompt: int = 1
    """Pictures per prompt and seed (further ones use the seeds that follow)."""
    scheduler: Literal["model", "ddim", "ddpm", "dpm++", "euler", "euler_a", "pndm", "unipc"] = "dpm++"
    """Sampler; `model` takes the one that the model ships."""
    num_inference_steps: int = 25
    """Denoising steps."""
    guidance_scale: float = 7.5
    """Classifier-free guidance; 1 turns it off and halves the time."""
    resolution: int | None = None
    """Width and height in pixels, a multiple of 8. Default: the model's own."""
    mixed_precision: PrecisionName = "no"
    """Precision of the model; `auto` as in `icom train`."""
    backend: BackendName = "auto"
    """What computes, as in `icom train`."""
    engine: EngineName = "auto"
    """As in `icom train`."""
    output_dir: str = "generated"
    """Folder for the pictures."""
    grid: bool = False
    """Also write grid.png: a row per prompt, a column per seed."""


@dataclass(kw_only=True)
class ConvertConfig:
    """Write a learned word of any format (A1111's .pt, learned_embeds.bin, …) as safetensors.

    Example: icom convert charturner.pt --output charturner.safetensors
    """

    embedding: tyro.conf.Positional[str]
    """A file or a Hub id; FILE=<word> names the word anew. Of pickled files only tensors are read."""
    output: str | None = None
    """The file to write. Default: FILE.safetensors beside it; for a Hub id here, under the repository's name."""


@dataclass(kw_only=True)
class DemoConfig:
    """Learn a thing that the bundled model has never drawn, and let a judge count before and after. No download."""

    concept: ConceptName = "blue-heart"
    """Which of the bundled concept sets (five pictures each) to learn."""
    max_train_steps: int | None = None
    """Optimizer steps. Default: what `icom train` takes for the bundled model."""
    num_images: int = 16
    """Pictures to judge: so many before training, so many after it, and so many in a new context."""
    backend: BackendName = "auto"
    """What trains, as in `icom train`. The pictures that are judged are drawn by stock PyTorch on the CPU."""
    seed: int = 0
    """Seed of the training; the pictures are drawn from the seeds 0, 1, 2 … in any case."""
    output_dir: str = "demo"
    """Folder for the results of the training and before-after.png."""


@dataclass(kw_only=True)
class ParamsConfig:
    """Print how many parameters each part of a model has. Architectures are known without a download."""

    model: tyro.conf.Positional[str]
    """sd15, sd2-base, sd21, tiny, bundled, a folder, a single file, or a Hub id."""
    json: bool = False
    """Print JSON."""


@dataclass(kw_only=True)
class BenchConfig:
    """Measure seconds per training step on this machine. Each measurement runs in its own fresh process."""

    arch: ArchitectureName = "sd15"
    """Architecture to build with random weights (speed does not depend on their values)."""
    compare: Literal["none", "reference"] = "none"
    """`reference`: also the usual step (VAE at every step, whole token table), with the stock allocator and ours."""
    resolution: int | None = None
    """Pixels. Default: the architecture's own."""
    batch_size: int = 1
    """Pictures per step."""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """Precision of the frozen model."""
    backend: BackendName = "auto"
    """As in `icom train`; the reference runs on stock PyTorch's CPU kernels."""
    engine: EngineName = "auto"
    """As in `icom train`; the reference never uses it."""
    sweep: str | None = None
    """Measure --sweep_batch_sizes x backends x engines instead; writes SWEEP.csv and SWEEP.png."""
    sweep_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Batch sizes of --sweep."""
    ranks: str | None = None
    """Measure groups of so many processes instead, as in `--ranks 1,2`: all with equal cores, batch and work each."""
    steps: int = 4
    """Timed steps per process, after a few that warm up."""
    rounds: int = 3
    """Processes per contender; contenders take turns, so that a slow minute hits all of them."""
    json: str | None = None
    """Also write the result to this file."""


@dataclass(kw_only=True)
class DoctorConfig:
    """Check what a long run needs: CPU, memory, disk, versions, network. Exit code 1: training would fail.

    Example: icom doctor --output_dir runs/dicoo
    """

    output_dir: str = "text-inversion-model"
    """Where training is to write: --output_dir of `icom train`."""
    cache_dir: str | None = None
    """Folder of the latent cache: --cache_dir of `icom train`."""
    json: str | None = None
    """Also write the findings to this file; `-` prints them as JSON instead of the table."""


def load_train_config(path: str | None, flags: TrainConfig, given: Sequence[str]) -> TrainConfig:
    """Lay the flags that were given over the YAML file, resolve interpolations, and check the whole.

    Args:
        path: YAML file, or None.
        flags: what the command-line parser returned.
        given: names of the options that stood on the command line; only these override the file.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = OmegaConf.structured(TrainConfig)
    chosen = [read_yaml(path)] if path else []
    chosen.append({name: _literal(getattr(flags, name)) for name in given})
    try:
        with without_the_environment(path):
            _let_epochs_decide(chosen)
            merged = OmegaConf.merge(schema, *chosen)
            if merged.pretrained_model_name_or_path == "bundled":
                merged = OmegaConf.merge(schema, BUNDLED_DEFAULTS, *chosen)
            missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
            if missing:
                example = {
                    "train_data_dir": "photos",
                    "placeholder_token": '"<dicoo>"',
                    "initializer_token": "toy",
                }
                hint = " ".join(f"--{key} {example.get(key, 'VALUE')}" for key in missing)
                raise UsageError(f"Missing: {', '.join(missing)}. Give them as flags ({hint}) or in --config FILE.")
            config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UsageError(_explain_omegaconf(error, path)) from error
    assert isinstance(config, TrainConfig)
    check_train_config(config)
    return config


@contextmanager
def without_the_environment(path: str | None) -> Iterator[None]:
    """Inside, no interpolation of OmegaConf's reads an environment variable: what a file says is written to others.

    Args:
        path: the file, for the message.

    Raises:
        UsageError: one tried.
    """
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    tried: list[str] = []

    def refuse(name: object, *_: object) -> str:
        tried.append(str(name))
        raise PermissionError

    OmegaConf.register_resolver("oc.env", refuse, replace=True, annotation_validation="off")
    try:
        yield
    except Exception:
        if not tried:
            raise
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True, annotation_validation="off")
    if tried:
        raise UsageError(
            f"{path} asks for the environment variable {tried[0]!r} (${{oc.env:…}}). Files may not read the "
            "environment: options are written to config.yaml, model cards and trackers. Write the value itself, or "
            "give it as a flag."
        )


def _let_epochs_decide(chosen: list[dict[str, Any]]) -> None:
    """Who names epochs and no steps means them: neither a default nor a file below may bring steps in.

    Args:
        chosen: options as given, the last one counts most; `max_train_steps` is added where epochs stand alone.
    """
    for options in reversed(chosen):
        if "max_train_steps" in options:
            return
        if "num_train_epochs" in options:
            options["max_train_steps"] = None
            return


def read_yaml(path: str) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        UsageError: the file is missing, not YAML, or not a mapping.
    """
    import yaml
    from omegaconf import OmegaConf

    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise UsageError(
            f"No such configuration file: {path}. Make one with `icom train … --print_config > {path}`."
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"Cannot read the configuration file {path}: {error}") from error
    if not OmegaConf.is_dict(loaded):
        raise UsageError(f"{path} has to hold `option: value` lines.")
    container = OmegaConf.to_container(loaded, resolve=False)
    assert isinstance(container, dict)
    # The key `on` is true to YAML.
    return {"on" if key is True else str(key): value for key, value in container.items()}


def _explain_omegaconf(error: Exception, path: str | None) -> str:
    """One sentence for what OmegaConf says in several lines."""
    key = getattr(error, "key", None) or getattr(error, "full_key", None)
    where = f" in {path}" if path else ""
    if "not in 'TrainConfig'" in str(error) and key is not None:
        near = difflib.get_close_matches(str(key), [f.name for f in fields(TrainConfig)], n=1)
        return f"Unknown option `{key}`{where}." + (f" Did you mean `{near[0]}`?" if near else "")
    return f"Bad value for `{key}`{where}: {str(error).splitlines()[0]}"


def check_train_config(config: TrainConfig) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        UsageError: names the option and how to fix it.
    """
    at_least_one = (
        *("num_vectors", "repeats", "train_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
        *(
            "max_train_steps",
            "save_steps",
            "checkpointing_steps",
            "checkpoints_total_limit",
            "validation_steps",
        ),
        *("num_validation_images", "lr_num_cycles"),
    )
    for name in at_least_one:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} has to be at least 1, not {value}.")
    for name in ("lr_warmup_steps", "dataloader_num_workers", "num_comparison_images", "adam_weight_decay"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise UsageError(f"--{name} must not be negative.")
    for name in ("learning_rate", "adam_epsilon"):
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} has to be a positive number, not {value}.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UsageError(f"--{name} has to be in [0, 1).")
    if config.seed is not None and not 0 <= config.seed < 2**63:
        raise UsageError("--seed has to be between 0 and 2^63 - 1.")
    check_resolution(config.resolution)
    check_placeholder(config.placeholder_token)
    if not config.initializer_token.strip():
        raise UsageError("--initializer_token is empty. Give a word that the model knows, for instance toy.")
    if config.initial_embedding:
        place = Path(config.initial_embedding).expanduser().resolve().parent
        if place == Path(config.output_dir).expanduser().resolve():
            raise UsageError(
                f"--initial_embedding {config.initial_embedding} lies in --output_dir, where a run replaces such "
                "files. Choose another --output_dir."
            )
    check_secrets(config)


def check_secrets(config: TrainConfig) -> None:
    """Refuse a token in an option that is written to files, where ${hub_token} brings it, for instance.

    Raises:
        UsageError: names the option, not the token.
    """
    for name in SECRETS:
        secret = getattr(config, name)
        for other, value in settings(config).items():
            if secret and isinstance(value, str) and secret in value:
                raise UsageError(
                    f"--{other} contains --{name}: it would be written to config.yaml, the model card and trackers. "
                    "Take it out."
                )


def check_resolution(resolution: int) -> None:
    """The VAE halves the picture three times, so both sides have to be multiples of 8.

    Raises:
        UsageError: otherwise.
    """
    if resolution < 8 or resolution % 8:
        below = max(8, resolution // 8 * 8)
        raise UsageError(f"--resolution has to be a multiple of 8, not {resolution}. Nearest: {below} or {below + 8}.")


def check_placeholder(token: str) -> None:
    """Refuse placeholders that a tokenizer would split or normalise away.

    Raises:
        UsageError: the token is empty or holds white space.
    """
    if not token or token.split() != [token]:
        raise UsageError(f"--placeholder_token has to be one word without spaces, for instance <dicoo>; not {token!r}.")


SECRETS = ("hub_token",)
OF_THE_COMMAND = ("config", "print_config", "on", "resume_from_checkpoint")
"""Fields that steer one invocation and say nothing about the run."""


def settings(config: TrainConfig) -> dict[str, Any]:
    """What describes the run: all options but secrets and those that steer one invocation."""
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in (*SECRETS, *OF_THE_COMMAND)}


def to_yaml(config: TrainConfig) -> str:
    """The effective configuration as YAML that `--config` takes again. Secrets are left out."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create({name: _literal(value) for name, value in settings(config).items()}))


def _literal(value: Any) -> Any:
    """A value whose ${…}, in a prompt say, is text and no interpolation: only files interpolate."""
    return value.replace("${", "\\${") if isinstance(value, str) else value
