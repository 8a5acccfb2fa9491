"""Where options come from: defaults < `--config FILE` < flags, for any dataclass of options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from icom.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")


def required(example: str) -> Any:
    """A field without a default, which the file or a flag has to give.

    Args:
        example: what to type after the flag.
    """
    return field(default="???", metadata={"example": example})  # OmegaConf's mark


_DOTTED = re.compile(r"\w+(\.\w+)+=")
"""Begins a word such as filters.pwatermark=<=0.5, which gives one key of an option that is a mapping."""


def read_flags(options: type[DataclassInstance], argv: Sequence[str], program: str) -> dict[str, Any]:
    """The options that stand in `argv`, and no others. tyro prints help (exit 0) and usage errors (exit 2) itself.

    Args:
        options: the dataclass. It is not made: flags may be half of what belongs together.
        argv: without the command's name; words such as `filters.pwatermark=<=0.5` give keys of mappings.
        program: the command's name, for help and errors.
    """
    import tyro
    from omegaconf import OmegaConf

    words = [word for word in argv if not _DOTTED.match(word)]
    dotted = OmegaConf.to_container(OmegaConf.merge({}, *(_dotted(word) for word in argv if _DOTTED.match(word))))
    assert isinstance(dotted, dict)
    unchecked = type(options.__name__, (options,), {"__doc__": options.__doc__, "__post_init__": lambda self: None})
    tyro.cli(unchecked, args=words, prog=program, use_underscores=True, config=(tyro.conf.SuppressFixed,))
    # Knows no defaults to show, and returns none.
    plain, annotated = get_type_hints(options), get_type_hints(options, include_extras=True)
    hints = {name: annotated[name] for name, kind in plain.items() if not _only_in_files(kind)}
    given = TypedDict("given", hints, total=False)  # type: ignore[misc]
    return {str(name): value for name, value in dotted.items()} | dict(
        tyro.cli(given, args=words, use_underscores=True)
    )


def _only_in_files(kind: Any) -> bool:
    """Whether options of this type are none of the command line: mappings, and lists of structures."""
    origin = get_origin(kind)
    return origin is dict or (origin is list and is_dataclass(get_args(kind)[0]))


def _dotted(word: str) -> Any:
    """What `filters.width=>=512` gives: in YAML, where that can be read as such, else a text."""
    import yaml
    from omegaconf import OmegaConf

    try:
        return OmegaConf.from_dotlist([word])
    except yaml.YAMLError:
        made = OmegaConf.create()
        OmegaConf.update(made, *word.split("=", 1))
        return made


def layers(flags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was chosen: the content of `--config`, where there is one, and the flags, which count more.

    Raises:
        UsageError: the file is missing, not YAML, or not a mapping.
    """
    file = read_yaml(flags["config"]) if flags.get("config") else {}
    return [file, {name: literal(value) for name, value in flags.items()}]


def merge(
    options: type[Options],
    chosen: Sequence[Mapping[str, Any]],
    path: str | None,
    below: Callable[[Any], Mapping[str, Any]] = lambda merged: {},
) -> Options:
    """Lay what was chosen over the defaults, resolve interpolations, and make the options, which checks them.

    Args:
        options: the dataclass.
        chosen: options by name; the last counts most.
        path: the file among them, for messages.
        below: from all that was merged, defaults that lie below what was chosen.

    Raises:
        UsageError: unknown key, wrong type, missing or impossible value.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with without_the_environment(path):
            merged = OmegaConf.merge(OmegaConf.structured(options), *chosen)
            merged = OmegaConf.merge(OmegaConf.structured(options), below(merged), *chosen)
            if missing := sorted(str(key) for key in OmegaConf.missing_keys(merged)):
                examples = {f.name: f.metadata.get("example", "VALUE") for f in fields(options)}
                hint = " ".join(f"{key}=VALUE" if "." in key else f"--{key} {examples[key]}" for key in missing)
                raise UsageError(f"Missing: {', '.join(missing)}. Give them as flags ({hint}) or in --config FILE.")
            made = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UsageError(_explain(error, options, path)) from error
    assert isinstance(made, options)
    return made


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


def literal(value: Any) -> Any:
    """A value whose ${…}, in a prompt say, is text and no interpolation: only files interpolate."""
    if isinstance(value, list):
        return [literal(item) for item in value]
    if isinstance(value, dict):
        return {name: literal(item) for name, item in value.items()}
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _explain(error: Exception, options: type[DataclassInstance], path: str | None) -> str:
    """One sentence for what OmegaConf says in several lines."""
    key = getattr(error, "key", None) or getattr(error, "full_key", None)
    where = f" in {path}" if path else ""
    if f"not in '{options.__name__}'" in str(error) and key is not None:
        near = difflib.get_close_matches(str(key), [f.name for f in fields(options)], n=1)
        return f"Unknown option `{key}`{where}." + (f" Did you mean `{near[0]}`?" if near else "")
    return f"Bad value for `{key}`{where}: {str(error).splitlines()[0]}"
