"""Masks: what is personal goes, what only looks like it stays, in linear time."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.conversations.canonical import Conversation, Message, ToolCall
from megaflow_stream.processing.steps import personal
from megaflow_stream.processing.steps.personal import find, is_card, luhn
from megaflow_stream.processing.steps.redact import Redactor, redact

CARD = "4242424242424242"


def kinds(text: str) -> list[tuple[str, str]]:
    return [(item.kind, text[item.start : item.end]) for item in find(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to bob.x+y@ex-ample.co.uk.", ("email", "bob.x+y@ex-ample.co.uk")),
        ("<Mia.Li@example.com>", ("email", "Mia.Li@example.com")),
        ("mailto:a@b.org?subject=x", ("email", "a@b.org")),
        ("at 163: bob@163.com", ("email", "bob@163.com")),
        (f"({CARD})", ("card", CARD)),
        (f"**{CARD}**", ("card", CARD)),
        (f"I paid {CARD}", ("card", CARD)),
        ("card 4242 4242 4242 4242 12/27", ("card", "4242 4242 4242 4242")),
        ("4242-4242-4242-4242.", ("card", "4242-4242-4242-4242")),
        ("3782 822463 10005", ("card", "3782 822463 10005")),
        ("call (202) 555-0199 now", ("phone", "(202) 555-0199")),
        ("202-555-0199", ("phone", "202-555-0199")),
        ("202.555.0199,", ("phone", "202.555.0199")),
        ("+1 202 555 0199", ("phone", "+1 202 555 0199")),
        ("dial +44 20 7946 0958!", ("phone", "+44 20 7946 0958")),
        ("phone: 2025550199", ("phone", "2025550199")),
        ('"phone_number": "2025550199"', ("phone", "2025550199")),
        ("call me at 030 1234567", ("phone", "030 1234567")),
        ("tel 555-1234", ("phone", "555-1234")),
    ],
)
def test_personal_data_is_found(text: str, expected: tuple[str, str]) -> None:
    assert kinds(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "0.4242424242424242",
        f"{CARD}.5",
        f"-{CARD}",
        f"${CARD}",
        f"1.0{CARD}",
        "3.14159265358979 2.2360679774997898 -122.4194155",
        "[0.2025550199, 202.5550199]",
        "1715785200 1715785200000 1715785200000000 1715785200000000000",
        "2024-05-20 15:00:00.123456 2024-05-20T15:00:00Z 20240520150000",
        'phone bought on "2024-05-20"',
        "phone: 2024-05-20",
        f"order_{CARD} #{CARD} W{CARD} {CARD}x item-{CARD}",
        f"order id: {CARD}",
        f'{{"payment_id": "{CARD}", "itemId": {CARD}}}',
        "credit_card_4421486 certificate_7504069 HAT136 #W5744371 JMO1MG",
        "0b7c42d8-4242-4242-4242-424242424242",
        f"https://example.org/{CARD}",
        "2025550199",
        "192.168.100.1234 255.255.255.0",
        "100 202 555 0199 300",
        "1024 4242 4242 4242 4242 2048",
        "123-45-6789 12345-6789",
        f"{int(CARD) + 1}",
        "0000000000000000",
        "git@github.com:org/name.git",
        "package@1.2.beta react@18.2.0",
        "@dataclass(frozen=True) a @ b x@y",
        "SKU 9780134685991, ISBN 978-0-13-468599-1",
    ],
)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert kinds(text) == []


def test_cards_have_an_issuer_and_a_checksum() -> None:
    assert luhn("79927398713")
    assert not luhn("79927398710")
    for card in ("378282246310005", "5555555555554444", "6011111111111117", "30569309025904", "3530111333300000"):
        assert is_card(card)
    assert not is_card("1" + CARD[1:])
    assert not is_card("4" * 16)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_float_is_masked(number: float) -> None:
    assert kinds(f"value {number!r} and {number:.12f}") == [] or number == int(number)


def conversation(**changed: Any) -> Conversation:
    messages = [
        Message(role="user", content="I am mia@example.org, my card is 4242 4242 4242 4242."),
        Message(
            role="assistant",
            reasoning="Ask for MIA@example.org, not bob@example.org.",
            tool_calls=[
                ToolCall(
                    name="pay",
                    arguments='{"to": "x\\nmia@example.org", '
                    f'"card": {CARD}, "phone": 2025550199, "at": 1715785200000}}',
                )
            ],
        ),
        Message(role="tool", name="pay", content='{"mail": "bob@example.org", "amount": 12.5}'),
    ]
    return replace(Conversation(id="c-1", dataset="agent", messages=messages), **changed)


def test_a_value_has_one_placeholder_throughout_a_conversation() -> None:
    masked, counts = redact(conversation())
    user, assistant, tool = masked.messages
    assert user.content == "I am <email_1>, my card is <card_1>."
    assert assistant.reasoning == "Ask for <email_1>, not <email_2>."
    assert assistant.tool_calls[0].arguments == (
        '{"to": "x\\n<email_1>", "card": "<card_1>", "phone": "<phone_1>", "at": 1715785200000}'
    )
    assert tool.content == '{"mail": "<email_2>", "amount": 12.5}'
    assert counts == {"email": 5, "card": 2, "phone": 1}


def test_metadata_is_masked_too_and_ids_stay() -> None:
    masked, _ = redact(conversation(id=CARD, metadata={"info": {"user": ["mia@example.org", 7, None]}, "seed": 42}))
    assert masked.metadata == {"info": {"user": ["<email_1>", 7, None]}, "seed": 42}
    assert masked.id == CARD


def test_masking_twice_is_masking_once() -> None:
    once, _ = redact(conversation())
    twice, counts = redact(once)
    assert twice == once
    assert counts == {}


def test_placeholders_that_were_there_keep_their_meaning() -> None:
    given_ = [Message(role="user", content="<email_3> wrote to mia@example.org")]
    masked, _ = redact(conversation(messages=given_))
    assert masked.messages[0].content == "<email_3> wrote to <email_4>"


PERSONAL = st.sampled_from(
    [CARD, "mia@example.org", "+1 202 555 0199", "(202) 555-0199", "é", '"', "\n", "\\", "n", "1"]
)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**53), 2**53),
        st.sampled_from([int(CARD), 2025550199]),
        st.floats(allow_nan=False, allow_infinity=False),
        st.lists(PERSONAL, max_size=4).map("".join),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["phone", "card", "id", "x"]), inner),
    max_leaves=12,
)


@given(JSON, st.booleans())
def test_json_stays_json(value: Any, indented: bool) -> None:
    text = orjson.dumps([value], option=orjson.OPT_INDENT_2 if indented else None).decode()
    masked = Redactor().text(text)
    orjson.loads(masked)
    # An address that runs on into letters or digits is none: its last label would be another.
    assert "mia@example.org" not in re.sub(r"mia@example\.org[\w@%]", "", masked)


ADVERSARIAL = [
    "1 ",
    "1",
    "a@",
    "@",
    "a" * 64 + "@",
    "@" + "a-" * 250,
    "@" + "a." * 250,
    "1-",
    "(1)",
    "+1",
    "1   ",
    "4242 ",
    "phone ",
    "phone 1234567 ",
    "card 4242 4242 4242 ",
    '{"phone_number": "',
    "\\",
    "Nothing personal in this sentence, number 12. ",
]


def work(text: str) -> int:
    """Calls made and characters looked at beyond one pass: what the time of `find` is made of."""
    done = sum(end - start for start, end in personal.stretches(text))

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal done
        done += 1

    sys.setprofile(count)
    try:
        find(text)
    finally:
        sys.setprofile(None)
    return done


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_work_grows_with_the_text_and_no_faster(piece: str) -> None:
    """Each call looks at a bounded number of characters (the patterns' own bounds), so calls tell the growth."""
    size = 20_000
    small, large = (work((piece * (n // len(piece) + 1))[:n]) for n in (size, 4 * size))
    assert large <= 4 * small + 2_000


def test_a_megabyte_is_masked() -> None:
    text = "Nothing personal in 12345 words. " * 32_000 + "bob@example.org"
    assert kinds(text) == [("email", "bob@example.org")]
