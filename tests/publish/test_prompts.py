"""Excerpts of prompts, for which the data set is read again."""

from __future__ import annotations

from kvbench.publish.runs import with_excerpts
from tests.run_support import config


def test_rows_get_the_ends_of_their_prompts_and_a_reference(tmp_path):
    rows = [{"id": "first/0"}, {"id": "second/1"}, {"id": "of another data set"}]
    messages = []
    first, second, other = with_excerpts(config(tmp_path), rows, messages.append)
    assert first["prompt_head"].startswith("Read: word") and messages == []
    assert (first["reference"], second["reference"]) == (" word0", " word1")
    assert other == rows[2]


def test_a_data_set_that_cannot_be_read_is_said(tmp_path):
    messages = []
    settings = config(tmp_path, dataset={"_target_": "nowhere.Task"})
    assert with_excerpts(settings, [{"id": "first/0"}], messages.append) == [{"id": "first/0"}]
    (line,) = messages
    assert line.startswith("note: sent without prompts, because the data set cannot be read: ")
