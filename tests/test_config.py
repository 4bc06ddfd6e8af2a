"""Reading runs: unknown keys and wrong values are refused by name, paths follow the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelin.config import RunConfig, from_dict, load_run, to_dict
from edgelin.errors import EdgelinError

RUN = """
seed = 3
[model]
vocab_size = 300
hidden_size = 16
intermediate_size = 24
layers = ["a", "a"]
[model.mixers.a]
type = "gla"
[data]
train = ["text.txt", "/data/more.txt.xz"]
cache = "../cache"
[optim]
steps = 10
batch_size = 3
sequence_length = 20
learning_rate = 1
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    return tmp_path / "run.toml"


def test_values_defaults_and_paths(path: Path) -> None:
    config = load_run(path)
    assert config.seed == 3
    assert config.model.layers == ("a", "a")
    assert config.model.mixers == {"a": {"type": "gla"}}
    assert config.optim.learning_rate == 1.0
    assert isinstance(config.optim.learning_rate, float)
    assert config.optim.max_seconds is None
    assert config.data.train == (str(path.parent / "text.txt"), "/data/more.txt.xz")
    assert config.data.cache == f"{path.parent}/../cache"
    assert config.data.tokenizer is None
    assert from_dict(RunConfig, to_dict(config)) == config


def test_settings_replace_the_file(path: Path) -> None:
    config = load_run(
        path,
        ["optim.steps=7", "data.train=['b.txt']", "compile = true", "data.tokenizer=a=b.json"],
    )
    assert config.optim.steps == 7
    assert config.data.train == (str(path.parent / "b.txt"),)
    assert config.compile
    assert config.data.tokenizer == str(path.parent / "a=b.json")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.step=7", "config.optim has an unknown key 'step'; did you mean 'steps'?"),
        ("optim.steps=x", "config.optim.steps is 'x'; int is needed"),
        ("optim.steps=true", "config.optim.steps is True; int is needed"),
        ("optim.steps=0", "optim.steps is 0; it must be above 0"),
        ("optim.batch_size=-1", "optim.batch_size is -1; it must be above 0"),
        ("data.train=[]", "data.train is empty; name at least one file"),
        ("data.train='a'", "config.data.train is 'a'; a list is needed"),
        ("save_every=-1", "save_every is -1; the least is 0"),
        ("log_every=0", "log_every is 0; the least is 1"),
        ("model.layers=['b']", "model.layers names 'b', which model.mixers does not define; "),
        ("steps", "--set 'steps' is no setting; write it as optim.steps=10"),
        ("seed.x=1", "--set 'seed.x=1': 'seed' is no table in the config"),
        ("optim.steps=100000000", "optim.steps is 100000000; the most is 99999999"),
        ("optim.warmup_steps=-5", "optim.warmup_steps is -5; the least is 0"),
        ("optim.weight_decay=-1", "optim.weight_decay is -1.0; the least is 0"),
        ("optim.grad_clip=-1.0", "optim.grad_clip is -1.0; the least is 0"),
        ("optim.min_learning_rate=-1.0", "optim.min_learning_rate is -1.0; the least is 0"),
        ("optim.min_learning_rate=2.0", "optim.min_learning_rate is 2.0, more than optim.learni"),
        ("optim.beta1=1.0", "optim.beta1 is 1.0; give 0 or more, and below 1"),
        ("optim.beta2=-0.5", "optim.beta2 is -0.5; give 0 or more, and below 1"),
        ("seed=-1", "seed is -1; the least is 0"),
        ("seed=2147483648", "seed is 2147483648; the most is 2147483647"),
        ("eval_tokens=0", "eval_tokens is 0; the least is 1"),
        ("model.vocab_size=0", "model.vocab_size is 0; the least is 1"),
        ("model.vocab_size=99999999999", "model.vocab_size is 99999999999; the most is 1048576"),
        ("model.hidden_size=-1", "model.hidden_size is -1; the least is 1"),
        ("model.hidden_size=1000000000000", "model.hidden_size is 1000000000000; the most is "),
        ("model.intermediate_size=-1", "model.intermediate_size is -1; the least is 0"),
        ("model.layers=" + str(["a"] * 1025), "the number of model.layers is 1025; the most is"),
        ("model.dropout=1.0", "model.dropout is 1.0; give 0 or more, and below 1"),
        ("model.dropout=-0.1", "model.dropout is -0.1; give 0 or more, and below 1"),
        ("model.rms_norm_eps=0.0", "model.rms_norm_eps is 0.0; it must be above 0 and below 1"),
        ("model.mixers.b=3", "model.mixers.b is 3; a table with the key 'type' is needed"),
        ("model.mixers.b.x=3", "model.mixers.b lacks the key 'type', the name of a mixer"),
        ("model.mixers.a.type=3", "model.mixers.a.type is 3; give the name of a mixer, or the "),
        ("model.mixers.a.type=''", "model.mixers.a.type is ''; give the name of a mixer, or"),
        ("model.mixers.a.type='..x'", "model.mixers.a.type is '..x'; give the name of a mixer"),
        ('data.train=["a\\u0000b"]', "data names "),
        ('data.valid=["a\\u0000b"]', "data names "),
        ('data.cache="a\\u0000b"', "data names "),
        ('data.tokenizer="a\\u0000b"', "data names "),
        ("zz=1", "config has an unknown key 'zz'; allowed: model, data, optim, seed, "),
    ],
)
def test_wrong_settings(path: Path, setting: str, message: str) -> None:
    with pytest.raises(EdgelinError) as error:
        load_run(path, [setting])
    assert str(error.value).startswith(message)


FLOATS = ["max_seconds", "learning_rate", "min_learning_rate", "weight_decay", "beta1", "beta2"]


@pytest.mark.parametrize("name", [*(f"optim.{name}" for name in FLOATS), "model.dropout"])
@pytest.mark.parametrize("value", ["nan", "inf", "1" * 400])
def test_numbers_that_are_not_finite_are_refused(path: Path, name: str, value: str) -> None:
    with pytest.raises(EdgelinError, match=f"^config.{name} is (nan|inf); a finite number is n"):
        load_run(path, [f"{name}={value}"])


def test_a_path_with_nul_and_deep_nesting_are_refused(path: Path) -> None:
    with pytest.raises(EdgelinError, match="is not valid TOML"):
        load_run("a\0b")
    path.write_text("a = " + "[" * 100000, encoding="utf-8")
    with pytest.raises(EdgelinError, match="is not valid TOML"):
        load_run(path)


def test_wrong_files(path: Path) -> None:
    with pytest.raises(EdgelinError, match=r"^cannot read the config .*none\.toml: No such file"):
        load_run(path.parent / "none.toml")
    with pytest.raises(EdgelinError, match="cannot read the config"):
        load_run(path.parent)
    path.write_text(RUN.replace("steps = 10", ""), encoding="utf-8")
    with pytest.raises(EdgelinError, match="neither 'steps' nor 'max_seconds'; give the run an"):
        load_run(path)
    path.write_text(RUN.replace("batch_size = 3", ""), encoding="utf-8")
    with pytest.raises(EdgelinError, match=r"^config\.optim lacks the key 'batch_size'$"):
        load_run(path)
    for content in (b"a = ", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(EdgelinError, match=r"run\.toml is not valid TOML: "):
            load_run(path)
