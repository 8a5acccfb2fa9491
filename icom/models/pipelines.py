"""Pipelines of diffusers over a model's parts, and the samplers that draw in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from icom.config.generate import SAMPLER
from icom.errors import IcomError
from icom.models.checks import SCHEDULER
from icom.models.kinds import read_json

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, StableDiffusionPipeline

    from icom.models.loading import Model, ModelSource

SAMPLERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
}
"""Names that the field uses -> classes of `diffusers`."""


def pipeline_of(model: Model, sampler: str = SAMPLER) -> StableDiffusionPipeline:
    """A pipeline over the parts that are in memory already, without safety checker.

    Args:
        model: its modules are shared, not copied.
        sampler: a key of SAMPLERS, or "model" for the scheduler that the model ships.
    """
    import diffusers

    scheduler: Any = model.noise_scheduler
    if sampler == "model":
        scheduler = own_sampler(model.source) or scheduler
    else:
        scheduler = _sampler(getattr(diffusers, SAMPLERS[sampler]), scheduler.config, model.source)
    pipeline = diffusers.StableDiffusionPipeline(
        vae=model.vae,
        text_encoder=model.text_encoder,
        tokenizer=model.tokenizer,
        unet=model.unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def own_sampler(source: ModelSource) -> Any:
    """The sampler that a model's folder names; None where there is no folder.

    Raises:
        IcomError: it names none of diffusers', or its options do not go together.
    """
    import diffusers

    if source.folder is None:
        return None
    config = read_json(source.folder, SCHEDULER)
    sampler = getattr(diffusers, config.get("_class_name", "DDPMScheduler"), None)
    if not (isinstance(sampler, type) and issubclass(sampler, diffusers.SchedulerMixin)):
        raise IcomError(
            f"The model in {source.folder} cannot work: _class_name in {SCHEDULER} is {config['_class_name']!r}, no "
            "scheduler of this version of diffusers. Fetch it again, or take another."
        )
    return _sampler(sampler, config, source)


def with_schedule_of(sampler: Any, noise_scheduler: DDPMScheduler) -> Any:
    """A sampler for what was trained with a noise schedule or prediction that may not be the model's own.

    Args:
        sampler: of the model.
        noise_scheduler: that was trained with.
    """
    given, own = noise_scheduler.config, sampler.config
    if all(name not in own or own[name] == given.get(name) for name in ("prediction_type", "rescale_betas_zero_snr")):
        return sampler
    changed = ("prediction_type", "rescale_betas_zero_snr", "timestep_spacing")
    return type(sampler).from_config(own, **{name: given[name] for name in changed if name in given and name in own})


def _sampler(sampler: Any, config: Any, source: ModelSource) -> Any:
    try:
        return sampler.from_config(config)
    except Exception as error:  # a sampler's constructor raises nearly anything for options of strangers
        raise IcomError(
            f"The scheduler of {source.name} cannot be made from its {SCHEDULER}: {error}. Fetch the model again, or "
            "take another."
        ) from error
