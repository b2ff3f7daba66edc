"""Comments of YAML files: behind a key, above it, in nested mappings, and none of the file's own."""

import pytest

from kvbench.util.confdir import comments

TEXT = """\
# what the file is about
name: x
size: 32   # tokens, "quoted" # and more
# the five that matter,
# in two lines
tasks: [a, b]
text: "no # comment"
source:   # where it is
  id: a/b   # the repository
  file: c
flow: {bits: 2, axis: token}   # both
"""


@pytest.mark.parametrize(
    ("key", "comment"),
    [
        ("name", None),
        ("size", 'tokens, "quoted" # and more'),
        ("tasks", "the five that matter, in two lines"),
        ("text", None),
        ("source", "where it is"),
        ("source.id", "the repository"),
        ("source.file", None),
        ("flow", "both"),
        ("flow.axis", "both"),
    ],
)
def test_comments_belong_to_their_keys(key: str, comment: str | None) -> None:
    assert comments(TEXT).get(key) == comment


def test_an_empty_file_has_no_comments() -> None:
    assert comments("") == comments("# only this\n") == {}
