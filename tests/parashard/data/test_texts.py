"""Texts of cells: which mean the same, and which stand for a missing value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parashard.data.columns import MissingTexts, canonical, has_leading_zero, missing_texts_of, number_of


@pytest.mark.parametrize(
    ("texts", "form"),
    [
        (["1", "1.0", " 1", "01", "1.000"], "1"),
        (["0", "-0", "000", "0.0", "-0.0"], "0"),
        (["-2", "-02", "-2.0 "], "-2"),
        (["1234567890123456789", "01234567890123456789.0"], "1234567890123456789"),
        (["true", "TRUE", " True"], "true"),
        (["false", "False"], "false"),
        (["Delft", " Delft", "Delft\t"], "Delft"),
    ],
)
def test_texts_that_mean_the_same_have_one_form(texts, form):
    assert {canonical(text) for text in texts} == {form}


@pytest.mark.parametrize("text", ["1.10", "1.1", "1e5", "1E5", "0e12", "+5", ".0", "1.", "delft", "1_0", "٣", "-"])
def test_other_texts_stay_as_they_are(text):
    assert canonical(text) == text


@given(st.text("01.-eETrue ", max_size=8))
def test_a_form_is_its_own_form_and_the_same_number(text):
    form = canonical(text)
    assert canonical(form) == form
    assert number_of(form) == number_of(text)


@pytest.mark.parametrize(
    ("text", "has"), [("04064", True), ("00", True), (" -07", True), ("0", False), ("0.5", False), ("10", False)]
)
def test_a_zero_before_a_whole_number(text, has):
    assert has_leading_zero(text) is has


def test_marks_of_missing_values():
    marks = missing_texts_of(["?", " - "], ["NA"])
    assert marks == MissingTexts(("?", "-"), ("NA",))
    missing = ["", " ", "na", "N/A", "null", "?", " - "]
    assert [text for text in [*missing, "NA", "x"] if marks.is_missing(text)] == missing
    assert marks.is_missing("NA", in_text=False), "in a column of numbers"
    assert missing_texts_of("") == MissingTexts()
    assert not missing_texts_of("").is_missing("?")
