"""What an option's text means: numbers, signs and single letters count, punctuation and case do not."""

from __future__ import annotations

import pytest

from sorl_env.option_text import option_words
from sorl_env.rewards import multiple_choice

SAME = [
    ("beta-blocker", "Beta blocker."),
    ("A beta blocker", "beta blocker"),
    ("An increase in the heart rate", "increase in heart rate"),
    ("Crohn's disease", "crohn\u2019s disease"),
    ("**Zinc** (Zn)", "zinc, Zn"),
    ("1,000 mg", "1000 mg"),
    (".5", "0.5"),
    ("-5", "\u22125"),
    ("5-10", "5 \u2013 10"),
    ("salt & water", "salt and water"),
    ("Rh-ve", "rh -ve"),
    ("HLA-B27", "HLA B27"),
]
DIFFERENT = [
    ("9.3", "93"),
    ("9.3", "9 3"),
    ("1:4", "14"),
    ("1:4", "1 4"),
    ("5-10", "510"),
    ("5-10", "5 10"),
    ("-5", "5"),
    ("5%", "5"),
    ("< 5", "> 5"),
    ("< 5", "5"),
    ("Rh-ve", "Rh+ve"),
    ("Rh-", "Rh+"),
    ("Rh-", "Rh"),
    ("Na+", "Na"),
    ("vitamin A", "vitamin"),
    ("vitamin A", "vitamin D"),
    ("A antigen", "antigen"),
    ("A and B", "B"),
    ("mg/dL", "mg dL"),
    ("\u2191 TSH", "\u2193 TSH"),
    ("37\u00b0C", "37 C"),
    (r"\alpha blocker", r"\beta blocker"),
    (r"Reed-Sternberg cells\T", "Reed-Sternberg cells"),
    ("\u03b1", "\u03b2"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_texts_that_say_the_same(one: str, other: str) -> None:
    assert option_words(one) == option_words(other) != ()


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_texts_that_say_something_else(one: str, other: str) -> None:
    assert option_words(one) != option_words(other)
    assert (
        multiple_choice(f"A: {one}", "A", {"A": other}) == 0.0 < multiple_choice(f"A: {one}", "A", {"A": one})
    )
