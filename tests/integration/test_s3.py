"""The object store on a real S3: conditions, races, lost answers, what an absent server says."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from megaflow_stream.errors import NotFound, ServiceUnreachable, SettingError
from megaflow_stream.storage.api import ObjectInfo, Precondition
from megaflow_stream.storage.s3 import S3Store

BUCKET = "test-storage"


async def opened(s3: Any, endpoint_url: str | None = None, **more: Any) -> S3Store:
    store = S3Store(
        endpoint_url=endpoint_url or s3.endpoint_url,
        bucket=more.pop("bucket", BUCKET),
        access_key=s3.access_key,
        secret_key=more.pop("secret_key", s3.secret_key),
        **more,
    )
    await store.open()
    return store


@pytest.fixture
async def store(s3: Any) -> AsyncIterator[S3Store]:
    store = await opened(s3)
    yield store
    await store.close()


@pytest.fixture
def key() -> str:
    return f"{secrets.token_hex(6)}/object"


class Proxy:
    """A TCP proxy before a server. `lose` answers are dropped with their connection, after the server gave them. While
    `cut`, the server sees the heads of requests, and their writers gone before a byte of the body."""

    def __init__(self, endpoint_url: str) -> None:
        parts = urlsplit(endpoint_url)
        self.host, self.port = parts.hostname, parts.port
        self.lose, self.lost, self.tasks = 0, 0, set[asyncio.Task[None]]()
        self.cut = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        there, back = await asyncio.open_connection(self.host, self.port)

        async def forward() -> None:
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    if self.cut and b" HTTP/1.1\r\n" not in data:
                        back.write_eof()
                        return
                    back.write(data)
                    await back.drain()
                back.write_eof()

        task = asyncio.create_task(forward())
        try:
            while data := await there.read(65536):
                if self.lose and b"100 Continue" not in data:
                    self.lose -= 1
                    self.lost += 1
                    break
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            task.cancel()
            writer.close()
            back.close()


@asynccontextmanager
async def proxied(s3: Any, **more: Any) -> AsyncIterator[tuple[S3Store, Proxy]]:
    proxy = Proxy(s3.endpoint_url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    store = await opened(s3, f"http://127.0.0.1:{port}", **more)
    try:
        yield store, proxy
    finally:
        await store.close()
        server.close()
        await asyncio.gather(*proxy.tasks)


async def test_an_object_is_written_read_listed_and_deleted(store: S3Store, key: str) -> None:
    written = await store.put(key, memoryview(b"0123456789")[2:8])
    data, info = await store.get(key)
    assert data == b"234567"
    assert (info.size_bytes, info.etag) == (6, written.etag)
    assert info.modified > 1e9
    assert await store.get_range(key, 1, 3) == b"345"
    assert await store.head(key) == info
    prefix = key.partition("/")[0]
    assert [found.key async for found in store.list(prefix)] == [key]
    await store.delete(key)
    await store.delete(key)
    assert await store.head(key) is None
    with pytest.raises(NotFound, match=key):
        await store.get(key)


async def test_more_objects_than_a_page_are_listed(store: S3Store, key: str) -> None:
    prefix = key.partition("/")[0]
    keys = [f"{prefix}/{i:05d}" for i in range(1100)]
    for first in range(0, len(keys), 50):
        await asyncio.gather(*(store.put(k, b"x") for k in keys[first : first + 50]))
    assert [found.key async for found in store.list(f"{prefix}/")] == keys


async def test_a_writer_that_dies_within_a_write_leaves_what_was_there(s3: Any, store: S3Store, key: str) -> None:
    first = await store.put(key, b"old")
    async with proxied(s3, retry_seconds=0.5) as (broken, proxy):
        proxy.cut = True
        with pytest.raises(ServiceUnreachable):
            await broken.put(key, b"new")
        with pytest.raises(ServiceUnreachable):
            await broken.put(key, b"new", if_match=first.etag)
    assert (await store.get(key))[0] == b"old"


async def test_conditions(store: S3Store, key: str) -> None:
    first = await store.put(key, b"a", if_none_match=True)
    with pytest.raises(Precondition, match=key):
        await store.put(key, b"b", if_none_match=True)
    second = await store.put(key, b"c", if_match=first.etag)
    with pytest.raises(Precondition):
        await store.put(key, b"d", if_match=first.etag)
    with pytest.raises(Precondition):
        await store.put(key + "-not-there", b"d", if_match=first.etag)
    assert (await store.get(key))[0] == b"c"
    assert second.etag != first.etag


@pytest.mark.parametrize("conditional", ["if_none_match", "if_match"])
async def test_of_twenty_racing_writers_one_wins(store: S3Store, key: str, conditional: str) -> None:
    condition: dict[str, Any] = {"if_none_match": True}
    if conditional == "if_match":
        condition = {"if_match": (await store.put(key, b"before")).etag}

    async def write(number: int) -> ObjectInfo | Precondition:
        try:
            return await store.put(key, b"writer %d" % number, **condition)
        except Precondition as lost:
            return lost

    results = await asyncio.gather(*(write(n) for n in range(20)))
    (winner,) = [n for n, result in enumerate(results) if isinstance(result, ObjectInfo)]
    assert (await store.get(key))[0] == b"writer %d" % winner


async def test_a_lost_answer_of_a_conditional_write_is_settled_by_reading(s3: Any, key: str) -> None:
    async with proxied(s3) as (store, proxy):
        proxy.lose = 1
        first = await store.put(key, b"a", if_none_match=True)
        assert proxy.lost == 1
        assert (await store.get(key))[0] == b"a"
        proxy.lose = 2
        second = await store.put(key, b"b", if_match=first.etag)
        assert proxy.lost == 3
        assert (await store.get(key)) == (b"b", await store.head(key))
        proxy.lose = 1
        with pytest.raises(Precondition):
            await store.put(key, b"c", if_match=first.etag)
        assert (await store.head(key)) is not None
        assert (await store.get(key))[1].etag == second.etag


async def test_reads_go_on_over_broken_connections(s3: Any, key: str) -> None:
    async with proxied(s3) as (store, proxy):
        await store.put(key, b"a")
        proxy.lose = 3
        assert (await store.get(key))[0] == b"a"
        assert proxy.lost == 3


async def test_a_server_that_does_not_answer_is_named(s3: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    store = S3Store(
        endpoint_url=f"http://127.0.0.1:{port}", bucket=BUCKET, access_key="a", secret_key="b", retry_seconds=0.5
    )
    with pytest.raises(ServiceUnreachable, match=str(port)) as raised:
        await store.open(timeout_seconds=0.5)
    assert raised.value.exit_code == 3
    assert "services status" in raised.value.hint


async def test_wrong_credentials_are_a_setting_error(s3: Any) -> None:
    with pytest.raises(SettingError, match="credentials"):
        await opened(s3, secret_key="wrong")


@pytest.mark.parametrize("given", [{}, {"access_key": "one"}, {"secret_key": "other"}])
async def test_missing_credentials_are_a_setting_error(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    """Told before anything listens there."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    store = S3Store(endpoint_url="http://127.0.0.1:9", bucket=BUCKET, **given)
    with pytest.raises(SettingError) as caught:
        await store.open()
    assert "set s3.access_key and s3.secret_key" in caught.value.hint


async def test_a_missing_bucket_is_made_also_by_two_at_once(s3: Any) -> None:
    bucket = f"test-{secrets.token_hex(4)}"
    stores = await asyncio.gather(opened(s3, bucket=bucket), opened(s3, bucket=bucket))
    for store in stores:
        assert [info async for info in store.list("")] == []
        await store.close()
