from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.train.config import Lora, RlConfig, SftConfig
from minisandbox.train.options import (
    describe,
    differences,
    from_mapping,
    load,
    option,
    packaged,
    store,
    to_mapping,
    to_yaml,
)

LEAST = "model: m\ndata: [rows.jsonl]\nout: runs/x\n"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "training-options.md"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(LEAST)
    return path


def test_defaults_fill_what_a_file_leaves_out(file: Path) -> None:
    config = load(SftConfig, str(file))
    assert (config.model, config.data, config.max_length) == ("m", ("rows.jsonl",), 32768)
    assert config.optimizer.learning_rate == 1e-4


def test_settings_come_after_the_file(file: Path) -> None:
    config = load(SftConfig, str(file), ["epochs=3", "optimizer.learning_rate=2e-5", "data=[a.jsonl, b.jsonl]"])
    assert config.epochs == 3.0
    assert config.optimizer.learning_rate == 2e-5  # YAML 1.1 reads that as text
    assert config.data == ("a.jsonl", "b.jsonl")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epoch: 3", "there is no key epoch"),
        ("optimizer: {learning_rat: 1}", "there is no key optimizer.learning_rat"),
        ("epochs: many", "epochs is 'many'"),
        ("packing: 1", "packing is 1"),
        ("batch_size: true", "batch_size is True"),
        ("optimizer: fast", "optimizer is 'fast'"),
        ("precision: float8", "precision is 'float8'"),
        ("held_out_share: 1", "held_out_share is 1.0"),
        ("optimizer: {learning_rate: 0}", "learning_rate is 0"),
        ("[1", "is not valid YAML"),
        ("epochs: 2\nepochs: 3", "the key epochs occurs twice"),
        ("optimizer: {beta2: 0.9, beta2: 0.95}", "the key beta2 occurs twice"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(file: Path, text: str, said: str) -> None:
    file.write_text(LEAST + text + "\n")
    with pytest.raises(InvalidValue) as caught:
        load(SftConfig, str(file))
    assert said in str(caught.value)
    assert file.name in str(caught.value)


def test_a_section_of_which_a_key_is_given_keeps_its_configuration_s_defaults(tmp_path: Path) -> None:
    (tmp_path / "rl.yaml").write_text("model: m\ntasks: [t]\nout: o\noptimizer: {beta2: 0.9}\n")
    config = load(RlConfig, str(tmp_path / "rl.yaml"), ["optimizer.max_grad_norm=2"])
    default = RlConfig(model="m", tasks=("t",), out="o").optimizer
    assert config.optimizer == replace(default, beta2=0.9, max_grad_norm=2.0)
    assert default.learning_rate == 1e-6
    (found,) = (one for one in describe(RlConfig) if one.key == "optimizer.learning_rate")
    assert float(found.default) == 1e-6


def test_a_key_below_what_is_no_section(file: Path) -> None:
    with pytest.raises(InvalidValue, match="epochs is not a section; likely reason: it is a number"):
        load(SftConfig, str(file), ["epochs.many=3"])


def test_unknown_keys_name_the_nearest(file: Path) -> None:
    file.write_text(LEAST + "max_lenght: 3\n")
    with pytest.raises(InvalidValue, match="did you mean max_length"):
        load(SftConfig, str(file))
    file.write_text(LEAST)
    with pytest.raises(InvalidValue, match="learning_rate"):
        load(SftConfig, str(file), ["optimizer.learning_rat=1"])


def test_missing_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: m\n")
    with pytest.raises(InvalidValue, match="data is missing"):
        load(SftConfig, str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("setting", ["epochs", "x.y=1", "model.x=1", "epochs=[1"])
def test_settings_that_make_no_sense(file: Path, setting: str) -> None:
    with pytest.raises(InvalidValue, match="--set"):
        load(SftConfig, str(file), [setting])


def test_no_such_file() -> None:
    with pytest.raises(NotFound, match="sft-tiny"):
        load(SftConfig, "/no/such/file.yaml")


@pytest.mark.parametrize("name", packaged())
def test_packaged_configurations_can_be_read(name: str) -> None:
    config: RlConfig | SftConfig = load(RlConfig, name) if name.startswith("rl-") else load(SftConfig, name)
    assert config.model


def test_what_is_stored_is_whole_and_reads_as_the_same(file: Path, tmp_path: Path) -> None:
    config = load(SftConfig, str(file), ["lora.rank=8"])
    store(config, tmp_path / "run" / "config.yaml")
    assert load(SftConfig, str(tmp_path / "run" / "config.yaml")) == config
    assert yaml.safe_load(to_yaml(config))["optimizer"]["beta2"] == 0.999


def test_a_dropout_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"lora\.dropout is 0\.1"):
        RlConfig(model="m", tasks=("t",), out="o", lora=Lora(rank=4, dropout=0.1))


def test_differences_name_keys(file: Path) -> None:
    one, other = load(SftConfig, str(file)), load(SftConfig, str(file), ["seed=3", "lora.rank=8"])
    assert differences(one, other) == ["lora.rank", "seed"]
    assert differences(one, other, but=["seed"]) == ["lora.rank"]


def test_a_type_of_another_kind_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Small:
        number: int = option(1, help="a number")

    assert to_mapping(from_mapping(Small, {}, place="x")) == {"number": 1}


@pytest.mark.parametrize("kind", [SftConfig, RlConfig])
def test_the_reference_lists_every_option(kind: type) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for one in describe(kind):
        assert f"| `{one.key}` | {one.kind} | {f'`{one.default}`' if one.default else ''} | {one.help} |" in text
