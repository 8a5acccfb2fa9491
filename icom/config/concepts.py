"""Several words at once: a list of concepts for `icom train`, as YAML or in the form of diffusers' custom_diffusion."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from icom.config.gpu import GpuOptions
from icom.config.loading import layers
from icom.config.train import TrainConfig, made_of
from icom.config.training import ModelOptions
from icom.config.words import file_name
from icom.errors import UsageError

OF_THE_PROCESS = {
    *(field.name for options in (ModelOptions, GpuOptions) for field in fields(options)),
    *("backend", "engine", "collectives", "mixed_precision", "gradient_checkpointing", "allow_tf32", "compile"),
    *("enable_xformers_memory_efficient_attention", "local_rank", "cache_dir", "rescale_betas_zero_snr"),
    *("output_dir", "logging_dir", "report_to", "resume_from_checkpoint", "hub_token"),
    *("config", "print_config", "concepts_list"),
}
"""Options of the process and of the one frozen model in it: they are the same for all concepts."""

ALONE = {
    "placeholder_token": "each concept has its own: give it there.",
    "initial_embedding": "each concept has its own: give it there.",
    "push_to_hub": "upload those that turned out well, each by its own command: icom train --config "
    "OUTPUT/NAME/config.yaml --resume_from_checkpoint latest --push_to_hub.",
    "hub_model_id": "it goes with --push_to_hub, which is for a word alone.",
    "save_as_full_pipeline": "it would write the whole model once for each: `icom generate` draws with several words.",
    "on": "log in (`icom ssh`) and start it there.",
}
"""Options that do not go with a list, and what to do instead."""

THEIRS = {"instance_data_dir": "train_data_dir"}
"""Keys of diffusers' list that have another name here."""
_WORD = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True)
class Concepts:
    """What `icom train --concepts_list` does.

    Attributes:
        common: what the process does: the first concept's options, but for --output_dir and --concepts_list.
        concepts: what each concept's run does, as of `icom train` alone; their output folders lie in that of `common`.
    """

    common: TrainConfig
    concepts: tuple[TrainConfig, ...]


def load_trainings(flags: Mapping[str, Any]) -> TrainConfig | Concepts:
    """The options of `icom train`: those of one word, or of a list.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value; says of which concept.
    """
    chosen = layers(flags)
    named = [options["concepts_list"] for options in chosen if options.get("concepts_list") is not None]
    if not named:
        return made_of(TrainConfig, chosen, flags.get("config"))
    for name, instead in ALONE.items():
        if any(options.get(name) for options in chosen):
            raise UsageError(f"--{name} does not go with --concepts_list: {instead}")
    if any(options.get("resume_from_checkpoint") not in (None, "latest") for options in chosen):
        raise UsageError(
            "A list goes on from where it was: --resume_from_checkpoint takes `latest` with --concepts_list. Another "
            "checkpoint of one word: icom train --config OUTPUT/NAME/config.yaml --resume_from_checkpoint "
            "checkpoint-N."
        )
    path = str(named[-1])
    concepts: list[TrainConfig] = []
    words: dict[str, str] = {}
    folders: dict[str, str] = {}
    for where, entry in _entries(path):
        concept = _concept(chosen, entry, where)
        tokens = [token for word in concept.words for token in word.tokens]
        for token in tokens:
            if token.lower() in words:
                raise UsageError(
                    f"{where}: the token {token} is that of {words[token.lower()]} already. Every word needs one of "
                    "its own; those of several vectors also take <word>_1, <word>_2 and so on."
                )
        words |= dict.fromkeys((token.lower() for token in tokens), where)
        name = "-".join(file_name(word.placeholder_token) for word in concept.words)
        if name.lower() in folders:
            raise UsageError(
                f"{where}: {concept.label} would be written to the folder {name}, and so is "
                f"{folders[name.lower()]}. Choose another word: folders take letters, digits, dots and hyphens of it."
            )
        folders[name.lower()] = where
        concepts.append(replace(concept, output_dir=str(Path(concept.output_dir) / name)))
    common = replace(concepts[0], output_dir=str(Path(concepts[0].output_dir).parent), concepts_list=path)
    return Concepts(common, tuple(concepts))


def _concept(chosen: Sequence[dict[str, Any]], entry: Mapping[str, Any], where: str) -> TrainConfig:
    """The options of a concept's run, but for its folder."""
    for name in entry:
        if name in OF_THE_PROCESS:
            raise UsageError(
                f"{where}: {name} is the same for all concepts, which share a process and a model. Give it outside of "
                "the list."
            )
        if name in ALONE and name not in ("placeholder_token", "initial_embedding"):
            raise UsageError(f"{where}: {name} does not go with --concepts_list: {ALONE[name]}")
    common = [{name: value for name, value in options.items() if name != "concepts_list"} for options in chosen]
    try:
        return made_of(TrainConfig, [*common, _in_our_names(entry, common)], where)
    except UsageError as error:
        text = str(error)
        raise UsageError(text if where in text else f"{where}: {text}") from error


def _in_our_names(entry: Mapping[str, Any], common: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An entry, which may be one of diffusers' list.

    There, what belongs to prior preservation is passed over without that; and the word is part of the prompt.
    """
    ours = {THEIRS.get(name, name): value for name, value in entry.items()}
    if "instance_data_dir" in entry or "instance_prompt" in entry:
        preserving = [options.get("with_prior_preservation") for options in (*common, entry)]
        if not next((given for given in reversed(preserving) if given is not None), False):
            ours = {name: value for name, value in ours.items() if name not in ("class_prompt", "class_data_dir")}
    if "placeholder_token" not in ours and isinstance(prompt := ours.get("instance_prompt"), str):
        found = list(dict.fromkeys(_WORD.findall(prompt)))
        if not found:
            raise UsageError(
                f"The instance_prompt {prompt!r} is to have a new word in angle brackets, as in 'photo of a <new1> "
                "cat', and has none. Write it so, or give placeholder_token."
            )
        ours["placeholder_token"] = found if len(found) > 1 else found[0]
    return ours


def _entries(path: str) -> list[tuple[str, dict[str, Any]]]:
    """What a list holds, and where each entry stands.

    Raises:
        UsageError: it cannot be read, or is no list of mappings.
    """
    content, lines = _read(path)
    if not isinstance(content, list):
        raise UsageError(
            f"--concepts_list {path} has to hold a list of concepts, each a mapping of options, and holds "
            f"{'nothing' if not content else f'a {_kind(content)}'}. See docs/learning.md#several-words."
        )
    if not content:
        raise UsageError(f"--concepts_list {path} is empty. Name at least one concept.")
    found = []
    for number, entry in enumerate(content, 1):
        line = f" (line {lines[number - 1]})" if number <= len(lines) else ""
        where = f"{path}, entry {number}{line}"
        if not isinstance(entry, dict):
            raise UsageError(f"{where} is a {_kind(entry)}, and has to be a mapping: `option: value` lines.")
        found.append((where, {"on" if name is True else str(name): value for name, value in entry.items()}))
    return found


def _read(path: str) -> tuple[Any, list[int]]:
    """What a file holds, and the lines in which the entries of its list begin, where that can be told."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        if Path(path).suffix.lower() == ".json":
            content = json.loads(text)
        else:
            loaded = OmegaConf.create(text) if text.strip() else OmegaConf.create()
            content = OmegaConf.to_container(loaded)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"Cannot read --concepts_list {path}: {what}.") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:  # JSON may be indented with tabs
        return content, []
    return content, [node.start_mark.line + 1 for node in root.value] if isinstance(root, yaml.SequenceNode) else []


def _kind(value: Any) -> str:
    return {dict: "mapping", list: "list", str: "text", type(None): "nothing"}.get(type(value), "number")
