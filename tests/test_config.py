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
        ("data.train=[]", "data.train is empty; name at least one text file"),
        ("data.train='a'", "config.data.train is 'a'; a list is needed"),
        ("save_every=-1", "save_every is -1; the least is 0"),
        ("log_every=0", "log_every is 0; the least is 1"),
        ("model.layers=['b']", "model.layers names 'b', which model.mixers does not define; "),
        ("steps", "--set 'steps' is no setting; write it as optim.steps=10"),
        ("seed.x=1", "--set 'seed.x=1': 'seed' is no table in the config"),
        ("zz=1", "config has an unknown key 'zz'; allowed: model, data, optim, seed, "),
    ],
)
def test_wrong_settings(path: Path, setting: str, message: str) -> None:
    with pytest.raises(EdgelinError) as error:
        load_run(path, [setting])
    assert str(error.value).startswith(message)


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
