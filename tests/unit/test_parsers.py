"""The parsers: nothing of a conversation is lost, doubled or moved, and what cannot be read is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.conversations import detect
from megaflow_stream.conversations.canonical import Conversation, Message, ToolCall, from_json, to_json
from megaflow_stream.conversations.files import Document, read, sources
from megaflow_stream.conversations.pairing import Pair, pair
from megaflow_stream.conversations.validate import check, drop_reason
from megaflow_stream.conversations.writing import write
from megaflow_stream.errors import BadRecord


def chat(*messages: dict[str, Any], **more: Any) -> Conversation:
    return detect.parse({"messages": list(messages), **more}, "agent")


def turns(*said: tuple[str, Any], **more: Any) -> Conversation:
    return detect.parse({"conversations": [{"from": who, "value": what} for who, what in said], **more}, "agent")


def call(name: str = "f", arguments: object = "{}", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


# OpenAI chat


def test_every_role_and_field_of_openai_chat() -> None:
    conversation = chat(
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "now?"}],
            "name": "Ann",
        },
        {"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1}'), call("g", {"b": [2]}, "c2")]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Done.", "reasoning_content": "I think."},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        tools=[{"type": "function", "function": {"name": "f"}}],
        model="m",
    )
    assert conversation.messages == [
        Message(role="developer", content="Be brief."),
        Message(role="user", content="What\nnow?", name="Ann"),
        Message(
            role="assistant",
            tool_calls=(
                ToolCall(name="f", arguments='{"a": 1}', id="c1"),
                ToolCall(name="g", arguments='{"b":[2]}', id="c2"),
            ),
        ),
        Message(role="tool", content="one", call_id="c1"),
        Message(role="tool", content="two", call_id="c2"),
        Message(role="assistant", content="Done.", reasoning="I think."),
        Message(role="assistant", content="I will not."),
    ]
    assert conversation.tools == '[{"type":"function","function":{"name":"f"}}]'
    assert conversation.metadata == {"model": "m"}
    check(conversation)
    assert drop_reason(conversation) is None


def test_legacy_functions() -> None:
    conversation = chat(
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x":1}'}},
        {"role": "function", "name": "f", "content": "1"},
        functions=[{"name": "f"}],
    )
    assert conversation.messages[1].tool_calls == (ToolCall(name="f", arguments='{"x":1}'),)
    assert conversation.messages[2] == Message(role="tool", content="1", name="f")
    assert conversation.tools == '[{"name":"f"}]'
    check(conversation)


def test_strings_stay_the_strings_they_are() -> None:
    odd = '{ "a":1e3,\n"big":123456789012345678901234567890}'
    conversation = chat({"role": "assistant", "content": "", "tool_calls": [call("f", odd)]}, tools='[ {"name": "f"} ]')
    assert conversation.messages[0].tool_calls[0].arguments == odd
    assert conversation.tools == '[ {"name": "f"} ]'


def test_fields_without_a_place_are_kept_as_metadata() -> None:
    conversation = chat({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0})
    assert conversation.metadata == {"message_fields": {"1": {"weight": 0}}}


def test_nulls_of_a_column_format_are_no_fields() -> None:
    plain = chat({"role": "user", "content": "a"})
    nulls = chat({"role": "user", "content": "a", "tool_calls": None, "name": None, "weight": None}, functions=None)
    assert nulls.messages == plain.messages
    assert nulls.metadata == {}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "robot", "content": "x"}, "message 1: unknown role 'robot'"),
        ({"content": "x"}, "message 1: unknown role None"),
        ({"role": ["user"], "content": "x"}, "message 1: unknown role"),
        ({"role": "user", "content": 5}, "message 1: the content is int"),
        ({"role": "user", "content": {"type": "text"}}, "message 1: the content is dict"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 1: content part 0 is 'image_url', not text"),
        ({"role": "user", "content": [{"type": "text"}]}, "message 1: content part 0 has no text"),
        ({"role": "user", "content": ["a", 7]}, "message 1: content part 1 is None, not text"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "message 1: audio is not text"),
        ({"role": "assistant", "tool_calls": "f()"}, "message 1: tool_calls is str"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "message 1: tool call 0 has no function"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": ""}}]}, "message 1: tool call 0 has no name"),
        ({"role": "tool", "tool_call_id": 7, "content": ""}, "message 1: tool_call_id is int"),
        ("Hi", "message 1: str, not an object"),
    ],
)
def test_what_openai_chat_cannot_read_is_named(message: Any, reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        chat({"role": "user", "content": "Hi"}, message)
    assert reason in str(caught.value)


# ShareGPT


def test_every_speaker_of_sharegpt() -> None:
    conversation = turns(
        ("human", "Hi"),
        ("gpt", "Hello"),
        ("function_call", '{"name": "f", "arguments": {"a": 1}}'),
        ("observation", "one"),
        ("tool_call", [{"name": "g", "arguments": '{"b": 2}'}, {"name": "h", "arguments": {}}]),
        ("tool", "two"),
        ("function_response", "three"),
        ("assistant", "Done"),
        system="Be kind.",
        tools='[{"name": "f"}]',
        id="s1",
    )
    assert [m.role for m in conversation.messages] == (
        ["system", "user", "assistant", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    )
    assert conversation.messages[3].tool_calls == (ToolCall(name="f", arguments='{"a":1}'),)
    assert [c.arguments for c in conversation.messages[5].tool_calls] == ['{"b": 2}', "{}"]
    assert conversation.tools == '[{"name": "f"}]'
    check(conversation)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (("martian", "Hi"), "message 1: unknown speaker 'martian'"),
        (("gpt", ["Hi"]), "message 1: value is list, not a text"),
        (("function_call", "f()"), "message 1: the tool call is not JSON"),
        (("function_call", '{"arguments": {}}'), "message 1: the tool call has no name"),
        (("function_call", "[3]"), "message 1: the tool call is int"),
    ],
)
def test_what_sharegpt_cannot_read_is_named(turn: tuple[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        turns(("human", "Hi"), turn)
    assert reason in str(caught.value)


def test_pictures_beside_the_messages_are_refused() -> None:
    with pytest.raises(BadRecord, match="comes with images"):
        turns(("human", "<image>What is it?"), images=["a.png"])


# tau-bench


def test_a_run_of_tau_bench() -> None:
    run = {
        "task_id": 4,
        "trial": 1,
        "reward": 1,
        "info": {"task": {"user_id": "u"}},
        "traj": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
    }
    conversation = detect.parse(run, "agent")
    assert conversation.reward == 1.0
    assert conversation.metadata == {"task_id": 4, "trial": 1, "info": {"task": {"user_id": "u"}}}
    with pytest.raises(BadRecord, match="the reward is str"):
        detect.parse({**run, "reward": "high"}, "agent")


def test_a_display_text_is_read_and_not_trained_on_where_its_calls_are_missing() -> None:
    shown = "user: a\nb\nassistant: None\ntool: {}\nassistant: c: d\n\nuser: bye"
    conversation = detect.parse({"messages_display": shown}, "agent")
    assert [(m.role, m.content) for m in conversation.messages] == [
        ("user", "a\nb"),
        ("assistant", ""),
        ("tool", "{}"),
        ("assistant", "c: d\n"),
        ("user", "bye"),
    ]
    check(conversation)
    assert drop_reason(conversation) == "calls_not_recorded"
    assert drop_reason(detect.parse({"messages_display": "user: a\nassistant: b"}, "agent")) is None
    with pytest.raises(BadRecord, match="does not start with"):
        detect.parse({"messages_display": "Hello\nuser: a"}, "agent")


def test_the_real_runs_of_tau_bench(real_data: Path) -> None:
    count, reasons = 0, set()
    for source in sources([real_data / "tau-bench"]):
        for item in read(source):
            if isinstance(item, Document):
                conversation = detect.parse(item.document, "agent")
                check(conversation)
                reasons.add(drop_reason(conversation))
                assert from_json(to_json(conversation)) == conversation
                count += 1
    assert count == 288
    assert reasons == {None, "calls_not_recorded"}


# All: every text once, in order


def texts_of(messages: Sequence[Message]) -> list[str]:
    return [t for m in messages for t in (m.content, *(x for c in m.tool_calls for x in (c.name, c.arguments))) if t]


@st.composite
def spoken(draw: st.DrawFn) -> Conversation:
    """A conversation of which every text is another one."""
    number = 0

    def text() -> str:
        nonlocal number
        number += 1
        return f"{number}:{draw(st.text(st.characters(exclude_categories=['Cs']), max_size=8))}|"

    messages = [Message(role="system", content=text())] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 5))):
        messages.append(Message(role="user", content=text()))
        if draw(st.booleans()):
            made = [ToolCall(name=text(), arguments=text(), id="same") for _ in range(draw(st.integers(1, 3)))]
            content = text() if draw(st.booleans()) else ""
            messages.append(Message(role="assistant", content=content, tool_calls=tuple(made)))
            messages += [Message(role="tool", content=text(), call_id="same") for _ in made]
        messages.append(Message(role="assistant", content=text()))
    return Conversation(id="x", dataset="agent", messages=messages, tools=orjson.dumps([text()]).decode())


@pytest.mark.parametrize("dialect", ["openai_chat", "sharegpt", "tau_bench"])
@given(conversation=spoken())
def test_every_text_once_and_in_order(dialect: str, conversation: Conversation) -> None:
    document = orjson.loads(orjson.dumps(write(conversation, dialect)))
    parsed = detect.parse(document, "agent")
    assert parsed.format == dialect
    assert texts_of(parsed.messages) == texts_of(conversation.messages)
    assert orjson.loads(parsed.tools) == orjson.loads(conversation.tools)
    if dialect != "sharegpt":
        assert parsed.messages == conversation.messages
    if parsed.messages:
        check(parsed)
    assert from_json(to_json(parsed)) == parsed


# Pairs and checks


def said(*names: str) -> list[Message]:
    """`aX` an assistant calling with id X (several: aXY), `rX` a result of id X, `u` the user."""
    out = []
    for name in names:
        if name == "u":
            out.append(Message(role="user", content="u"))
        elif name[0] == "a":
            made = [ToolCall(name="f", arguments="{}", id=i.strip("-")) for i in name[1:]]
            out.append(Message(role="assistant", tool_calls=made))
        else:
            out.append(Message(role="tool", content="r", call_id=name[1:].strip("-")))
    return out


@pytest.mark.parametrize(
    ("messages", "pairs"),
    [
        (["aX", "rX"], [(1, 0, 0)]),
        (["aXY", "rY", "rX"], [(1, 0, 1), (2, 0, 0)]),
        (["aX", "rX", "u", "aX", "rX"], [(1, 0, 0), (4, 3, 0)]),
        (["aX", "aX", "rX", "rX"], [(2, 1, 0), (3, 0, 0)]),
        (["a--", "r-", "r-"], [(1, 0, 0), (2, 0, 1)]),
        (["aX", "r-"], [(1, 0, 0)]),
        (["a-", "rX"], [(1, 0, 0)]),
        (["aX", "aY", "rX"], [(2, 0, 0)]),
        (["aXX", "rX", "rX"], [(1, 0, 0), (2, 0, 1)]),
    ],
)
def test_results_are_paired_by_position_then_id(messages: list[str], pairs: list[tuple[int, int, int]]) -> None:
    assert pair(said(*messages)) == [Pair(result=r, turn=t, call=c) for r, t, c in pairs]


@pytest.mark.parametrize("messages", [["rX"], ["u", "rX"], ["aX", "rY"], ["aX", "rX", "rX"], ["rX", "aX"]])
def test_a_result_without_a_call_is_a_fault(messages: list[str]) -> None:
    with pytest.raises(BadRecord, match=r"message \d: a tool result .*without a call"):
        pair(said(*messages))


def made(*messages: Message) -> Conversation:
    return Conversation(id="x", dataset="agent", messages=messages)


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (made(), "there are no messages"),
        (made(Message(role="user"), Message(role="assistant")), "no message has any text"),
        (made(Message(role="robot", content="x")), "message 0: unknown role 'robot'"),  # type: ignore[arg-type]
        (made(*said("rX")), "message 0: a tool result 'X' without a call"),
        (
            made(Message(role="tool", tool_calls=[ToolCall(name="f", arguments="")])),
            "message 0: a tool cannot call tools",
        ),
    ],
)
def test_faults_that_go_to_the_dead_letter_topic(conversation: Conversation, reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        check(conversation)
    assert reason in str(caught.value)


def test_reasons_to_drop() -> None:
    user = Message(role="user", content="Hi")
    assert drop_reason(made(user)) == "no_assistant_turn"
    assert drop_reason(made(user, Message(role="assistant", content=" \n"))) == "empty_assistant"
    assert drop_reason(made(user, *said("aX"))) is None
    assert drop_reason(made(Message(role="assistant", content="Hello"), user)) is None, "the assistant may speak first"
