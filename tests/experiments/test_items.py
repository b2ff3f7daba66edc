"""Every declared item: its settings parse, its published cells exist, and its claims name rows and columns."""

import ast
from functools import cache
from pathlib import Path

import pytest

import experiments.fold
from experiments import published
from experiments.data import POINTS, Plan, groups_of
from experiments.fold.claims import bound
from experiments.fold.grid import looked_up
from experiments.item import Claim, Computed, Grid
from experiments.registry import chosen_items, items
from kvbench.config.setting import parse_setting
from kvbench.errors import ConfigError, DataError
from kvbench.util.confdir import group_options

GRIDS = [item for item in items().values() if isinstance(item, Grid)]


def test_ids_and_captions():
    for name, item in items().items():
        assert item.id == name and item.caption.strip() and item.number[-1].isalnum()
        assert "/" not in item.caption.split()[0]


@cache
def loaded(text):
    """Load the method of a setting, once for all items."""
    return parse_setting(text).load()


@pytest.mark.parametrize("item", GRIDS, ids=lambda item: item.id)
def test_settings_are_of_the_grammar(item):
    settings = {text for row in item.rows for text in (row.setting, row.small, row.timed) if text}
    for text in settings:
        loaded(text)
    assert all(row.setting or row.absent for row in item.rows)


@pytest.mark.parametrize("item", GRIDS, ids=lambda item: item.id)
def test_data_sets_and_models_are_choices(item):
    assert {column.data for column in (*item.columns, *item.mini)} <= {*group_options("dataset"), POINTS}
    assert {model.preset for model in item.models} <= group_options("model").keys()


@pytest.mark.parametrize("item", GRIDS, ids=lambda item: item.id)
def test_names_are_unique_and_claims_name_them(item):
    rows = [row.name for row in item.rows]
    groups = {group.name for plan in (Plan(), Plan(data="mini")) for group in groups_of(item, plan)}
    columns = [*(column.name for column in item.columns), *groups]
    assert len(set(rows)) == len(rows) and len(set(columns)) == len(columns)
    assert not item.base or item.base in rows
    for claim in item.claims:
        assert isinstance(claim, Claim) and {claim.first, claim.second} <= set(rows)
        assert claim.column in columns or claim.column in [column.name for column in (*item.mini, *(item.real or ()))]
        assert bound(item.paper, claim.low) < bound(item.paper, claim.high)


@pytest.mark.parametrize("item", [item for item in GRIDS if item.published], ids=lambda item: item.id)
def test_published_cells_exist(item):
    """Each row with published keys has at least one number, and each number is found by one line."""
    for row in [row for row in item.rows if row.published]:
        places = [(c.published, c.value) for c in item.columns] + [(g.published or {}, g.value) for g in item.groups]
        numbers = [looked_up(item, model, row, keys, value) for model in item.models for keys, value in places if keys]
        assert not numbers or any(number is not None for number in numbers), row.name


def test_cocktail_numbers_by_hand():
    item = items()["cocktail/table2"]
    rows = {row.name: row for row in item.rows}
    columns = {column.name: column for column in item.columns}
    mistral = item.models[2]
    assert looked_up(item, mistral, rows["KIVI INT2"], columns["SAMSum"].published, "") == 43.34
    assert looked_up(item, mistral, rows["Cocktail"], item.groups[0].published, "") == 48.74


def test_computed_items_name_a_function():
    """Looked for in the source: the modules import torch."""
    folder = Path(experiments.fold.__file__).parent
    for item in items().values():
        if isinstance(item, Computed):
            module, _, name = item.compute.partition(":")
            functions = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8")).body
            assert name in [node.name for node in functions if isinstance(node, ast.FunctionDef)]


def test_lookup_refuses_unknown_columns_and_several_lines():
    with pytest.raises(DataError, match="does not have the columns fruit"):
        published.lookup("cocktail_table2", {"fruit": "x"}, "score")
    with pytest.raises(DataError, match="one was expected"):
        published.lookup("cocktail_table2", {"method": "KIVI"}, "score")
    assert published.lookup("cocktail_table2", {"method": "none"}, "score") is None


def test_claims_by_name():
    assert published.claim("cocktail", "TPOT reduction vs FP16 (min)") == 32
    assert published.claim("cocktail", "-TPOT reduction vs FP16 (min)") == -32
    with pytest.raises(DataError, match="does not contain the claim"):
        published.claim("cocktail", "faster than light")


def test_items_by_name():
    assert [item.id for item in chosen_items(["cocktail/table2", "cocktail/table2"])] == ["cocktail/table2"]
    assert {item.paper for item in chosen_items(["cocktail"])} == {"cocktail"}
    assert len(chosen_items(["all"])) == len(items())
    with pytest.raises(ConfigError, match="did you mean 'cocktail/table2'"):
        chosen_items(["cocktail/tabel2"])
