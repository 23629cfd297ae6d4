"""Finds personal data in a text: e-mail addresses, phone numbers, payment card numbers.

Numbers are the hard part: order numbers, versions, floats, timestamps and ids are digit runs too, and stay as they
are. A number counts only where nothing of a word, an id or a decimal touches it, and then:

    card   a known issuer's prefix and length, in one run or in the groups that cards are written in, and the checksum
           of ISO/IEC 7812-1 annex B (Luhn); not where the word before says that it is an id, an order, a time
    phone  +, then 8 to 14 digits (ITU-T E.164 allows 15, none is in use); or a North American number in its groups;
           or, straight after a word such as "phone" or "call me at", 7 to 15 digits in any grouping, but no date

Time is linear in the text: each pattern either eats what it looked at, or looks at a bounded number of characters in
one way only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["email", "phone", "card"]


class Found(NamedTuple):
    """text[start:end] is personal data of this kind; `value` is it in one spelling, to know it again."""

    start: int
    end: int
    kind: Kind
    value: str


# A stretch of digits and the separators that phone and card numbers have. Nothing follows the last class: a stretch is
# read once.
_STRETCH = re.compile(r"[+(]?[0-9][0-9 ().\-]{6,}")
_CARDS = tuple(
    re.compile(pattern + r"(?![0-9])")
    for pattern in (
        r"[0-9]{12,19}",
        r"[0-9]{4}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{4}",
        r"[0-9]{4}([ \-])[0-9]{6}\1[0-9]{4,5}",
        r"[0-9]{4}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?:\1[0-9]{1,3})?",
    )
)
_INTERNATIONAL = re.compile(r"\+[0-9](?:[ .\-]?\(?[0-9]\)?){7,13}(?![0-9])")
_NORTH_AMERICAN = re.compile(
    r"(?:\+?1[ .\-]?)?(?:\([2-9][0-9]{2}\) ?[2-9][0-9]{2}[ .\-][0-9]{4}"
    r"|[2-9][0-9]{2}([ .\-])[2-9][0-9]{2}\1[0-9]{4})(?![0-9])"
)
_LOOSE = re.compile(r"[+(]?[0-9](?:[ .\-()]{0,3}[0-9]){6,14}(?![0-9])")
_DATE = re.compile(r"(?:19|20)[0-9]{2}-?[01][0-9]-?[0-3][0-9](?![0-9])")
_NOT_DIGITS = re.compile(r"[^0-9]")

_CONTEXT_CHARACTERS = 40
_PHONE_WORD = re.compile(
    r"(?:(?<![a-z])(?:(?:tele|cell)?phone|tel|mobile|cell|fax|whatsapp|sms)(?:[ _]?(?:number|num|no))?"
    r"[\"'\\]{0,3}\.?\s{0,2}(?:is|at|was|:|=)?"
    r"|(?<![a-z])(?:call|text|reach|dial)(?: (?:me|us|him|her|them))?(?: (?:at|on))?)"
    r"\s{0,2}[\"'\\]{0,3}$",
    re.IGNORECASE,
)
_ID_WORD = re.compile(
    r"(?:(?<![a-z])(?:id|order|item|product|sku|isbn|tracking|invoice|ticket|case|reference|ref|serial|version"
    r"|timestamp|time|ts|seed|hash|commit|offset|build|account|reservation|booking)s?|(?-i:Id)s?)"
    r"(?:[ _]?(?:number|num|no))?[\"'\\]{0,3}\.?\s{0,2}(?:is|was|:|=|#|\()?\s{0,2}[\"'\\\[#]{0,3}$",
    re.IGNORECASE,
)
_CARD_WORD = re.compile(r"card|visa|amex", re.IGNORECASE)

_LOCAL = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._%+-'")
_DOMAIN = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])")


def find(text: str) -> list[Found]:
    """All personal data in `text`, in order, none overlapping. Work is linear in the length of `text`."""
    out: list[Found] = []
    for item in sorted([*emails(text), *numbers(text)]):
        if not out or item.start >= out[-1].end:
            out.append(item)
    return out


def emails(text: str) -> Iterator[Found]:
    """E-mail addresses: at most 64 characters of local part and 8 labels of domain around each @ (RFC 5321)."""
    at = text.find("@")
    while at >= 0:
        start = at
        while start > 0 and at - start < 64 and text[start - 1] in _LOCAL:
            start -= 1
        start = _after_escape(text, start)
        while start < at and text[start] in ".-'%+":
            start += 1
        domain = _DOMAIN.match(text, at + 1)
        if start < at and text[at - 1] not in ".'" and domain and _is_domain(domain.group()):
            # git@host:path names a repository's host, not a person.
            if text[start:at] != "git":
                yield Found(start, domain.end(), "email", text[start : domain.end()].lower())
            at = domain.end() - 1
        at = text.find("@", at + 1)


def _is_domain(domain: str) -> bool:
    """package@1.2.beta is a version; 163.com is a domain."""
    labels = domain.split(".")[:-1]
    return len(labels) == 1 or any(not label.isdigit() for label in labels)


def _after_escape(text: str, start: int) -> int:
    r"""In "\nbob@example.org" inside JSON text the n belongs to the escape, not to bob."""
    if start > 0 and text[start - 1] == "\\" and text[start] in "nrtbfu":
        return start + (5 if text[start] == "u" else 1)
    return start


def stretches(text: str) -> Iterator[tuple[int, int]]:
    """Where digits stand close enough together to be a number, as (start, end); none overlapping."""
    for match in _STRETCH.finditer(text):
        yield match.span()


def numbers(text: str) -> Iterator[Found]:
    """Cards and phones. Each place of a stretch where one may begin is looked at once."""
    for start, end in stretches(text):
        at = start
        while at < end:
            item = None
            if _free_before(text, at):
                item = _card(text, at, end) or (None if _follows_digits(text, at) else _phone(text, at, end))
            if item:
                yield item
            at = item.end if item else _next_place(text, at, end)


def _next_place(text: str, at: int, end: int) -> int:
    """The next place of the stretch where a number may begin: past this group of digits, or this mark."""
    if not text[at].isdigit():
        return at + 1
    while at < end and text[at].isdigit():
        at += 1
    while at < end and text[at] in " .-)":
        at += 1
    return at


def _card(text: str, at: int, end: int) -> Found | None:
    before = _before(text, at)
    named = bool(_CARD_WORD.search(before))
    if not named and (_follows_digits(text, at) or (_ends_in_a_word(before) and _ID_WORD.search(before))):
        return None
    for pattern in _CARDS:
        match = pattern.match(text, at, end)
        if match and _free_after(text, match.end()):
            digits = _NOT_DIGITS.sub("", match.group())
            listed = len(match.group()) > len(digits) and _digits_follow(text, match.end())
            # Cards of 12 and 13 digits are all but extinct, and sums and times of that length are not.
            if is_card(digits) and (named or not (listed or len(digits) < 14)):
                return Found(at, match.end(), "card", digits)
    return None


def _phone(text: str, at: int, end: int) -> Found | None:
    match = _INTERNATIONAL.match(text, at, end) or _NORTH_AMERICAN.match(text, at, end)
    if match and _free_after(text, match.end()) and not _digits_follow(text, match.end()):
        return Found(at, match.end(), "phone", _digits_of_phone(match.group()))
    before = _before(text, at)
    if _ends_in_a_word(before) and _PHONE_WORD.search(before):
        match = _LOOSE.match(text, at, end)
        if match and _free_after(text, match.end()) and not _DATE.match(text, at, end):
            return Found(at, match.end(), "phone", _digits_of_phone(match.group()))
    return None


def _before(text: str, at: int) -> str:
    return text[max(0, at - _CONTEXT_CHARACTERS) : at]


def _ends_in_a_word(before: str) -> bool:
    """Spares the patterns most of the places."""
    return before.rstrip(" \n\t\"'\\:=.#([")[-1:].isalpha()


def _digits_of_phone(spelling: str) -> str:
    """Without the country code of North America, so that both spellings are one number."""
    digits = _NOT_DIGITS.sub("", spelling)
    return digits[1:] if len(digits) == 11 and digits[0] == "1" else digits


def _free_before(text: str, at: int) -> bool:
    """Nothing of a word, an id, a decimal, an amount, a path or a longer number touches the first character."""
    if at == 0:
        return True
    last = text[at - 1]
    if last.isalnum():
        return at > 1 and text[at - 2] == "\\" and last in "nrt"
    return last not in "_.-+#/@$€£%&^"


def _free_after(text: str, end: int) -> bool:
    """Nothing of a word, an id, a decimal, a time or a longer number goes on after the last one."""
    if end >= len(text):
        return True
    follows, then = text[end], text[end + 1 : end + 2]
    if follows.isalnum() or follows in "_@%":
        return False
    return not (then.isalnum() if follows in ".-+" else follows == ":" and then.isdigit())


def _follows_digits(text: str, at: int) -> bool:
    """Groups of digits after more groups of digits are a table, not a number of their own."""
    return at > 1 and text[at - 1] in " -" and text[at - 2].isdigit()


def _digits_follow(text: str, end: int) -> bool:
    """Nor are groups before three digits more."""
    after = text[end : end + 4]
    return len(after) == 4 and after[0] in " -" and after[1:].isdigit()


def is_card(digits: str) -> bool:
    """A known issuer's prefix with its lengths, not one digit throughout, and the Luhn checksum. 12 to 19 digits."""
    two, three, four = int(digits[:2]), int(digits[:3]), int(digits[:4])
    size = len(digits)
    known = (
        (digits[0] == "4" and size in (13, 16, 19))  # Visa
        or ((51 <= two <= 55 or 2221 <= four <= 2720) and size == 16)  # Mastercard
        or (two in (34, 37) and size == 15)  # American Express
        or ((four == 6011 or 644 <= three <= 649 or two == 65) and size in (16, 19))  # Discover
        or (two == 62 and 16 <= size <= 19)  # UnionPay
        or (3528 <= four <= 3589 and size in (16, 19))  # JCB
        or ((300 <= three <= 305 or two in (36, 38, 39)) and size == 14)  # Diners Club
        or (two in (50, 56, 57, 58, 63, 67) and 12 <= size <= 19)  # Maestro
    )
    return known and len(set(digits)) > 1 and luhn(digits)


def luhn(digits: str) -> bool:
    """ISO/IEC 7812-1 annex B: every second digit from the right doubled, digits summed, a multiple of 10."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0
