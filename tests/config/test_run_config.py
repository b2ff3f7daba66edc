"""Every choice of every group composes and is accepted; the schema's own rules."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest

from kvbench.cli.compose import Composer
from kvbench.config.run_config import GROUPS, checked_config
from kvbench.errors import ConfigError
from kvbench.quantizers.spec import taken
from kvbench.util.confdir import choice_summary, config_groups, group_options, read_choice
from kvbench.util.schema import bounded, build
from tests.marks import fast
from tests.run_support import config

#: a launcher that comes with an extra package
SUBMITIT = "hydra_plugins.hydra_submitit_launcher"

#: data sets with prompts of 4k tokens and more
ANSWERS = ("aime2025", "aime2026", "math500", "gpqa_diamond", "mrcr", "livecodebench")
TEXTS = ("pg19", "multi_lexsum", "infinitebench_sum", "longbench_v2", "longbench_v2_cot")
LONG = (*TEXTS, *ANSWERS, "efficiency/tpot", "efficiency/prefill", "efficiency/memory")

CHOICES = [(group, choice) for group in config_groups() for choice in group_options(group)]


def _composed(*overrides: str) -> dict[str, Any]:

    composer = Composer()
    return composer.plain(overrides)


#: of the data sets in a folder (tasks of one benchmark) the first
FIRST = {choice.rpartition("/")[0]: choice for choice in reversed(group_options("dataset"))}


def _takes(path: Path) -> tuple[str, ...]:
    return taken(read_choice(path).get("takes", ()))


#: methods that take the same quantizers as KIVI, and check them in the same way
LIKE_KIVI = {"logquant", "partial_logquant", "keep"}
#: quantizers that the other methods compose with, each of them, in a test of their own
TAKEN = {name for method, path in group_options("method").items() if method not in LIKE_KIVI for name in _takes(path)}


def _runs_fast(case: tuple[str, str]) -> bool:
    group, choice = case
    if group == "dataset":
        return "/" not in choice or choice in FIRST.values()
    return group != "quantizer" or choice not in TAKEN


@pytest.mark.parametrize(
    ("group", "choice"),
    fast(CHOICES, _runs_fast),
    ids=[f"{group}={choice}" for group, choice in CHOICES],
)
def test_every_choice_composes_and_is_accepted(group: str, choice: str) -> None:
    if choice.startswith("submitit") and find_spec(SUBMITIT) is None:
        pytest.skip(f"launcher={choice} needs the extra `launch`")
    overrides = [f"{group}={choice}"]
    if group == "quantizer" and choice != "none":  # the default method packs nothing
        takers = [name for name, path in group_options("method").items() if choice in _takes(path)]
        assert takers, f"no method takes quantizer={choice}"
        overrides.append(f"method={takers[0]}")
    if (group == "dataset" and choice in LONG) or choice.startswith("long/"):
        overrides.append("model=llama3.1-8b")
    if group == "dataset" and choice.rpartition("/")[2] == "text":  # files of one's own
        overrides.append(f"dataset.path={__file__}")
    if (group, choice) == ("model", "endpoint"):
        overrides += ["model.urls=[http://localhost:8000]", "model.preset=tiny"]
    if (group, choice) == ("dataset", "records"):
        overrides += [f"dataset.path={__file__}", "dataset.template='{question}'"]
    Composer().check(overrides)


@pytest.mark.parametrize("method", fast(group_options("method"), group_options("method").keys() - LIKE_KIVI))
def test_every_quantizer_that_a_method_takes_is_accepted(method: str) -> None:
    for quantizer in _takes(group_options("method")[method]):
        Composer().check([f"method={method}", f"quantizer={quantizer}"])


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=[f"{group}={choice}" for group, choice in CHOICES])
def test_every_choice_says_what_it_is(group: str, choice: str) -> None:
    path = group_options(group)[choice]
    assert len(choice_summary(path)) > 10, f"{path} must begin with a comment that says what it is: --help shows it"


def test_the_order_of_the_command_line_wins_over_a_methods_default() -> None:
    assert _composed("method=kivi")["quantizer"]["name"] == "int2"
    assert _composed("method=kivi", "quantizer=int4")["quantizer"]["name"] == "int4"
    assert _composed("quantizer=int4", "method=kivi")["quantizer"]["name"] == "int4"
    assert _composed("experiment=quickstart/kivi4")["quantizer"]["name"] == "int4"
    assert _composed("experiment=quickstart/kivi4", "quantizer=int8")["quantizer"]["name"] == "int8"
    assert _composed("experiment=quickstart/atom4")["quantizer"]["name"] == "int4_token"


def test_a_composed_configuration_is_plain_data_of_the_known_groups() -> None:
    config = _composed("method=kivi")
    assert set(config) == set(GROUPS)
    assert type(config["method"]) is dict


def test_a_checked_configuration_is_typed() -> None:
    checked = checked_config(_composed("method=kivi", "method.residual=64", "runtime.batch_size=2"))
    assert checked.method.residual == 64
    assert checked.runtime.batch_size == 2
    assert checked.model.head_dim()


def test_further_choices_from_another_folder(tmp_path: Any) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "mine.yaml").write_text("# mine\ndefaults: [default, _self_]\nseed: 7\n")
    jobs = Composer(tmp_path).check(["runtime=mine"])
    assert jobs == [["runtime=mine"]]
    with pytest.raises(ConfigError, match="runtime=mine"):
        Composer().check(["runtime=mine"])


def test_the_jobs_of_a_sweep() -> None:
    jobs = Composer().check(["method=fp16,kivi", "runtime.seed=1,2"], multirun=True)
    assert len(jobs) == 4
    assert ["method=kivi", "runtime.seed=2"] in jobs


@dataclass(frozen=True)
class Inner:
    bits: int


@dataclass(frozen=True)
class Outer:
    count: int = bounded(3, minimum=1, maximum=9)
    share: float = bounded(0.5, above=0.0, maximum=1.0)
    axis: Literal["channel", "token"] | None = None
    sizes: tuple[int, ...] = ()
    inner: Inner | None = None
    group: int | Literal["head_dim"] = "head_dim"


def test_build_makes_nested_dataclasses() -> None:
    made = build(Outer, {"count": 4, "share": 1, "sizes": [1, 2], "inner": {"bits": 2}, "group": 32}, "method")
    assert made == Outer(4, 1.0, None, (1, 2), Inner(2), 32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"cuont": 4}, "did you mean 'count'"),
        ({"count": 0}, "at least 1"),
        ({"count": 10}, "at most 9"),
        ({"count": True}, "method.count=true: must be a whole number"),
        ({"count": 2.0}, "a whole number"),
        ({"share": 0.0}, "greater than 0.0"),
        ({"share": float("nan")}, "finite"),
        ({"axis": "row"}, "channel, token"),
        ({"sizes": [1, "x"]}, r"method.sizes\[1\]=x"),
        ({"sizes": 3}, "a list of a whole number"),
        ({"inner": {}}, "method.inner.bits: is missing"),
        ({"inner": {"bits": 2, "axis": 1}}, "method.inner.axis=1: no such key"),
        ({"inner": 3}, "method.inner=3: must be a group of keys"),
        ({"group": "head"}, "a whole number or head_dim"),
    ],
)
def test_build_refuses(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Outer, data, "method")


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        *(("runtime", "device", name) for name in ("cpux", "cuda:0x", "cuda:", "autocpu", "gpu", "")),
        *(("decoding", "stop", stop) for stop in (["END", ""], ["", "END"], [""])),
        *(("model", "chat", chat) for chat in ("alpaca", "[INST]{prompt}[/INST]{prompt}", "")),
    ],
)
def test_values_that_only_begin_right_or_are_right_in_part_are_refused(group: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{group}\.{key}="):
        checked_config(config("results", **{group: {key: value}}))


@pytest.mark.parametrize("new", [4095, 4096])
def test_an_answer_leaves_room_for_a_prompt(new: int) -> None:
    def composed() -> None:
        checked_config(_composed("method=fp16", "model=tiny", f"decoding.max_new_tokens={new}"))

    if new < 4096:
        composed()
    else:
        with pytest.raises(ConfigError, match="leaves no room for a prompt"):
            composed()
