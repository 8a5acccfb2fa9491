"""What a training run is made of: options settled, model frozen, rows spliced in, latents cached."""

from __future__ import annotations

import dataclasses
import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from icom.config.common import Precision
from icom.config.rows import RANDOM
from icom.config.train import TrainConfig
from icom.config.training import chosen
from icom.data.captions import Captions
from icom.data.images import Picture
from icom.data.latents import Moments, load_moments
from icom.data.sampling import SampleStream
from icom.data.transform import Transform
from icom.errors import UsageError
from icom.files import cache_folder
from icom.methods import textual_inversion
from icom.models import loading
from icom.parallel.group import ALONE, Group
from icom.training.begin import enable_xformers, make_schedule
from icom.training.checkpoint import Identity, Saved
from icom.training.ema import Ema, decay_of
from icom.training.graphs import Graphs
from icom.training.loop import Running
from icom.training.material import Material
from icom.training.objective import sampling_of, with_zero_snr
from icom.training.optimizers import make_row_optimizer
from icom.training.pictures import bucket_order, transform_of, weighted
from icom.training.rows import Rows, digest, median_norm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from icom.backends import Backend
    from icom.methods.textual_inversion import TextualInversion
    from icom.models.loading import Model


LATER = (
    *("rescale_betas_zero_snr", "snr_gamma", "noise_offset"),
    *("min_timestep", "max_timestep", "timestep_sampling", "logit_mean", "logit_std"),
    *("optimizer", "max_grad_norm", "weight_decay_to_start", "preserve_embedding_norm"),
    *("use_ema", "ema_decay", "ema_half_life", "ema_warmup"),
)
"""Options of the identity that older checkpoints do not know."""


@dataclass
class Run(Running):
    """Everything a step needs; built once, then only parameters, optimizer and scheduler change."""

    config: TrainConfig
    backend: Backend
    group: Group
    accelerator: Accelerator
    model: Model
    method: TextualInversion
    moments: Moments
    stream: SampleStream
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LambdaLR
    identity: Identity
    rows: Rows
    prior: Run | None = None
    """The samples of prior preservation."""
    graphs: Graphs | None = None
    """With --enable_cuda_graph, its recorded passes."""


def settle(
    config: TrainConfig,
    group: Group,
    model_name: str,
    precision: Precision,
    resumed: Saved | None,
    pictures: int,
) -> TrainConfig:
    """Replace every open choice (seed, precision, steps …) by its value: what config.yaml then says."""
    seed = config.seed
    if seed is None:
        seed = resumed.identity.seed if resumed else int(group.broadcast(b"%d" % secrets.randbits(31)))
    epoch = pictures * config.repeats
    batches = math.ceil(epoch / (config.train_batch_size * group.size))
    steps = config.max_train_steps
    if steps is None:
        steps = config.num_train_epochs * math.ceil(batches / config.gradient_accumulation_steps)
    validation_steps = config.validation_steps
    if config.validation_epochs is not None:
        # Samples per epoch, not steps: diffusers' script counts so.
        validation_steps = config.validation_epochs * epoch
        if group.leads:
            print(
                f"icom: --validation_epochs is deprecated; taking --validation_steps {validation_steps}.",
                file=sys.stderr,
            )
    return dataclasses.replace(
        config,
        pretrained_model_name_or_path=model_name,
        seed=seed,
        max_train_steps=steps,
        mixed_precision=precision,
        validation_steps=validation_steps,
        validation_epochs=None,
        sample_every_n_steps=(config.sample_every_n_steps or validation_steps) if config.sample_prompts else None,
    )


@dataclass(frozen=True)
class Frozen:
    """A model that nothing is learned in, loaded and converted once for all that learn beside it in this process.

    Attributes:
        backend: has prepared the model.
        group: the processes.
        accelerator: for the trackers.
        model: the modules; who learns a word has a tokenizer of its own that knows it, see `for_one_more`.
        digests: of the weights as they were loaded, see `digests_of`.
    """

    backend: Backend
    group: Group
    accelerator: Accelerator
    model: Model
    digests: tuple[str, str]

    def for_one_more(self) -> Model:
        """The same modules with a tokenizer that nobody has taught a word: for rows that share all else."""
        return dataclasses.replace(self.model, tokenizer=loading.load_tokenizer(self.model.source))


@dataclass(frozen=True)
class Shown:
    """What a word is learned from, encoded.

    Attributes:
        material: pictures and captions.
        moments: of all pictures, in their order.
        of_the_class: pictures and their moments, with prior preservation.
    """

    material: Material
    moments: Moments
    of_the_class: tuple[list[Picture], Moments] | None = None


def prepare(
    config: TrainConfig,
    backend: Backend,
    accelerator: Accelerator,
    model: Model,
    material: Material,
    group: Group = ALONE,
    initial_rows: Mapping[str, torch.Tensor] | None = None,
    after_step: int = 0,
) -> Run:
    """A run that has the model for itself: attach what is trained, then `freeze` the rest and make the `learner`.

    Args:
        config: with `seed` and `max_train_steps` settled.
        backend: where it will run.
        accelerator: for the trackers.
        model: freshly loaded; is changed.
        material: pictures and captions.
        group: the processes of the run.
        initial_rows: word -> its rows of --initial_embedding, (vectors, width).
        after_step: the run goes on after this optimizer step.

    Raises:
        UsageError: initial rows, placeholder, initializer or xFormers do not fit the model or the machine.
        IcomError: captions that are too long for the word, models that differ, or pictures of the class that cannot be
            had.
    """
    digests = digests_of(model)
    method = attach(model, config, material.captions, initial_rows, group)  # first: it may refuse what it is given
    frozen = freeze(config, backend, accelerator, model, digests, group)
    shown = encode(frozen, config, material)
    return learner(frozen, shown, config, model, method, after_step)


def attach(
    model: Model,
    config: TrainConfig,
    captions: Captions,
    initial_rows: Mapping[str, torch.Tensor] | None,
    group: Group,
) -> TextualInversion:
    """Splice new words into a model; the same rows in all processes.

    Args, Raises: as `textual_inversion.attach`.
    """
    method = textual_inversion.attach(model, config, captions, initial_rows)
    if any(
        word.initializer_token == RANDOM for word in config.words
    ):  # sums over a table may differ in their last bits between machines
        _take_all_alike(method.parameters, group)
    return method


def digests_of(model: Model) -> tuple[str, str]:
    """Digests of (text encoder and UNet, VAE): of a model that nothing was attached to."""
    return loading.weights_digest(model.text_encoder, model.unet), loading.weights_digest(model.vae)


def freeze(
    config: TrainConfig,
    backend: Backend,
    accelerator: Accelerator,
    model: Model,
    digests: tuple[str, str],
    group: Group,
) -> Frozen:
    """Convert a model for its backend.

    Args:
        config: of any of those that will learn beside it: what it says of the model is the same for all.
        backend, accelerator, group: as in `prepare`.
        model: is changed.
        digests: of `digests_of`.

    Raises:
        UsageError: xFormers or CUDA graphs do not fit the model or the machine, or zero-terminal SNR the model.
        IcomError: another process has another model.
    """
    group.agree("The model", {"weights": "".join(digests)})
    if config.rescale_betas_zero_snr:
        model.noise_scheduler = with_zero_snr(model.noise_scheduler, "drop it, or take a model that does")
    if config.enable_xformers_memory_efficient_attention:
        enable_xformers(model.unet)
    if config.enable_cuda_graph and not backend.asynchronous:
        raise UsageError(
            f"--enable_cuda_graph is for --backend cuda, and this run is on {backend.name}, where nothing waits "
            "between kernels. Drop it."
        )
    if config.gradient_checkpointing:
        model.unet.train()  # diffusers checkpoints in training mode only; there is no dropout
        model.unet.enable_gradient_checkpointing()
    backend.prepare(model)
    return Frozen(backend, group, accelerator, model, digests)


def encode(frozen: Frozen, config: TrainConfig, material: Material) -> Shown:
    """Fill the latent cache; with prior preservation, with pictures of the class, too.

    Args:
        frozen: has the VAE.
        config: resolution, crop, cache, class.
        material: its pictures.

    Raises:
        IcomError: pictures of the class cannot be had.
    """
    group, transform = frozen.group, transform_of(config)

    def moments_of(some: list[Picture], transform: Transform) -> Moments:
        return load_moments(
            some,
            transform,
            frozen.model.vae,
            frozen.digests[1],
            cache_folder(config.cache_dir),
            rank=group.rank,
            world_size=group.size,
            local_rank=group.place.local_rank,
            local_size=group.place.local_size,
            wait_for_everyone=group.wait_for_everyone,
            decode_threads=config.dataloader_num_workers,
        )

    pictures = material.pictures
    moments = weighted(moments_of(pictures, transform), pictures, config)
    of_the_class = None
    if config.with_prior_preservation:
        from icom.training.prior import class_pictures

        drawn = class_pictures(config, frozen.model, frozen.backend, group)
        of_the_class = (drawn, moments_of(drawn, dataclasses.replace(transform, alpha_mask=False)))
    return Shown(material, moments, of_the_class)


def learner(
    frozen: Frozen, shown: Shown, config: TrainConfig, model: Model, method: TextualInversion, after_step: int = 0
) -> Run:
    """One that learns beside a frozen model, with optimizer, schedule and sample stream of its own.

    Args:
        frozen: shared with others, or not.
        shown: shared with others, or not.
        config: its own, with `seed` and `max_train_steps` settled.
        model: that the method was attached to.
        method: what is trained.
        after_step: the run goes on after this optimizer step.

    Raises:
        UsageError, IcomError: --class_prompt does not go with the word.
    """
    assert config.seed is not None
    group, material = frozen.group, shown.material
    norm = _norm_to_keep(config, method.concept.table.weight, group)
    optimizer = make_row_optimizer(config, method.parameters, group)
    timesteps = model.noise_scheduler.config["num_train_timesteps"]
    stream = SampleStream(
        config.seed,
        material.trained,
        config.repeats,
        len(material.captions.templates),
        timesteps,
        sampling_of(config, timesteps),
        bucket_order(material.pictures[: material.trained], config, config.seed, config.repeats),
        config.random_crop,
    )
    options = (
        "placeholder_token",
        "num_vectors",
        "learnable_property",
        "resolution",
        "center_crop",
        "repeats",
        "engine",
    )
    used = {name: getattr(config, name) for name in options} | material.captions.identity() | chosen(config, *LATER)
    used |= config.of_pictures(config.train_batch_size)
    if config.further_words:
        used["further_words"] = [[word.placeholder_token, word.num_vectors] for word in config.further_words]
    if config.share_for_validation:  # checkpoints of before there was one have no word of it
        used["validation_share"] = config.share_for_validation
    identity = Identity(
        config.seed,
        "".join(frozen.digests),
        material.files,
        used,
    )
    rows = Rows(config, method.parameters, optimizer, norm=norm)
    if config.weight_decay_to_start:
        rows.start = _copies(method.parameters)
        identity.options["start_rows"] = digest(rows.start)
    if config.use_ema:
        rows.ema = Ema(decay_of(config), _copies(method.parameters))
    run = Run(
        config,
        frozen.backend,
        group,
        frozen.accelerator,
        model,
        method,
        shown.moments,
        stream,
        optimizer,
        make_schedule(config, optimizer, after_step),
        identity,
        rows,
        graphs=Graphs(frozen.backend.record) if config.enable_cuda_graph else None,
    )
    if shown.of_the_class:
        from icom.training.prior import with_prior

        run = with_prior(run, *shown.of_the_class)
    return run


def _copies(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _take_all_alike(parameters: dict[str, torch.nn.Parameter], group: Group) -> None:
    """Rank 0's, for all processes."""
    same = group.broadcast_tensors(parameters if group.leads else None)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(same[name])


def _norm_to_keep(config: TrainConfig, table: torch.Tensor, group: Group) -> float | None:
    """The median norm of the model's rows, as rank 0 has it, where --preserve_embedding_norm asks for it."""
    if not config.preserve_embedding_norm:
        return None
    return float(group.broadcast(repr(median_norm(table)).encode() if group.leads else None))
