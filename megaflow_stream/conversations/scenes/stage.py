"""Where a scene is played: it collects the turns, and gives people, dates and numbers that belong to nobody.

Only `Random.random()` is used, whose numbers are the same on every version of Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import orjson

from megaflow_stream.conversations.canonical import Message, Role, ToolCall

T = TypeVar("T")


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """The parts of a text between its commas."""
    return tuple(text.split(","))


FIRST = words(
    "Mia Omar Lena Ravi Chloe Diego Hana Felix Amara Noah Yuki Priya Tomas Ines Kofi Sara Leon Zoe "
    "Malik Nora Ivan Elif Marco Ada Jonas Lucia Theo Aisha Pavel Rosa"
)
LAST = words(
    "Lopez Meyer Tanaka Okafor Rossi Novak Singh Dubois Haddad Kim Silva Moreau Larsen Costa Weber Ali "
    "Petrov Nguyen Brown Fischer Santos Laine Murphy Kaya"
)
CITIES = words(
    "Berlin Lisbon Oslo Denver Osaka Lima Cairo Toronto Austin Nairobi Madrid Seoul Dublin Chicago "
    "Prague Athens Boston Zurich Mumbai Vienna"
)
MONTHS = words("January February March April May June July August September October November December")


class Stage:
    """The turns of one conversation as they are spoken."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.messages: list[Message] = []
        self.tools: list[dict[str, Any]] = []
        self.reward: float | None = None

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.rng.random() * len(items))]

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return low + int(self.rng.random() * (high - low + 1))

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def offer(self, name: str, description: str, *parameters: str) -> None:
        """A tool that the assistant may call; its parameters are strings."""
        properties = {parameter: {"type": "string"} for parameter in parameters}
        schema = {"type": "object", "properties": properties, "required": list(parameters)}
        function = {"name": name, "description": description, "parameters": schema}
        self.tools.append({"type": "function", "function": function})

    def say(self, role: Role, text: str) -> None:
        self.messages.append(Message(role=role, content=text))

    def system(self, text: str) -> None:
        self.say("system", text)

    def user(self, text: str) -> None:
        self.say("user", text)

    def assistant(self, text: str) -> None:
        self.say("assistant", text)

    def call(self, name: str, result: object, /, **arguments: object) -> None:
        """The assistant calls a tool, and the tool answers."""
        call_id = f"call_{int(self.rng.random() * 16**8):08x}"
        call = ToolCall(name=name, arguments=orjson.dumps(arguments).decode(), id=call_id)
        self.messages.append(Message(role="assistant", tool_calls=(call,)))
        text = result if isinstance(result, str) else orjson.dumps(result).decode()
        self.messages.append(Message(role="tool", content=text, name=name, call_id=call_id))

    def person(self) -> tuple[str, str]:
        return self.pick(FIRST), self.pick(LAST)

    def email(self, first: str, last: str) -> str:
        """An address under a domain that is reserved for examples (RFC 2606)."""
        domain = self.pick(("example.com", "example.org", "example.net"))
        return f"{first}.{last}{self.number(1, 99)}@{domain}".lower()

    def phone(self) -> str:
        """A number of the range 555-0100 to 555-0199, which is kept for fiction."""
        line = self.number(100, 199)
        return self.pick((f"({self.number(201, 989)}) 555-0{line}", f"+1 {self.number(201, 989)} 555 0{line}"))

    def card(self) -> str:
        """16 digits with a right check digit (Luhn, ISO/IEC 7812), under a prefix that test systems use."""
        digits = [int(d) for d in self.pick(("400000", "411111", "555555"))]
        digits += [self.number(0, 9) for _ in range(9)]
        doubled = [2 * d - 9 * (d > 4) if at % 2 == 0 else d for at, d in enumerate(digits)]
        text = "".join(map(str, [*digits, -sum(doubled) % 10]))
        return " ".join(text[at : at + 4] for at in range(0, 16, 4)) if self.maybe(0.5) else text

    def date(self) -> str:
        return f"{self.pick(MONTHS)} {self.number(1, 28)}"

    def thanks(self) -> None:
        """The last words of many conversations."""
        ends = (
            ("Thank you!", "You are welcome. Have a good day!"),
            ("Great, that is all.", "Glad to help. Have a good day!"),
            ("Perfect, thanks a lot.", "You are welcome. Is there anything else?"),
        )
        user, assistant = self.pick(ends)
        self.user(user)
        self.assistant(assistant)


Scene = Callable[[Stage], None]
