"""Publishing files: each conversation verbatim, under its id; what is bad is said."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import orjson
import pytest

from megaflow_stream.bus.partitioner import partition_of
from megaflow_stream.errors import NotFound, SettingError, UsageError
from megaflow_stream.publishing import ledger
from megaflow_stream.publishing.publish import publish
from megaflow_stream.testing import MemoryCluster
from tests.integration.publish_case import Place, lines, made, write


async def test_records_are_the_documents_verbatim_under_their_ids(place: Place, tmp_path: Path) -> None:
    spaced = b'{ "id": "own", "messages": [ {"role": "user", "content": "Hi"} ], "n": 1e2 }'
    nameless = b'{"conversations":[{"from":"human","value":"Hi"}]}'
    (tmp_path / "a").write_bytes(spaced + b"\n" + nameless)
    report = await place.publish(tmp_path / "a", dataset="d", producer="p")
    assert (report.published, report.rejected, report.bytes) == (2, 0, len(spaced) + len(nameless))
    assert report.by_format == {"openai_chat": 1, "sharegpt": 1}
    by_value = {record.value: record for record in await place.records()}
    assert set(by_value) == {spaced, nameless}
    assert by_value[spaced].key == b"own"
    assert len(by_value[nameless].key or b"") == 32
    for record in by_value.values():
        assert record.partition == partition_of(record.key or b"", 4)
        headers = dict(record.headers)
        trace = headers.pop("traceparent").split(b"-")
        assert [len(part) for part in trace] == [2, 32, 16, 2]
        assert headers == {
            "content-type": b"application/json",
            "schema": b"megaflow.raw/1",
            "dataset": b"d",
            "producer": b"p",
            "format": b"openai_chat" if record.value == spaced else b"sharegpt",
        }


async def test_the_same_id_with_other_content_is_kept_and_counted(place: Place, tmp_path: Path) -> None:
    one, two, three = made(3)
    path = write(tmp_path / "a", [one, {**two, "id": one["id"]}, three, one])
    report = await place.publish(path)
    assert (report.published, report.same_id_other_content) == (4, 1)
    assert sorted(record.key or b"" for record in await place.records()).count(one["id"].encode()) == 3


async def test_bad_records_have_file_line_and_reason(place: Place, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "LICENSE").write_text("You may.")
    good, other = made(2)
    (tmp_path / "in" / "a").write_bytes(lines([good, {"a": 1}]) + b'{"x\n' + lines([[1], other]))
    rejects = tmp_path / "rejects.jsonl"
    report = await place.publish(tmp_path / "in", rejects=rejects)
    assert (report.published, report.rejected, report.exit_code) == (2, 3, 1)
    assert report.passed_files == [str(tmp_path / "in" / "LICENSE")]
    written = [orjson.loads(line) for line in rejects.read_bytes().splitlines()]
    assert [reject["line"] for reject in written] == [2, 3, 4]
    assert [reject["raw"] for reject in written] == ['{"a":1}', '{"x', "[1]"]
    assert all(reject["file"] == str(tmp_path / "in" / "a") and reject["reason"] for reject in written)
    assert str(report.first_rejects[0]).startswith(f"{tmp_path / 'in' / 'a'}:2: no known format")
    assert (await place.publish(tmp_path / "in", skip_bad=True)).exit_code == 0


async def test_a_record_larger_than_the_topic_takes_is_a_reject(place: Place, tmp_path: Path) -> None:
    await place.bus.alter_topic(place.topic, {"max.message.bytes": "20000"})
    sizes = [19_000, 30_000, 10]
    path = write(tmp_path / "a", [{"messages": [{"role": "user", "content": "x" * size}]} for size in sizes])
    report = await place.publish(path)
    assert (report.published, report.rejected) == (2, 1)
    assert "the topic takes 20000" in report.first_rejects[0].reason


async def test_a_dry_run_sends_nothing(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(lines(made(5)) + b"{\n")
    for bus in (place.bus, None):
        report = await publish(bus, [path], topic=place.topic, dry_run=True)
        assert (report.published, report.rejected, report.exit_code) == (5, 1, 1)
    assert not await place.records()


async def test_wrong_use(place: Place, tmp_path: Path) -> None:
    path = write(tmp_path / "a", made(1))
    with pytest.raises(UsageError, match="there is no file"):
        await place.publish(tmp_path / "b")
    with pytest.raises(SettingError, match="there is no format"):
        await place.publish(path, format="alpaca")
    with pytest.raises(UsageError, match="overwrite the input"):
        await place.publish(path, rejects=path)
    with pytest.raises(NotFound) as caught:
        await publish(place.bus, [path], topic=f"none-{os.urandom(4).hex()}")
    assert caught.value.hint
    assert not await place.records()


async def test_progress_sees_the_report_grow(tmp_path: Path) -> None:
    cluster = MemoryCluster({"raw": 4, ledger.TOPIC: 1})
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(lines(made(2500))))
    seen: list[tuple[int, int]] = []
    report = await publish(
        cluster.bus(), [path], topic="raw", progress=lambda r: seen.append((r.read_bytes, r.published))
    )
    assert len(seen) == 5
    assert seen[-1] == (report.total_bytes, 2500)
    assert seen == sorted(seen)


async def test_everything_of_tau_bench(place: Place, real_data: Path) -> None:
    await place.bus.alter_topic(place.topic, {"max.message.bytes": str(8 << 20)})
    report = await place.publish(real_data / "tau-bench")
    assert (report.published, report.rejected, report.by_format) == (288, 0, {"tau_bench": 288})
    assert len(await place.records()) == 288
    assert (await place.publish(real_data / "tau-bench")).published == 0
