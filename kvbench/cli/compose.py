"""Composition of configurations with Hydra, and checks that Hydra lacks.

Hydra silently accepts ``+method.foo=1``, does not suggest similar names, and does not check types in plain YAML.
Therefore each override is checked before composition, and the whole configuration of each job after it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli import hydra_options, settings
from kvbench.cli.expand import check_sweeps
from kvbench.cli.extra import check_folder, store_classes
from kvbench.cli.model_choice import accept, fill_from_checkpoint
from kvbench.cli.overrides import (
    Keys,
    check_hydras,
    check_number,
    check_repeats,
    explain,
    first_line,
    is_hydras,
    refuse_marks,
    value,
)
from kvbench.config.prerequisites import check_here, check_launcher, check_path
from kvbench.config.run_config import RunConfig, checked_config
from kvbench.errors import CombinationError, ConfigError
from kvbench.methods.load import true_name
from kvbench.quantizers.spec import taken
from kvbench.util.confdir import conf_dir, config_groups, group_options

#: maximum number of combinations of choices whose keys are checked in advance; others are checked when a job starts
MAX_COMBINATIONS = 256
#: command that lists all choices of all groups
HELP = "python -m kvbench --help"
#: keys that only the YAML file of a choice may set, so that names are unambiguous; with what to type instead
FIXED = {
    "method._target_": "choose method=NAME; for your own class, put method/foo.yaml into DIR and add --config-dir DIR",
    "method.takes": "choose quantizer=NAME from --help; the method's class decides which quantizers it accepts",
    "dataset._target_": (
        "choose dataset=NAME; for your own class, put dataset/foo.yaml into DIR and add --config-dir DIR"
    ),
    "dataset.name": (
        "choose dataset=NAME; for another name in tables, put dataset/foo.yaml into DIR and add --config-dir DIR"
    ),
    "quantizer.name": "set quantizer=NAME, or a format such as quantizer.key.bits=4; the name follows from the formats",
    "logger.name": "logger=NAME",
}
#: time limit in seconds for checking the jobs of a sweep in advance; other jobs are checked when they start
CHECK_SECONDS = 1.5
#: configurations of choices of this package, see Composer._choices_alone
_COMPOSED: dict[tuple[str, ...], Mapping[str, Any]] = {}


class Composer:
    """Checker of command-line overrides such as ``method=kivi``, and composer of the resulting configurations.

    Args:
        extra: folder given by ``--config-dir``, here and throughout this package. Its subfolders are named after
            configuration groups, and their YAML files are additional choices. None if the option is not given.

    Raises:
        ConfigError: `extra` is not a folder, has no subfolder named after a group, or contains an invalid file.
    """

    def __init__(self, extra: Path | None = None) -> None:
        hydra_options.store()
        if extra is not None:
            check_folder(extra.absolute())
            store_classes(extra.absolute())
        self.extra = extra.absolute() if extra else None
        self.groups = {group: list(group_options(group, self.extra)) for group in config_groups()}
        self.keys = Keys(self.groups, self.extra)
        #: what :meth:`check` has made, by the overrides of the job: plain data of a single run, and what is checked
        self._plain: dict[tuple[str, ...], dict[str, Any]] = {}
        self._checked: dict[tuple[str, ...], RunConfig] = {}

    def check(self, texts: Sequence[str], multirun: bool = False, here: bool = False) -> list[list[str]]:
        """Check a command line, and return the overrides of each job that it starts.

        In a sweep (`multirun`), overrides may list values, and each combination is a job; otherwise there is one job.
        The time for checks is limited: in a long sweep, some jobs are checked only when they start. If some jobs of a
        sweep are valid, another job whose values are invalid only in combination raises no error here, but fails when
        it starts. With `here`, it is checked too that this machine has the packages, GPU and files that the jobs
        require.

        Raises:
            ConfigError: an override, key, value or combination is invalid; the error describes the first one found.
        """
        variants = settings.variants(texts, multirun)
        launcher = next((word.partition("=")[2] for word in texts if word.startswith("launcher=")), "local")
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            jobs = [job for variant in variants for job in self._jobs(variant, multirun, len(variants))]
            if multirun and settings.chosen_settings(texts, True) == []:
                jobs = self._fitted(jobs)
            if here:
                check_launcher(launcher, multirun)
            self._check_jobs(jobs, launcher if here else None)
        return jobs

    def typed(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the overrides of each job of a checked sweep as they would be typed to run the job alone.

        Settings stay as they are, and options of Hydra and of the launcher are left out.
        """
        values = settings.chosen_settings(texts, True)
        own = [text for text in texts if not text.startswith(("hydra.", "hydra/", "launcher="))]
        place = next((i for i, text in enumerate(own) if text.startswith(f"{settings.KEY}=")), None)
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            parsed = [self._parse(text) for i, text in enumerate(own) if i != place]
            jobs = [list(job) for job in BasicSweeper.split_arguments(parsed, None)[0]]
            if place is None:
                return self._fitted(jobs)
        return [[*job[:place], f"{settings.KEY}={value.text}", *job[place:]] for value in values for job in jobs]

    def _jobs(self, texts: Sequence[str], multirun: bool, times: int) -> list[list[str]]:
        """Check the overrides of one setting and return the overrides of each of its jobs.

        ``setting=`` must already be replaced by ``method=``, ``quantizer=`` and ``method.KEY=``. The sweep has `times`
        settings, which multiply the number of jobs to be checked.
        """
        parsed = [self._parse(text) for text in texts]
        check_sweeps([override for override in parsed if multirun and not is_hydras(override)], self.groups, times)
        chosen: list[Override] = []
        leaves: list[Override] = []
        for text, override in zip(texts, parsed, strict=True):
            key = override.key_or_group
            if is_hydras(override):
                check_hydras(override, texts, multirun)
                continue
            if override.is_delete():
                refuse_marks(text, override)
            if override.is_sweep_override() and not multirun:
                raise ConfigError(
                    key,
                    value(override),
                    "is a list of values, which only a sweep accepts",
                    hint="add --multirun" + ("" if key in self.groups else f", or quote it: '{key}=\"...\"'"),
                )
            if key in self.groups:
                self._check_choice(override)
                chosen.append(override)
            else:
                check_number(override)
                leaves.append(override)
        check_repeats(parsed)
        if multirun or not self._composes(texts, parsed):
            self._check_leaves(leaves, chosen)
        for text, override in zip(texts, parsed, strict=True):
            refuse_marks(text, override)
        return [list(job) for job in BasicSweeper.split_arguments(parsed, None)[0]] if multirun else [list(texts)]

    def _composes(self, texts: Sequence[str], parsed: Sequence[Override]) -> bool:
        """Return True if the overrides compose to a single run whose keys all exist; :meth:`plain` then returns it."""
        if any(one.is_add() or one.is_delete() or one.is_force_add() or one.key_or_group in FIXED for one in parsed):
            return False
        try:
            config, choices = self._composed(texts)
            self._plain = {tuple(texts): _with_preset_name(config, choices, self.extra)}
        except ConfigError:  # with the choices alone, what is wrong can be said better
            return False
        unresolved = to_plain(config, resolve=False)
        for override in parsed:
            if override.key_or_group not in self.groups:
                self.keys.check_path(unresolved, override, "")
        return True

    def _fitted(self, jobs: Sequence[list[str]]) -> list[list[str]]:
        """Return the jobs of a sweep over methods; those of fp16, which takes no quantizer, lose ``quantizer=``.

        Raises:
            ConfigError: the sweep has one quantizer, and some of its methods do not take it.
        """
        chosen = [dict(text.split("=", 1) for text in job if "=" in text) for job in jobs]
        quantizers = {one["quantizer"] for one in chosen if "quantizer" in one}
        methods = dict.fromkeys(one["method"] for one in chosen if "method" in one)
        if (
            not quantizers - {"none"}
            or len(methods) < 2
            or any(method not in self.groups["method"] for method in methods)
        ):
            return [list(job) for job in jobs]
        takes = {
            method: taken(self._choices_alone((f"method={method}",))["method"].get("takes") or [], self.extra)
            for method in methods
        }
        refusing = [name for name, known in takes.items() if name != "fp16" and not quantizers & set(known)]
        if len(quantizers) == 1 and refusing:
            (quantizer,) = quantizers
            kept = [method for method in methods if method not in refusing]
            raise ConfigError(
                "quantizer",
                quantizer,
                f"is not a quantizer of method={','.join(refusing)}; nothing was started",
                allowed="; ".join(f"{name}: {', '.join(takes[name])}" for name in refusing),
                hint=f"leave out {' and '.join(refusing)}"
                + (f": method={','.join(kept)}" if kept else "")
                + ", or name each with its own: setting=METHOD:QUANTIZER,...",
            )
        fitted = [
            tuple(text for text in job if one["method"] != "fp16" or not text.startswith("quantizer="))
            for job, one in zip(jobs, chosen, strict=True)
        ]
        return [list(job) for job in dict.fromkeys(fitted)]

    def shown(self, texts: Sequence[str], package: str | None = None, resolve: bool = False) -> str:
        """Return the configuration of a job as YAML text; this is what ``--cfg job`` prints.

        Args:
            package: dotted key of the part to return, for example ``method``; None for the whole configuration.
            resolve: True to replace interpolations (``${...}``) by their values.

        Raises:
            ConfigError: the configuration cannot be composed, or does not have the part `package`.
        """
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config, choices = self._composed(texts)
        quantizer = config.get("quantizer")
        if isinstance(quantizer, DictConfig) and isinstance(quantizer.get("name"), str):
            quantizer["name"] = _with_preset_name(config, choices, self.extra)["quantizer"]["name"]
        part = config if package is None else OmegaConf.select(config, package)
        if not OmegaConf.is_config(part):
            raise ConfigError(
                "--package", package, "the configuration has no such part", allowed=list(map(str, config))
            )
        head = "" if package is None else f"# @package {package}\n"
        return head + OmegaConf.to_yaml(part, resolve=resolve).rstrip("\n")

    def configuration(self, texts: Sequence[str]) -> RunConfig:
        """Return the configuration of a job without ``setting=``: the one that :meth:`check` has checked, or a new one.

        Each configuration is returned only once, because a run stores its data and its method's state in it.

        Raises:
            ConfigError: Hydra cannot compose it, the checkpoint's files cannot be read, or a value is wrong.
        """
        return self._checked.pop(tuple(texts), None) or checked_config(self.plain(texts))

    def plain(self, texts: Sequence[str]) -> dict[str, Any]:
        """Return the configuration of a job as plain data (:func:`run_config`), with ``method.preset``, unchecked.

        Raises:
            ConfigError: Hydra cannot compose it, or the checkpoint's files cannot be read.
        """
        if tuple(texts) in self._plain:
            return self._plain[tuple(texts)]
        inside = GlobalHydra.instance().is_initialized()  # in a job that Hydra has started
        with nullcontext() if inside else initialize_config_dir(str(conf_dir()), version_base="1.3"):
            for text in texts:
                if text.startswith("model="):  # a launcher's worker has not seen this model yet
                    accept(self._parse(text).value(), self.groups["model"], HELP, self.extra)
            return _with_preset_name(*self._composed(texts), self.extra)

    def _composed(self, texts: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
        """Return the configuration of a job with the values of its checkpoint, and the choice of each group."""
        config, choices = self._by_hydra(texts)
        return fill_from_checkpoint(config, choices.get("model"), texts, self.extra), choices

    def _by_hydra(self, texts: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
        """Return the configuration of overrides as Hydra composes it, and the choice of each group."""
        search = [f"hydra.searchpath=[file://{self.extra}]"] if self.extra else []
        try:
            config = compose("config", overrides=[*texts, *search], return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error, texts) from error
        except RecursionError as error:
            raise ConfigError(
                " ".join(texts) or "configuration",
                None,
                "the defaults lists of the YAML files refer to each other in a circle",
                hint="remove one of the references under 'defaults:' in the files of --config-dir",
            ) from error
        choices = dict(config.hydra.runtime.choices)
        with open_dict(config):
            del config["hydra"]
        return config, choices

    def _parse(self, text: str) -> Override:
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        try:
            override = parser.parse_overrides([text])[0]
        except (HydraException, OmegaConfBaseException) as error:
            name = text.lstrip("+~").split("=", 1)[0]
            if "=" not in text and name in self.groups:
                raise ConfigError(
                    text, None, "needs a choice: GROUP=NAME", allowed=self.groups[name], listing=HELP
                ) from error
            raise ConfigError(
                text,
                None,
                "cannot be read as KEY=VALUE",
                hint=(
                    "remove spaces around '=', and quote values with special characters: 'model.path=\"/my models/a\"'"
                ),
            ) from error
        if not is_hydras(override):
            self.keys.check_name(override)
        return override

    def _check_choice(self, override: Override) -> None:
        group, allowed = override.key_or_group, self.groups[override.key_or_group]
        swept = override.is_sweep_override()
        for choice in override.sweep_string_iterator() if swept else [override.value()]:
            if group == "model":
                accept(choice, allowed, HELP, self.extra)
                continue
            if not isinstance(choice, str) or choice.strip("'\"") not in allowed:
                raise ConfigError(
                    group,
                    "null" if choice is None else choice,
                    f"no such {group}",
                    allowed=allowed,
                    listing=HELP,
                )

    def _check_leaves(self, leaves: Sequence[Override], chosen: Sequence[Override]) -> None:
        """Raise ConfigError for a key that cannot be set, or that a combination of the choices lacks."""
        if not leaves:
            return
        for override in leaves:
            if override.key_or_group in FIXED:
                key = override.key_or_group
                raise ConfigError(key, value(override), "cannot be set on the command line", hint=FIXED[key])
        began = time.monotonic()
        for choice in itertools.islice(_combinations(chosen), MAX_COMBINATIONS):
            if time.monotonic() - began > CHECK_SECONDS:
                break  # each job is checked again when it starts
            config = self._choices_alone(tuple(choice))
            for override in leaves:
                self.keys.check_path(config, override, " ".join(choice))

    def _choices_alone(self, texts: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the configuration of some choices, with interpolations unresolved; callers must not change it.

        Choices of this package are composed once per process, those of ``--config-dir`` at each call, because files may
        change.
        """
        if self.extra is not None:
            return to_plain(self._by_hydra(texts)[0], resolve=False)
        if texts not in _COMPOSED:
            _COMPOSED[texts] = to_plain(self._by_hydra(texts)[0], resolve=False)
        return _COMPOSED[texts]

    def _check_jobs(self, jobs: Sequence[Sequence[str]], launcher: str | None) -> None:
        """Check the whole configuration of as many jobs as the time limit allows.

        Raises ConfigError if no job is valid, or if a job is invalid because of a value that no valid job has. A job
        whose values are only invalid in combination is left to fail when it starts, so that the other jobs can run.
        """
        began = time.monotonic()
        tried: list[tuple[Sequence[str], ConfigError | None]] = []
        for job in jobs:
            if time.monotonic() - began > CHECK_SECONDS:
                break
            try:
                plain = self.plain(job)
                if launcher is not None:  # first: other keys of a data set depend on what is in its file
                    check_path(plain["dataset"].get("path"))
                checked = self._checked[tuple(job)] = checked_config(plain)
                if launcher is not None:
                    check_here(checked, launcher)
                tried.append((job, None))
            except ConfigError as error:
                tried.append((job, error))
        good = {text for job, reason in tried if reason is None for text in job}
        wrong = [(job, reason) for job, reason in tried if reason is not None]
        for job, reason in wrong:
            if not good or (not isinstance(reason, CombinationError) and not good.issuperset(job)):
                raise reason


def _with_preset_name(config: DictConfig, choices: Mapping[str, Any], extra: Path | None) -> dict[str, Any]:
    """Return plain data (:func:`run_config`) with the name of the method's YAML file in ``method.preset``."""
    plain = run_config(config, extra)
    if choices.get("method") and isinstance(plain.get("method"), dict):
        plain["method"] = {**plain["method"], "preset": choices["method"]}
    return plain


def run_config(config: DictConfig, extra: Path | None = None) -> dict[str, Any]:
    """Return the configuration of a run as plain data, with all interpolations resolved (:func:`to_plain`).

    The groups ``hydra``, ``launcher`` and ``experiment`` are left out, because they do not describe the run itself. The
    name of the quantizer is replaced by one that includes overridden options.
    """
    plain = to_plain(config)
    quantizer = plain.get("quantizer")
    if isinstance(quantizer, dict) and isinstance(quantizer.get("name"), str):
        quantizer["name"] = true_name(quantizer, extra)  # the name includes overridden keys
    return {key: value for key, value in plain.items() if key not in ("hydra", "launcher", "experiment")}


def to_plain(config: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Convert an OmegaConf configuration to nested dicts and lists.

    Without `resolve`, interpolations (``${...}``) and missing mandatory values (``???``) stay as text.

    Raises:
        ConfigError: an interpolation to be resolved cannot be, or a mandatory value is missing.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise ConfigError(str(key), None, first_line(error)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _combinations(chosen: Sequence[Override]) -> Iterator[list[str]]:
    """Yield all combinations of the choices that overrides of groups choose, each as a list of overrides."""
    axes = []
    for override in chosen:
        swept = override.is_sweep_override()
        values = list(override.sweep_string_iterator()) if swept else [override.get_value_element_as_str()]
        axes.append([f"{override.key_or_group}={choice}" for choice in values])
    for combination in itertools.product(*axes):
        yield list(combination)
