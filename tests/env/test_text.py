import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_env.text import MAX_DEPTH, quoted, read_json, valid_text

SURROGATES = st.text(st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010) | st.characters())


@given(SURROGATES)
def test_valid_text_can_be_encoded_and_keeps_what_was_valid(text):
    result = valid_text(text)
    result.encode("utf-8")
    assert valid_text(result) == result
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert result == text


def test_a_split_pair_is_joined_and_a_lone_half_is_replaced():
    assert valid_text("\ud83d\ude00!") == "\U0001f600!"
    assert valid_text("x\ud83d!") == "x\ufffd!"
    assert valid_text("\ude00\ud83d") == "\ufffd\ufffd"


@given(
    st.recursive(
        st.none() | SURROGATES | st.integers(), lambda x: st.lists(x) | st.dictionaries(SURROGATES, x)
    )
)
def test_read_json_of_any_value_holds_valid_text_only(value):
    for ascii_only in (True, False):
        json.dumps(read_json(json.dumps(value, ensure_ascii=ascii_only)), ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("1" * 5_000, "4300 digits"),
        ("{'a': 1}", "it is not JSON"),
        (b"\xff\xfe\xfd", "it is not"),
        (b'"\xff"', "it is not UTF-8"),
        ("", "it is not JSON"),
    ],
)
def test_read_json_raises_one_kind_of_error(text, message):
    with pytest.raises(ValueError, match=message):
        read_json(text)


def test_read_json_reads_bytes_as_json_loads_does():
    assert read_json('{"ä": [1, null]}'.encode()) == {"ä": [1, None]}
    assert read_json('"ä"'.encode("utf-16")) == "ä"


@pytest.mark.parametrize("opening,closing", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_the_limit_on_depth_is_a_number_and_not_the_stack(opening, closing):
    levels = MAX_DEPTH // (opening.count("[") + opening.count("{"))
    read_json(opening * levels + "1" + closing * levels)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(opening * (levels + 1) + "1" + closing * (levels + 1))
    wide = "[" + ",".join(['{"text": "[[[{{{"}'] * 500) + "]"
    assert len(read_json(wide)) == 500


def test_quoted_is_short():
    assert quoted("who") == "'who'"
    assert quoted("w" * 1_000_000, most=5) == "'ww...'"
