"""Hydra's own settings on the command line: those of a sweep's folder and of its launcher, and no others."""

from __future__ import annotations

import pytest
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.compose import Composer
from kvbench.cli.overrides import explain
from kvbench.errors import ConfigError

SWEEP = ["method=kivi", "runtime.seed=1,2"]


@pytest.mark.parametrize(
    "typed",
    [
        ["launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra.sweep.dir=results/mine"],
        ["hydra.sweep.dir='my results'"],
    ],
    ids=" ".join,
)
def test_what_a_sweep_may_set(typed: list[str]) -> None:
    assert len(Composer().check([*SWEEP, *typed], multirun=True)) == 2


@pytest.mark.parametrize(
    ("typed", "multirun", "said"),
    [
        (["launcher=joblib", "hydra.launcher.n_jobs=2"], False, "a setting of the launcher of a sweep"),
        (["hydra.launcher.n_jobs=2"], True, "a setting of the launcher of a sweep"),
        (["launcher=local", "hydra.launcher.n_jobs=2"], True, "a setting of the launcher of a sweep"),
        (["launcher=joblib", "hydra.launcher._target_=x"], True, "launcher=NAME determines the class"),
        (["launcher=joblib", "hydra.launcher.n_jobs=1,2"], True, "must have one value for the whole sweep"),
        (["hydra.sweep.dir=mine"], False, "this command is a single run"),
        (["hydra.sweep.dir=a,b"], True, "must name exactly one folder"),
        (["hydra.sweep.dir=null"], True, "must name exactly one folder"),
        (["hydra.sweep.dir=''"], True, "must name exactly one folder"),
        (["hydra.sweep.dir=${now:%Y}"], True, "must be a plain path"),
        (["hydra/launcher=joblib"], True, "launcher=joblib, launcher=submitit or launcher=ray"),
        (["hydra.searchpath=[file:///x]"], True, "--config-dir DIR"),
        (["hydra.job.chdir=true"], True, "kvbench configures Hydra itself"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_is_not_for_the_command_line(typed: list[str], multirun: bool, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Composer().check([*(SWEEP if multirun else SWEEP[:1]), *typed], multirun=multirun)
    assert said in str(caught.value)
    assert "hydra.sweep.dir=DIR with --multirun, hydra.launcher.KEY=VALUE with launcher=joblib" in str(caught.value)


def test_an_interruption_that_omegaconf_has_wrapped_is_one() -> None:
    error = OmegaConfBaseException("")
    assert "method=kivi: OmegaConfBaseException" in str(explain(error, ["method=kivi"]))
    error.__cause__ = OmegaConfBaseException("inner")
    error.__cause__.__context__ = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        explain(error, ["method=kivi"])
