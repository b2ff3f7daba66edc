"""The folder of the configuration: groups, choices with their descriptions, and choices from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.errors import KvbenchError
from kvbench.util import confdir
from kvbench.util.confdir import choice_summary, conf_dir, config_groups, group_options


def test_choices_have_the_names_that_a_person_types() -> None:
    assert config_groups() == sorted(config_groups())
    assert {"model", "method", "quantizer", "dataset", "runtime", "logger", "launcher"} <= set(config_groups())
    datasets = group_options("dataset")
    assert list(datasets) == sorted(datasets)
    assert datasets["mini/needle"] == conf_dir() / "dataset" / "mini" / "needle.yaml"
    assert group_options("no such group") == {}


def test_another_folder_adds_choices_and_takes_none_away(tmp_path: Path) -> None:
    (tmp_path / "method" / "mine").mkdir(parents=True)
    (tmp_path / "method" / "mine" / "foo.yaml").write_text("residual: 1\n")
    (tmp_path / "method" / "notes.txt").write_text("no choice")
    added = group_options("method", tmp_path)
    assert set(added) - set(group_options("method")) == {"mine/foo"}
    assert added["mine/foo"] == tmp_path / "method" / "mine" / "foo.yaml"
    assert group_options("model", tmp_path) == group_options("model")
    (tmp_path / "method" / "kivi.yaml").write_text("residual: 1\n")
    assert group_options("method", tmp_path)["kivi"] == tmp_path / "method" / "kivi.yaml"
    assert list(group_options("method", tmp_path)) == sorted(group_options("method", tmp_path))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# KIVI: keys per channel\nresidual: 128\n", "KIVI: keys per channel"),
        ("# @package _global_\n# a preset of several groups\n", "a preset of several groups"),
        ("residual: 128  # not the first thing in a line\n", ""),
        ("#\n# after an empty comment\n", ""),
        ("", ""),
    ],
)
def test_a_choice_is_described_by_its_first_comment(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "foo.yaml").write_text(text)
    assert choice_summary(tmp_path / "foo.yaml") == line


def test_an_installation_without_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confdir, "__file__", str(tmp_path / "kvbench" / "util" / "confdir.py"))
    with pytest.raises(KvbenchError, match=r"pip install -e \. again"):
        conf_dir()
    inside, outside = tmp_path / "kvbench" / "conf", tmp_path / "conf"
    for folder in (outside, inside):  # an installed package's own comes first
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        assert conf_dir() == folder
    (inside / "notes").mkdir()
    (inside / "notes" / "read.me").touch()
    (inside / "model" / "deep").mkdir(parents=True)
    (inside / "model" / "deep" / "a.yaml").touch()
    assert config_groups() == ["model"]
