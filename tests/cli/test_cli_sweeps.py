"""Sweeps as they are typed: how many jobs there are, which of them may fail, and what reaches Hydra."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvbench.cli.arguments import parse_arguments
from kvbench.cli.compose import Composer
from kvbench.cli.expand import MAX_JOBS_NAME, check_sweeps
from kvbench.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "jobs"),
    [("range(0,5,2)", 3), ("range(0,1,2)", 1), ("range(1,5)", 4), ("range(0,1,0.3)", 4), ("range(5,0,-2)", 3)],
)
def test_every_number_of_a_range_is_a_job(values: str, jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = OverridesParser.create().parse_overrides([f"runtime.seed={values}"])
    monkeypatch.setenv(MAX_JOBS_NAME, str(jobs))
    check_sweeps(sweep, ["model"])
    if jobs > 1:
        monkeypatch.setenv(MAX_JOBS_NAME, str(jobs - 1))
        with pytest.raises(ConfigError, match=f"would start {jobs} jobs"):
            check_sweeps(sweep, ["model"])


def test_a_number_and_a_switch_are_two_values() -> None:
    """1 == True in Python, but a setting tells them apart."""
    for values, twice in (("1,true", None), ("0,false", None), ("true,1,true", "True"), ("0,false,0", "0")):
        sweep = OverridesParser.create().parse_overrides([f"method.sinks={values}"])
        if twice is None:
            check_sweeps(sweep, ["method"])
        else:
            with pytest.raises(ConfigError, match=f"lists {twice} twice"):
                check_sweeps(sweep, ["method"])


def test_switches_reach_hydra() -> None:
    handed_on = parse_arguments(["--cfg", "all", "--resolve", "method=fp16"])
    assert "--resolve" in handed_on.argv(["method=fp16"])
    assert "--resolve" not in parse_arguments(["--cfg", "all", "method=fp16"]).argv(["method=fp16"])
    assert "--multirun" in parse_arguments(["-m", "method=fp16,kivi"]).argv(["method=fp16,kivi"])


def test_a_job_whose_values_do_not_go_together_fails_alone() -> None:
    """alpha + beta must be below 1: with 0.9 the job is refused, which does not affect the other one."""
    sweep = ["method=cocktail", "method.encoder=bm25", "method.alpha=0.4,0.9", "method.beta=0.5"]
    with pytest.raises(ConfigError, match=r"alpha|beta"):
        Composer().check([*sweep[:2], "method.alpha=0.9", "method.beta=0.5"], False)
    assert len(Composer().check(sweep, True)) == 2
    with pytest.raises(ConfigError, match="alpha"):
        Composer().check(["method=cocktail", "method.encoder=bm25", "method.alpha=0.4,7"], True)
