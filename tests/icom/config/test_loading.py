"""Options from defaults, YAML and flags; what a configuration refuses by itself.

Guards icom.config.loading and the other modules of icom.config.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import yaml

from icom.cli import COMMANDS, parse
from icom.config.loading import read_flags
from icom.config.train import BUNDLED_DEFAULTS, TrainConfig
from icom.config.training import to_yaml
from icom.errors import UsageError
from tests.icom.test_cli import DIFFUSERS_DEFAULTS
from tests.support.command import Result, train_arguments

Icom = Callable[..., Result]
WORDS = {"train_data_dir": "x", "placeholder_token": "<x>", "initializer_token": "x"}


def test_both_spellings_and_precedence(tmp_path: Path) -> None:
    """Defaults < file < flags, also when a flag repeats the default; interpolation sees the flags."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "train_data_dir: photos\nplaceholder_token: <x>\ninitializer_token: toy\nnum_vectors: 3\n"
        "seed: 1\noutput_dir: runs/${seed}\nscale_lr: true\nlearning_rate: 1e-3\n"
    )

    def effective(*flags: str) -> TrainConfig:
        config: TrainConfig = parse(["train", "--config", str(file), *flags])
        return config

    assert effective().output_dir == "runs/1"
    assert effective("--seed", "5").output_dir == "runs/5"
    assert effective("--num-vectors=1").num_vectors == 1
    assert effective("--no_scale_lr").scale_lr is False
    assert effective().learning_rate == 1e-3
    assert effective("--learning-rate", "0.0001").learning_rate == 1e-4
    assert effective().save_steps == 500


def test_bundled_model_has_its_own_defaults(tmp_path: Path) -> None:
    """They lie below the file and the flags, and no other model gets them."""
    file = tmp_path / "run.yaml"
    file.write_text("train_data_dir: x\nplaceholder_token: <x>\ninitializer_token: toy\nlearning_rate: 3e-4\n")

    def effective(*flags: str) -> dict[str, object]:
        return dataclasses.asdict(parse(["train", "--config", str(file), *flags]))

    ours = effective("--resolution", "512")
    expected = BUNDLED_DEFAULTS | {"learning_rate": 3e-4, "resolution": 512}
    assert {name: ours[name] for name in BUNDLED_DEFAULTS} == expected
    theirs = effective("--pretrained_model_name_or_path", "some/model")
    expected = {name: DIFFUSERS_DEFAULTS.get(name) for name in BUNDLED_DEFAULTS} | {"learning_rate": 3e-4}
    assert {name: theirs[name] for name in BUNDLED_DEFAULTS} == expected


def test_print_config_runs_again_as_it_is(tmp_path: Path, icom: Icom) -> None:
    printed = icom(*train_arguments(validation_prompt="${a} <robot>", hub_token="secret"), "--print_config")
    assert printed.code == 0
    assert "secret" not in printed.out
    (tmp_path / "run.yaml").write_text(printed.out)
    again = icom("train", "--config", str(tmp_path / "run.yaml"), "--print_config")
    assert again.out == printed.out
    assert yaml.safe_load(again.out)["seed"] == 7


def test_on_is_an_option_in_a_file_and_no_part_of_the_run(tmp_path: Path) -> None:
    """YAML takes the bare word for true."""
    file = tmp_path / "run.yaml"
    file.write_text("on: box\ntrain_data_dir: x\nplaceholder_token: <x>\ninitializer_token: toy\n")
    config = parse(["train", "--config", str(file)])
    assert config.on == "box"
    assert "box" not in to_yaml(config)


def test_required_marks_in_a_file(tmp_path: Path, icom: Icom) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train_data_dir: ???\nplaceholder_token: <x>\ninitializer_token: toy\n")
    missing = icom("train", "--config", str(file))
    assert missing.code == 2
    assert "train_data_dir" in missing.err
    given = icom("train", "--config", str(file), "--train_data_dir", "x", "--print_config")
    assert yaml.safe_load(given.out)["train_data_dir"] == "x"


def test_yaml_round_trip_keeps_every_value() -> None:
    config = TrainConfig(
        train_data_dir="a b",
        placeholder_token="<x>",
        initializer_token="no",
        seed=2**62,
        learning_rate=1e-7,
        adam_weight_decay=0.0,
        max_train_steps=None,
        validation_prompt="a: {b} # ${c} 'd' \"e\" \u00e9",
    )
    values = yaml.safe_load(to_yaml(config))
    assert values["learning_rate"] == 1e-7
    assert values["seed"] == 2**62
    assert values["initializer_token"] == "no"


def value_for(hint: object) -> str:
    """A word that an option of this type takes."""
    parts = [hint, *typing.get_args(hint), *(a for part in typing.get_args(hint) for a in typing.get_args(part))]
    named = [part for part in parts if isinstance(part, str)]  # of a Literal
    return next(
        iter([*named, *("3" for part in parts if part is int), *("0.5" for part in parts if part is float), "a b"])
    )


@pytest.mark.parametrize("command", ["train", "finetune", "tune", "provision"])
def test_flags_are_the_given_ones(command: str) -> None:
    """Each option of a command with a file, in all its spellings: what a flag says, and no word of another option."""
    options = COMMANDS[command][0]
    hints = {
        name: hint
        for name, hint in typing.get_type_hints(options).items()
        if typing.get_origin(hint) is not dict and not any(map(is_dataclass, typing.get_args(hint)))  # for YAML alone
    }
    texts = {name: value_for(hint) for name, hint in hints.items() if hint is not bool}
    flags = [name for name, hint in hints.items() if hint is bool]
    for word, yes in (("--{}", True), ("--no_{}", False), ("--no-{}", False)):
        words = [word.format(name.replace("_", "-") if "no-" in word else name) for name in flags]
        assert read_flags(options, words, "icom") == dict.fromkeys(flags, yes)
    for words in (
        [word for name, text in texts.items() for word in (f"--{name}", text)],
        [f"--{name.replace('_', '-')}={text}" for name, text in texts.items()],
    ):
        given = read_flags(options, words, "icom")
        assert given.keys() == texts.keys()
        for name, text in texts.items():
            assert given[name] in (text, [text]) or str(given[name]) in (text, f"[{text}]")


def test_a_flag_may_need_the_file(tmp_path: Path) -> None:
    """Neither half is refused without the other."""
    file = tmp_path / "half.yaml"
    file.write_text("ssh_from: 0.0.0.0/0\n")
    with pytest.raises(UsageError, match="--ssh_from_anywhere"):
        parse(["provision", f"--config={file}"])
    with pytest.raises(UsageError, match="give that too"):
        parse(["provision", "--ssh_from_anywhere"])
    assert parse(["provision", f"--config={file}", "--ssh_from_anywhere"]).ssh_from == "0.0.0.0/0"
    file.write_text("".join(f"{name}: {value}\n" for name, value in WORDS.items()) + "output_dir: elsewhere\n")
    with pytest.raises(UsageError, match="lies in --output_dir"):
        parse([*train_arguments(initial_embedding="text-inversion-model/a.safetensors")])
    given = ["--initial_embedding", "text-inversion-model/a.safetensors"]
    assert parse(["train", f"--config={file}", *given]).output_dir == "elsewhere"


def test_provision_explains_a_file_as_training_does(icom: Icom, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    for text, words in {
        "coount: 3": "Unknown option `coount` in {}. Did you mean `count`?",
        "count: many": "Bad value for `count` in {}: ",
        "key_name: ${nowhere}": "Bad value for `key_name` in {}: ",
    }.items():
        file.write_text(text)
        result = icom("provision", f"--config={file}")
        assert result.code == 2
        assert words.format(file) in result.err


def test_what_a_flag_says_is_text(tmp_path: Path) -> None:
    """Only files interpolate."""
    file = tmp_path / "cluster.yaml"
    file.write_text("region: ${cluster}-1\n")
    config = parse(["provision", f"--config={file}", "--profile", "${cluster}"])
    assert (config.region, config.profile) == ("icom-1", "${cluster}")
    with pytest.raises(UsageError, match=r"--subnet: .*\$\{cluster\}"):
        parse(["provision", "--subnet", "${cluster}"])


def test_a_configuration_checks_itself() -> None:
    """However it is made: by the parser, by other code, or as the copy of another."""
    with pytest.raises(UsageError, match="--num_vectors has to be at least 1, not 0"):
        TrainConfig(**WORDS, num_vectors=0)
    with pytest.raises(UsageError, match="--resolution has to be a multiple of 8, not 65"):
        dataclasses.replace(TrainConfig(**WORDS), resolution=65)
    for words, message in {
        "generate --prompt x --resolution 65": "--resolution has to be a multiple of 8",
        "generate --prompt x --num_inference_steps 0": "--num_inference_steps has to be at least 1",
        "generate --prompt x --seed 1 -1": "--seed has to be between 0 and",
        "bench --rounds 0": "--rounds has to be at least 1",
        "bench --resolution 65": "--resolution has to be a multiple of 8",
        "bench --sweep_batch_sizes 2 0": "--sweep_batch_sizes takes one or more numbers from 1 up",
        "bench --ranks 1,a": "--ranks takes numbers of processes from 1 up",
        "bench --ranks 1,2 --sweep x": "drop --sweep and --compare",
        "stop --wait_minutes 0": "--wait_minutes has to be a positive number",
        "bake --ssh_from_anywhere": "give that too",
        "push --cluster Big x": "--cluster 'Big' has to be small letters",
        "demo --num_images 0": "--num_images has to be at least 1",
    }.items():
        with pytest.raises(UsageError, match=message):
            parse(words.split())
