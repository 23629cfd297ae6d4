"""Reading files: by content, in order, with the place of what is wrong."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from megaflow_stream.conversations import bytestream, detect, jsontext
from megaflow_stream.conversations.files import BadInput, Document, Passed, Source, read, scan, sources
from megaflow_stream.errors import UsageError

ONE, TWO, THREE = ({"n": n, "text": 'é\u2028\n{["\\' + str(n)} for n in (1, 2, 3))


Item = Document | BadInput | Passed


def items(data: bytes, tmp_path: Path, name: str = "file") -> list[Item]:
    path = tmp_path / name
    path.write_bytes(data)
    (source,) = sources([path])
    return list(read(source))


def found(items: list[Item]) -> list[dict[str, Any]]:
    return [item.document for item in items if isinstance(item, Document)]


def bad(items: list[Item]) -> list[tuple[int, str]]:
    return [(item.line, item.reason) for item in items if isinstance(item, BadInput)]


def dumps(*documents: object, option: int = 0) -> bytes:
    return b"\n".join(orjson.dumps(d, option=option) for d in documents)


PRETTY = orjson.OPT_INDENT_2
TEXTS = {
    "JSON Lines": dumps(ONE, TWO, THREE),
    "JSON Lines, a last line break": dumps(ONE, TWO, THREE) + b"\n",
    "JSON Lines of Windows, with blank lines": dumps(ONE, TWO, THREE).replace(b"\n", b"\r\n\r\n"),
    "an array": orjson.dumps([ONE, TWO, THREE]),
    "an array on many lines": orjson.dumps([ONE, TWO, THREE], option=PRETTY),
    "objects on many lines": dumps(ONE, TWO, THREE, option=PRETTY),
    "objects without a space between": dumps(ONE, TWO, THREE, option=PRETTY).replace(b"}\n{", b"}{"),
    "arrays on lines": dumps([ONE, TWO], [], [THREE]),
    "with a byte order mark": b"\xef\xbb\xbf" + dumps(ONE, TWO, THREE),
    "with space before": b" \n\t\n" + orjson.dumps([ONE, TWO, THREE]),
}


def twice(data: bytes) -> bytes:
    return gzip.compress(zstandard.compress(data))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress, twice])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_a_file_holds_is_told_by_its_content(text: bytes, pack: Any, tmp_path: Path) -> None:
    read_items = items(pack(text), tmp_path, "misleading.parquet")
    assert found(read_items) == [ONE, TWO, THREE]
    for item in read_items:
        assert isinstance(item, Document)
        assert orjson.loads(item.raw) == item.document
        assert b"\n" not in item.raw, "one line a record, for kcat"


def test_lines_keep_their_bytes(tmp_path: Path) -> None:
    line = b'{ "big" : 123456789012345678901234567890, "x":1e3 }'
    (item,) = items(line, tmp_path)
    assert isinstance(item, Document)
    assert item.raw == line
    (item,) = items(b"[\n  " + line.replace(b", ", b",\n") + b"]", tmp_path)
    assert isinstance(item, Document)
    assert item.raw == line.replace(b" ", b""), "white space goes, numbers keep their spelling"


@pytest.mark.parametrize("block", [1, 3, 7, 64])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_blocks_of_any_size(text: bytes, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "SNIFF_BYTES", 16)
    blocks = iter([text[at : at + block] for at in range(0, len(text), block)])
    assert [orjson.loads(item.raw) for item in jsontext.texts(blocks)] == [ONE, TWO, THREE]


texts = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(st.dictionaries(texts, texts)), st.integers(1, 50), st.booleans())
def test_any_array_in_any_blocks(documents: list[dict[str, str]], block: int, pretty: bool) -> None:
    text = orjson.dumps(documents, option=PRETTY if pretty else 0)
    blocks = iter([text[at : at + block] for at in range(0, len(text), block)])
    assert [orjson.loads(item.raw) for item in jsontext.texts(blocks)] == documents


def test_a_large_array_is_read_piece_by_piece(tmp_path: Path) -> None:
    documents = [{"n": n, "text": "x" * 1000} for n in range(5000)]
    assert found(items(orjson.dumps(documents, option=PRETTY), tmp_path)) == documents


def test_bad_lines_have_their_numbers_and_the_good_ones_are_read(tmp_path: Path) -> None:
    text = b"\n".join([dumps(ONE), b"", b'{"n": 2, "te', b"17", b'{"a":"\xff"}', dumps(THREE), b'{"s":"\\ud800"}'])
    read_items = items(text, tmp_path)
    assert found(read_items) == [ONE, THREE]
    assert [line for line, _ in bad(read_items)] == [3, 4, 5, 7]
    assert bad(read_items)[1][1] == "a conversation is a JSON object, this is a number"
    assert all("not JSON" in bad(read_items)[at][1] for at in (0, 2, 3))
    assert next(item.raw for item in read_items if isinstance(item, BadInput)) == b'{"n": 2, "te'


def test_a_bad_first_line_does_not_hide_the_rest(tmp_path: Path) -> None:
    for first in (b'{"n": 1, "te', b"# a comment", b'{"n": 1,'):
        read_items = items(first + b"\n" + dumps(TWO, THREE), tmp_path)
        assert found(read_items) == [TWO, THREE]
        assert [line for line, _ in bad(read_items)] == [1]


def test_elements_of_an_array_have_line_and_number(tmp_path: Path) -> None:
    read_items = items(b'[{"n":1},\n"two",\n\n{"n":\n3}, 4]', tmp_path)
    assert [(item.line, item.element) for item in read_items if not isinstance(item, Passed)] == [
        (1, 1),
        (2, 2),
        (4, 3),
        (5, 4),
    ]
    assert found(read_items) == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (b'[{"n":1},\n{"n":2}', 2, "the array has no end"),
        (b'[{"n":1}\n{"n":2}]', 2, "a comma or the array's end is missing"),
        (b'[{"n":1},\n{"n":,}]', 2, "Expecting value on line 2"),
        (b'[{"n":1},\n{"n":\n2', 2, "on line 3"),
        (b'[{"n":1}]\nand so on', 2, "Expecting value"),
        (b'{\n"n": 1,\n"m"\n}', 1, "on line 4"),
    ],
)
def test_where_an_array_breaks_the_place_is_said(text: bytes, line: int, reason: str, tmp_path: Path) -> None:
    read_items = items(text, tmp_path)
    assert [where for where, _ in bad(read_items)] == [line]
    assert reason in bad(read_items)[0][1]
    assert {"n": 1} in found(read_items) or not text.startswith(b"[")


def test_deep_nesting_is_refused_not_a_crash(tmp_path: Path) -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    assert len(bad(items(deep, tmp_path))) == 1
    assert len(bad(items(b"[\n" + deep + b"\n]", tmp_path))) == 1


def test_a_line_beyond_all_limits_is_one_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsontext, "DOCUMENT_BYTES", 3000)
    monkeypatch.setattr(jsontext, "SNIFF_BYTES", 256)
    monkeypatch.setattr(bytestream, "BLOCK_BYTES", 512)
    read_items = items(dumps(ONE, {"x": "y" * 9000}, TWO), tmp_path)
    assert found(read_items) == [ONE, TWO]
    assert bad(read_items) == [(2, "a line of more than 0 MiB")]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (gzip.compress(dumps(ONE) * 50, mtime=0)[:-20], "the gzip data ends early"),
        (zstandard.compress(dumps(ONE) * 50)[:-9], "the zstd data ends early"),
        (b"\x28\xb5\x2f\xfd" + b"nonsense" * 9, "damaged zstd data"),
        (b"\x1f\x8b" + b"nonsense" * 9, "damaged gzip data"),
        ('{"n":1}'.encode("utf-16"), "UTF-16"),
        (b"PAR1 and nothing more", "the Parquet file cannot be read"),
        (b"just some text\n", "neither JSON, JSON Lines nor Parquet"),
        (b"\x89PNG\r\n\x1a\n\x00", "neither JSON, JSON Lines nor Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_bad_record(data: bytes, reason: str, tmp_path: Path) -> None:
    ((_, said),) = bad(items(data, tmp_path))
    assert reason in said


def test_an_incomplete_file_gives_what_it_has(tmp_path: Path) -> None:
    lines = dumps(*({"n": n, "r": str(n) * 99} for n in range(2000)))
    read_items = items(gzip.compress(lines, mtime=0)[:-30], tmp_path)
    assert len(found(read_items)) > 1000
    assert "ends early" in bad(read_items)[-1][1]


def test_gzip_and_zstd_files_put_one_after_another(tmp_path: Path) -> None:
    for pack in (gzip.compress, zstandard.compress):
        assert found(items(pack(dumps(ONE) + b"\n") + pack(dumps(TWO)), tmp_path)) == [ONE, TWO]
    assert found(items(gzip.compress(dumps(ONE)) + b"\0" * 1000, tmp_path)) == [ONE]


def test_rows_of_parquet(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "name": "A"}]
    rows = [
        {"id": "a", "messages": messages, "tools": '[{"name": "f"}]', "score": None},
        {"id": "b", "messages": messages[:1], "tools": None, "score": 0.5},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows")
    (source,) = sources([tmp_path / "rows"])
    read_items = list(read(source))
    assert [item.line for item in read_items if isinstance(item, Document)] == [1, 2]
    first, second = (detect.parse(document, "agent") for document in found(read_items))
    assert first.messages == detect.parse({"messages": messages}, "agent").messages
    assert first.tools == '[{"name": "f"}]'
    assert second.metadata == {"score": 0.5}


def test_columns_of_parquet_that_hold_json_text(tmp_path: Path) -> None:
    said = '[{"from": "human", "value": "Hi"}]'
    pq.write_table(pa.table({"conversations": [said, "[broken"], "tools": ["[]", "[]"]}), tmp_path / "rows")
    data = (tmp_path / "rows").read_bytes()
    read_items = items(gzip.compress(data, mtime=0), tmp_path)
    assert found(read_items) == [{"conversations": orjson.loads(said), "tools": "[]"}]
    assert bad(read_items)[0][0] == 2


def test_standard_input(tmp_path: Path) -> None:
    (source,) = sources(["-"])
    assert source.name == "<stdin>"
    for data in (dumps(ONE), gzip.compress(dumps(ONE)), orjson.dumps([ONE])):
        assert found(list(read(source, stdin=io.BytesIO(data)))) == [ONE]


def test_folders_are_read_in_order_and_only_what_is_json(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, data in {
        "b/2.txt": dumps(TWO),
        "a": orjson.dumps([ONE]),
        "c.json": dumps(THREE),
        "LICENSE": b"You may.\n",
        ".hidden/x.json": b"{}",
        "b/.y.json": b"{}",
        "empty.jsonl": b"",
    }.items():
        (tmp_path / name).write_bytes(data)
    by_name = {Path(s.name).name: list(read(s)) for s in sources([tmp_path])}
    assert list(by_name) == ["LICENSE", "a", "c.json", "empty.jsonl", "2.txt"]
    assert [document for read_items in by_name.values() for document in found(read_items)] == [ONE, THREE, TWO]
    (passed,) = by_name["LICENSE"]
    assert isinstance(passed, Passed)
    assert by_name["empty.jsonl"] == []
    (named,) = read(sources([tmp_path / "LICENSE"])[0])
    assert isinstance(named, BadInput), "named by the user, it is a bad input"


def test_globs_and_paths_that_mean_nothing(tmp_path: Path) -> None:
    for name in ("a1.json", "a2.json", "b.json", "a[1].json"):
        (tmp_path / name).write_bytes(dumps(ONE))
    assert [Path(s.name).name for s in sources([tmp_path / "a?.json"])] == ["a1.json", "a2.json"]
    assert [Path(s.name).name for s in sources([tmp_path / "a[1].json"])] == ["a[1].json"], "a name before a pattern"
    for wrong in ("none.json", "x*.json"):
        with pytest.raises(UsageError, match="there is no file"):
            sources([tmp_path / wrong])


def test_a_file_that_went_away_is_a_bad_record(tmp_path: Path) -> None:
    ((_, reason),) = bad(list(read(Source(name="gone", path=tmp_path / "gone"))))
    assert "cannot be read" in reason


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(dumps(ONE, TWO)))
    seen: list[int] = []
    (source,) = sources([path])
    list(scan(source, seen.append))
    assert sum(seen) == source.size_bytes == path.stat().st_size
