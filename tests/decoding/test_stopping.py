"""Ends of rows, and the places where their text is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbench.decoding.sampling import Stopping


class Letters:
    """A tokenizer of a letter a token; token 0 is special and left out of texts."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join("<s>" if token == 0 else chr(token) for token in tokens if token or not skip_special_tokens)


def fed(*texts: str, eos: Sequence[int] = (), stop: Sequence[str] = ()) -> Stopping:
    """Rows that were given one letter of their text after the other, as long as the longest."""
    stopping = Stopping(len(texts), eos, stop, Letters())
    for step in range(max(map(len, texts))):
        stopping.take([ord(text[step]) if step < len(text) else ord(".") for text in texts])
    return stopping


def test_text_ends_before_the_first_of_several_stop_strings() -> None:
    """Speculation adds several tokens at once, so a text may contain several strings; their order does not matter."""
    for stop in (("yz", "mn"), ("mn", "yz")):
        stopping = Stopping(1, (), stop, Letters())
        stopping.tokens = [[ord(letter) for letter in "abmncdyz"]]
        assert stopping.texts() == ["ab"]
    stopping.tokens = [[ord(letter) for letter in "mnab"]]
    assert stopping.texts() == [""]
    stopping.tokens = [[ord(letter) for letter in "m n"]]
    assert stopping.texts() == ["m n"]


def test_rows_end_by_themselves_and_take_nothing_more() -> None:
    stopping = fed("abXcd", "abcde", "aXbXc", stop=("X", "Q"))
    assert stopping.finish == ["stop", "length", "stop"]
    assert stopping.ended == [True, False, True] and not stopping.all_ended
    assert ["".join(map(chr, tokens)) for tokens in stopping.tokens] == ["abX", "abcde", "aX"]
    assert stopping.texts() == ["ab", "abcde", "a"]
    assert fed("aX", "X", stop=("X",)).all_ended


def test_a_token_that_ends_is_left_out_and_says_so() -> None:
    stopping = fed("abcab", "bbbbb", eos=(ord("c"), ord("q")))
    assert stopping.finish == ["eos", "length"]
    assert stopping.texts() == ["ab", "bbbbb"]


def test_stop_strings_are_found_across_special_tokens_and_after_long_texts() -> None:
    stopping = Stopping(1, (), ("wxyz",), Letters())
    for token in [*[ord("a")] * 200, ord("w"), 0, ord("x"), 0, ord("y"), ord("z")]:
        assert not stopping.ended[0]
        stopping.take([token])
    assert stopping.finish == ["stop"] and stopping.texts() == ["a" * 200]


def test_without_a_tokenizer_there_are_no_texts() -> None:
    stopping = Stopping(2, (7,), (), None)
    stopping.take([1, 7])
    stopping.take([2, 3])
    assert (stopping.tokens, stopping.finish, stopping.texts()) == ([[1, 2], []], ["length", "eos"], ["", ""])
    with pytest.raises(ValueError, match="tokenizer"):
        Stopping(1, (), ("x",), None)


class Bytes:
    """A tokenizer of a byte a token."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_a_stop_string_may_have_a_token_for_each_of_its_bytes() -> None:
    stop = "问题" * 6
    stopping = Stopping(1, (), ("x", stop), Bytes())
    for token in ("答案" + stop).encode():
        assert not stopping.ended[0]
        stopping.take([token])
    assert stopping.finish == ["stop"] and stopping.texts() == ["答案"]
