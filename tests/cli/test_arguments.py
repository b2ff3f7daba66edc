"""Options of the command line, anywhere among the overrides, and what Hydra is given of them."""

from __future__ import annotations

import pytest

from kvbench.cli.arguments import INFO, Arguments, parse_arguments
from kvbench.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("method=kivi -m runtime.seed=1,2", {"overrides": ["method=kivi", "runtime.seed=1,2"], "multirun": True}),
        ("--multirun a=1", {"multirun": True, "overrides": ["a=1"]}),
        ("-h", {"help": True}),
        ("--help", {"help": True}),
        ("--hydra-help", {"hydra_help": True}),
        ("--version", {"version": True}),
        ("-r", {"run": True}),
        ("--run a=1", {"run": True, "overrides": ["a=1"]}),
        ("--cfg job --resolve", {"cfg": "job", "resolve": True}),
        ("-c all a=1", {"cfg": "all", "overrides": ["a=1"]}),
        ("--cfg=hydra", {"cfg": "hydra"}),
        ("-c job -p method", {"cfg": "job", "package": "method"}),
        ("--package=model --cfg job", {"cfg": "job", "package": "model"}),
        ("--config-dir DIR a=1", {"config_dir": "DIR", "overrides": ["a=1"]}),
        ("-cd=DIR", {"config_dir": "DIR"}),
        ("--config-dir -", {"config_dir": "-"}),
        ("--info", {"info": "all"}),
        ("-i defaults-tree a=1", {"info": "defaults-tree", "overrides": ["a=1"]}),
        ("--info a=1", {"info": "all", "overrides": ["a=1"]}),
        ("--info=plugins", {"info": "plugins"}),
        ("-- --help a=1", {"overrides": ["--help", "a=1"]}),
        ("- a=-1", {"overrides": ["-", "a=-1"]}),
    ],
)
def test_options_are_read_wherever_they_stand(line: str, expected: dict) -> None:
    assert parse_arguments(line.split()) == Arguments(**expected)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--config-path x", "always uses its built-in configuration.\n  hint: add choices to it with --config-dir DIR"),
        ("-cn=x", "always uses its built-in configuration"),
        ("--shell-completion", "does not offer shell completion"),
        ("-sc", "does not offer shell completion"),
        ("--experimental-rerun x", "resumes a run by itself"),
        ("--help=1", "--help does not take a value"),
        ("--cfg", "this option needs a value"),
        ("--cfg --multirun", "this option needs a value"),
        ("--config-dir=", "this option needs a value"),
        ("--package", "--package GROUP"),
        ("--config-dir", "--config-dir DIR"),
        ("--cfg jobs", "is not a value of this option"),
        ("--cfg job -c all", "is given twice, as job and all"),
        ("--info=all-of-it", "is not a topic of --info"),
        ("--mulitrun", "did you mean '--multirun'?"),
        ("--method=kivi", "write overrides without dashes: method=VALUE"),
        ("--resolve", "can only be used together with --cfg"),
        ("-p method", "--package: can only be used together with --cfg"),
        ("--multirun --cfg job", "a sweep does not have a single configuration to show"),
        ("--multirun --run", "contradicts --run"),
    ],
)
def test_wrong_options_are_refused_with_what_to_type(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arguments(line.split())
    assert said in str(error.value)


def test_hydra_is_given_its_options_before_the_overrides() -> None:
    arguments = Arguments(["ignored"], hydra_help=True, multirun=True, resolve=True, cfg="job", package="", info="all")
    arguments.config_dir = "DIR"
    words = ["--hydra-help", "--multirun", "--resolve", "--cfg", "job", "--package", "", "--config-dir", "DIR"]
    assert arguments.argv(["a=1", "b=2"]) == [*words, "--info", "all", "a=1", "b=2"]
    assert Arguments(help=True, version=True, run=True).argv(["a=1"]) == ["a=1"]
    assert INFO[0] == "all" and "config" in INFO
