"""Find and load the frozen model: from the Hub, a folder, the bundle that ships with icom, or random weights."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom.errors import IcomError, UsageError
from icom.models import hub, pipelines, single_file
from icom.models.architectures import ARCHITECTURES, fill_random
from icom.models.checks import SCHEDULER, TOKENIZER, check_configs, check_weights
from icom.models.kinds import CONFIGS, read_json, refuse_other_kinds
from icom.models.parts import PARTS, TEXT_ENCODER, Conditioning, Part

if TYPE_CHECKING:
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

BUNDLE = Path(__file__).parents[1] / "assets" / "model"
"""The small pipeline that ships with icom."""

MOVED = {"runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5"}
"""Models that vanished from the Hub -> their copies there."""

_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: exactly one of `folder`, `architecture` and `file` is set.

    `name` is what the user asked for, after redirects: it goes into model cards and commands to type.
    """

    name: str
    folder: Path | None = None
    architecture: str | None = None
    tokenizer: Path | None = None
    variant: str | None = None
    file: single_file.SingleFile | None = None


@dataclass
class Model:
    """The frozen parts of a Stable Diffusion model, on the CPU."""

    source: ModelSource
    tokenizer: CLIPTokenizer
    text_encoder: CLIPTextModel
    vae: AutoencoderKL
    unet: UNet2DConditionModel
    noise_scheduler: DDPMScheduler

    @property
    def parts(self) -> dict[str, torch.nn.Module]:
        """Name -> module, for all of PARTS."""
        return {part.name: getattr(self, part.name) for part in PARTS}

    def encode(self, ids: torch.Tensor) -> Conditioning:
        """What captions tell the UNet.

        Args:
            ids: int64 (batch, context length), on the text encoder's device.
        """
        return Conditioning(self.text_encoder(ids)[0])


def quiet_libraries() -> None:
    """Keep Hugging Face's libraries from talking into our output; their errors still come through."""
    # Has to be in the environment before the import: transformers talks while it is imported.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import diffusers
    import transformers

    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def find(
    name: str,
    *,
    tokenizer_name: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    configs_only: bool = False,
) -> ModelSource:
    """Turn what the user wrote into a place to load from, downloading what a Hub id needs.

    Args:
        name: `bundled`, `random:ARCH`, a folder, a single file, or a Hub id.
        tokenizer_name: folder or Hub id of another tokenizer.
        revision: Git revision on the Hub.
        variant: for instance "fp16".
        configs_only: spare the download of the weights; the source can then not be loaded.

    Raises:
        IcomError: no such model, a component is missing, or the Hub cannot be reached.
    """
    tokenizer = _find_tokenizer(tokenizer_name) if tokenizer_name else None
    if name == "bundled":
        return ModelSource(name, BUNDLE, tokenizer=tokenizer)
    if name.startswith("random:"):
        architecture = name.removeprefix("random:")
        if architecture not in ARCHITECTURES:
            raise IcomError(f"No architecture {architecture!r}; random: knows {', '.join(ARCHITECTURES)}.")
        return ModelSource(name, architecture=architecture, tokenizer=tokenizer)
    if Path(name).expanduser().is_dir():
        source = ModelSource(name, Path(name).expanduser(), tokenizer=tokenizer, variant=variant)
        _check_kind(source)
        _check_folder(source, configs_only=configs_only)
        return source
    if Path(name).expanduser().is_file():
        file = single_file.examine(Path(name).expanduser())
        return ModelSource(name, tokenizer=tokenizer or (None if configs_only else _vocabulary(name)), file=file)
    if not is_hub_id(name):
        raise IcomError(
            f"No such model folder: {name}. Give a folder with a Stable Diffusion pipeline in diffusers' layout, "
            "a single .safetensors or .ckpt file, a Hub id (owner/name), or `bundled`."
        )
    if name in MOVED:
        print(f"icom: {name} is gone from the Hub; taking its copy {MOVED[name]}.", file=sys.stderr)
        name = MOVED[name]
    # What is small comes first, and says whether the rest is worth fetching.
    source = ModelSource(name, hub.snapshot(name, revision, [*CONFIGS, SCHEDULER]), None, tokenizer, variant)
    _check_kind(source)
    _check_folder(source, configs_only=True)
    if not configs_only:
        _download(source)
    return source


def is_hub_id(name: str) -> bool:
    """Whether a model of that name can only be on the Hub: owner/name, neither a folder here nor a file."""
    is_here = Path(name).is_dir() or Path(name).suffix in single_file.SUFFIXES
    return bool(_HUB_ID.fullmatch(name)) and not name.startswith(".") and not is_here


def load(source: ModelSource, dtype: torch.dtype) -> Model:
    """Load all parts, frozen.

    Args:
        source: from `find`.
        dtype: precision of VAE and UNet. The text encoder is loaded in float32: its rows are trained.

    Raises:
        IcomError: a file is damaged or does not fit.
        UsageError: the tokenizer is another model's.
    """
    tokenizer, noise_scheduler = load_tokenizer(source), load_scheduler(source)
    modules = load_parts(source, dtype, PARTS, tokenizer)
    # A tokenizer from a bare vocabulary knows no limit, and pipelines pad to it.
    context_length: int = modules["text_encoder"].config.max_position_embeddings
    tokenizer.model_max_length = min(tokenizer.model_max_length, context_length)
    return Model(source, tokenizer, noise_scheduler=noise_scheduler, **modules)


def load_parts(
    source: ModelSource, dtype: torch.dtype, parts: Sequence[Part], tokenizer: CLIPTokenizer | None = None
) -> dict[str, Any]:
    """Load some parts, frozen.

    Args:
        source: from `find`.
        dtype: precision of those that are not always in float32.
        parts: of PARTS, in that order.
        tokenizer: which the text encoder's table has to fit.

    Raises:
        IcomError: a file is damaged or does not fit.
        UsageError: the tokenizer is another model's.
    """
    import torch

    quiet_libraries()
    modules: dict[str, Any] = {}
    if source.file:
        loaded = single_file.load_parts(source.file, dtype)
        modules = {part.name: loaded[part.name] for part in parts}
    for part in parts:
        if source.architecture:
            with torch.device("meta"):
                module = part.build(ARCHITECTURES[source.architecture])
            module = module.to(torch.float32 if part.in_float32 else dtype).to_empty(device="cpu")
            fill_random(module, PARTS.index(part))
            if part is TEXT_ENCODER:  # position_ids is a buffer: to_empty lost its values
                positions = module.embeddings.position_ids
                positions.copy_(torch.arange(positions.shape[-1])[None])
            modules[part.name] = module
        elif not source.file:
            modules[part.name] = _load_weights(part, source, torch.float32 if part.in_float32 else dtype)
        if part is TEXT_ENCODER and tokenizer is not None:  # before the gigabytes
            _check_vocabulary(source, tokenizer, modules[part.name])
    for module in modules.values():
        module.requires_grad_(False)
        module.eval()
    return modules


def load_scheduler(source: ModelSource) -> DDPMScheduler:
    """The noise schedule that the model was trained with.

    Raises:
        IcomError: its file is damaged.
    """
    quiet_libraries()
    from diffusers import DDPMScheduler

    if source.architecture:
        return DDPMScheduler(**ARCHITECTURES[source.architecture].scheduler)
    if source.file:
        schedule = ARCHITECTURES[source.file.architecture].scheduler | {"prediction_type": source.file.prediction}
        return DDPMScheduler(**schedule)
    noise_scheduler = _load_part(DDPMScheduler, source.folder, "scheduler")
    assert isinstance(noise_scheduler, DDPMScheduler)
    pipelines.own_sampler(source)
    return noise_scheduler


def load_tokenizer(source: ModelSource) -> CLIPTokenizer:
    """Load the tokenizer (the bundled one for random weights, unless another is named).

    Raises:
        IcomError: its files are damaged.
    """
    quiet_libraries()
    from transformers import CLIPTokenizer

    folder = source.tokenizer or (source.folder or BUNDLE) / "tokenizer"
    if not any(all((folder / name).is_file() for name in names) for names in _VOCABULARIES):
        # transformers would make an empty tokenizer.
        raise IcomError(
            f"The tokenizer folder {folder} lacks tokenizer.json (or vocab.json and merges.txt). Fetch the model "
            "again, or name another tokenizer with --tokenizer_name."
        )
    check_configs(folder, [TOKENIZER])
    tokenizer = _load_part(CLIPTokenizer, folder, None)
    assert isinstance(tokenizer, CLIPTokenizer)
    if source.file and source.file.architecture.startswith("sd2"):
        tokenizer.pad_token = "!"  # as Stable Diffusion 2.x was trained; 1.x with the end of text
    return tokenizer


def configuration(model: ModelSource, part: Part) -> dict[str, Any]:
    """A part's configuration, without its weights; what its file leaves out has the library's defaults."""
    import torch

    with torch.device("meta"):
        if model.folder:
            built = part.build_from(model.folder)
        else:
            architecture = model.architecture or (model.file.architecture if model.file else "")
            built = part.build(ARCHITECTURES[architecture])
    values: dict[str, Any] = dict(built.config) if part.library == "diffusers" else built.config.to_dict()
    return values


def broken_parts(source: ModelSource, dtype: torch.dtype) -> list[str]:
    """Which parts of a model have weights that are not finite. Loads it anew: those in use may be packed."""
    import torch

    parts = load(source, dtype).parts
    return [name for name, part in parts.items() if not all(bool(torch.isfinite(p).all()) for p in part.parameters())]


def weights_digest(*modules: torch.nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all parameters and buffers."""
    import torch

    digest = hashlib.sha256()
    for module in modules:
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _load_part(loader: Any, folder: Path | None, subfolder: str | None, **options: Any) -> Any:
    if subfolder is not None:
        options["subfolder"] = subfolder
    try:
        return loader.from_pretrained(str(folder), local_files_only=True, **options)
    except Exception as error:
        # The loaders raise nearly anything for a damaged file (OSError, ValueError, KeyError, SafetensorError, …).
        place = f"{subfolder} in {folder}" if subfolder else f"tokenizer in {folder}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
        if isinstance(error, KeyError):
            reason = f"lacks {reason}"
        raise IcomError(
            f"Cannot load the {place}: {reason}. The file is damaged or not whole; fetch the model again."
        ) from error


def _load_weights(part: Part, source: ModelSource, dtype: torch.dtype) -> Any:
    """Load a module and prove that every weight came from the file: the loaders make up what they do not find."""
    options: dict[str, Any] = {"variant": source.variant, "use_safetensors": True, "output_loading_info": True}
    if part.library == "transformers":
        # What does not fit is then reported by name, as diffusers does in any case.
        options |= {"dtype": dtype, "ignore_mismatched_sizes": True}
    else:
        options["torch_dtype"] = dtype
    module, report = _load_part(part.load_class(), source.folder, part.name, **options)
    mismatched = {key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]}
    wrong = sorted({*report["missing_keys"], *mismatched})
    if wrong:
        raise IcomError(
            f"The weights of the {part.name} in {source.folder} do not fit its config.json: {len(wrong)} are missing "
            f"or of another shape ({wrong[0]}{', …' if wrong[1:] else ''}). Fetch the model again."
        )
    # The loaders put the folder here, which is nobody's business where a pipeline is published.
    name = source.name if is_hub_id(source.name) else ""
    if part.library == "transformers":
        module.config.name_or_path = name
    else:
        module.register_to_config(_name_or_path=name)
    return module


def _check_vocabulary(source: ModelSource, tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel) -> None:
    """A tokenizer of another size numbers its words otherwise: the model would read other words than are written.

    Random weights know no words, and are used with the bundled tokenizer, which is smaller.
    """
    words, rows = len(tokenizer), text_encoder.config.vocab_size
    if words > rows or (words < rows and not source.architecture):
        raise UsageError(
            f"The tokenizer has {words} tokens and the text encoder's table {rows} rows: they do not belong together. "
            "Drop --tokenizer_name or name the tokenizer of this model."
        )


def _check_kind(source: ModelSource) -> None:
    """Refuse a folder, or a snapshot of the Hub's small files, that holds another kind of model."""
    assert source.folder is not None
    documents = {name: read_json(source.folder, name) for name in CONFIGS if (source.folder / name).is_file()}
    if is_hub_id(source.name):
        # The names of all files are one more question to the Hub: only asked where the small ones are not there.
        names = [] if "unet/config.json" in documents else hub.file_names(source.name, source.folder.name)
    else:
        names = [path.name for path in source.folder.iterdir()]
    refuse_other_kinds(source.name, documents, names)


def _check_folder(source: ModelSource, *, configs_only: bool = False) -> None:
    """Name everything that is missing in a model folder at once, and check its numbers against the weights' headers."""
    assert source.folder is not None
    suffix = f".{source.variant}.safetensors" if source.variant else ".safetensors"
    wanted = [*(f"{part.name}/config.json" for part in PARTS), SCHEDULER]
    missing = [name for name in wanted if not (source.folder / name).is_file()]
    weights: dict[str, list[Path]] = {}
    if not configs_only:
        for part in PARTS:
            whole = source.folder / part.name / f"{part.weights}{suffix}"
            files = [whole] if whole.is_file() else sorted(whole.parent.glob(f"{part.weights}*{suffix}"))
            weights[part.name] = files
            missing += [] if files else [f"{part.name}/{whole.name}"]
        if source.tokenizer is None and not (source.folder / "tokenizer").is_dir():
            missing.append("tokenizer/")
    if missing:
        raise IcomError(
            f"The model folder {source.folder} lacks {', '.join(sorted(missing))}. It has to be a Stable Diffusion "
            "pipeline in diffusers' layout with safetensors weights."
        )
    check_configs(source.folder)
    check_weights(source.folder, weights)


def _find_tokenizer(name: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(name):
        raise IcomError(f"No such tokenizer folder: {name}.")
    downloaded = hub.snapshot(name, None, ["*.json", "*.txt", "tokenizer/*"])
    return downloaded / "tokenizer" if (downloaded / "tokenizer").is_dir() else downloaded


def _vocabulary(name: str) -> Path:
    """The tokenizer for a single file, which holds none."""
    try:
        return _find_tokenizer(single_file.TOKENIZER_HOME)
    except IcomError as error:
        raise IcomError(
            f"{name} holds no tokenizer, and the one of {single_file.TOKENIZER_HOME} cannot be had ({error}) Name one "
            "with --tokenizer_name: a folder with vocab.json and merges.txt, such as tokenizer/ of a model's folder."
        ) from error


def _download(source: ModelSource) -> None:
    """Fetch just the files that are needed: no pickles, no other variants, no safety checker."""
    assert source.folder is not None
    suffix = f".{source.variant}.safetensors" if source.variant else ".safetensors"
    patterns = ["scheduler/*.json", *([] if source.tokenizer else ["tokenizer/*"])]
    for part in PARTS:
        patterns += [f"{part.name}/config.json", f"{part.name}/{part.weights}{suffix}"]
    hub.snapshot(source.name, source.folder.name, patterns)  # the commit whose configurations were checked
    _check_folder(source)
