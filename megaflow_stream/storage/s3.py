"""`ObjectStore` on S3 and what speaks its protocol, by one aioboto3 client that is kept open.

A call is tried again, with backoff, for `retry_seconds`: refused and broken connections, timeouts, 429 and 5xx. A
conditional write whose answer was lost is the delicate one: its second try (also one that aiohttp makes by itself, on a
kept connection that broke) meets its own first with 412. So a 412 is settled by reading: the very same bytes count as
written. Writers that must not be taken for each other put a random number into what they write (`checkpoint.head`).

Objects are at most 16 MiB here, so each is one PUT. Its SHA-256 is part of the request's signature: the server refuses
what was damaged on the way.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import aioboto3
import stamina
from aiohttp import ClientError as HttpError
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError, ParamValidationError

from megaflow_stream.errors import MegaflowError, NotFound, ServiceUnreachable, SettingError
from megaflow_stream.storage.api import ObjectInfo, Precondition

T = TypeVar("T")

MISSING = {"404", "NoSuchKey", "NoSuchBucket", "NotFound"}
CONFLICT = {"412", "PreconditionFailed"}
AGAIN = {
    "BadDigest",  # damaged on the way
    "RequestTimeout",
    "RequestTimeTooSkewed",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "OperationAborted",
    "ConditionalRequestConflict",
}
DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403"}


class _NoAnswer(Exception):
    """A try that ended without an answer of the store, or with one that asks to try again."""


class S3Store:
    """One bucket. Belongs to the event loop that opened it.

    endpoint_url: None for AWS itself. Addresses are path-style: bucket names need no DNS.
    access_key, secret_key: empty for boto's own chain (environment, profile, role).
    retry_seconds: how long a call is tried before `ServiceUnreachable`.
    """

    def __init__(
        self,
        *,
        endpoint_url: str | None,
        bucket: str,
        access_key: str = "",
        secret_key: str = "",
        region: str = "us-east-1",
        retry_seconds: float = 30.0,
    ) -> None:
        self.endpoint_url, self.bucket, self.retry_seconds = endpoint_url, bucket, retry_seconds
        self._session = aioboto3.Session(
            aws_access_key_id=access_key or None, aws_secret_access_key=secret_key or None, region_name=region
        )
        self._region, self._half_given = region, bool(access_key) != bool(secret_key)
        self._stack = AsyncExitStack()
        self._client: Any = None

    async def open(self, *, timeout_seconds: float = 10.0) -> None:
        """Connects and makes the bucket where it is missing. Raises `ServiceUnreachable` after the timeout,
        `SettingError` where there are no credentials."""
        if self._half_given:
            raise self._without_credentials("one of its two keys is missing")
        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=30,
            max_pool_connections=32,
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client = self._session.client("s3", endpoint_url=self.endpoint_url, config=config)
        self._client = await self._stack.enter_async_context(client)
        try:
            try:
                await self._call(
                    "find the bucket", lambda: self._client.head_bucket(Bucket=self.bucket), "", timeout_seconds
                )
            except NotFound:
                await self._call("make the bucket", self._make_bucket, "", timeout_seconds)
        except BaseException:
            await self.close()
            raise

    async def _make_bucket(self) -> None:
        where = {} if self._region == "us-east-1" else {"LocationConstraint": self._region}
        try:
            await self._client.create_bucket(
                Bucket=self.bucket, **({"CreateBucketConfiguration": where} if where else {})
            )
        except ClientError as error:
            if _code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    async def put(
        self, key: str, data: bytes | memoryview, *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectInfo:
        """Writes an object whole; see `ObjectStore.put`. A view is copied once, for as long as the call lasts."""
        body = bytes(data)
        condition: dict[str, str] = {}
        if if_none_match:
            condition = {"IfNoneMatch": "*"}
        elif if_match is not None:
            condition = {"IfMatch": f'"{if_match}"'}
        # A server may keep what a writer that died had sent so far, even nothing, unless it knows what is to come.
        checksum = base64.b64encode(zlib.crc32(body).to_bytes(4)).decode()

        async def once() -> ObjectInfo:
            answer = await self._client.put_object(
                Bucket=self.bucket, Key=key, Body=body, ChecksumCRC32=checksum, **condition
            )
            return ObjectInfo(key, len(body), _etag(answer))

        try:
            return await self._call("write", once, key)
        except (Precondition, NotFound) as error:
            # If-Match over a missing object is answered with 404: that too is a condition that did not hold.
            if not condition:
                raise
            try:
                there, info = await self.get(key)
            except NotFound:
                there = None
            if there == body:
                return info
            raise Precondition("somebody else wrote the object first", bucket=self.bucket, key=key) from error

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """An object's bytes. Raises `NotFound`."""

        async def once() -> tuple[bytes, ObjectInfo]:
            answer = await self._client.get_object(Bucket=self.bucket, Key=key)
            async with answer["Body"] as stream:
                data: bytes = await stream.read()
            return data, _info(key, answer, len(data))

        return await self._call("read", once, key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from byte `start`; fewer where the object ends before."""

        async def once() -> bytes:
            answer = await self._client.get_object(
                Bucket=self.bucket, Key=key, Range=f"bytes={start}-{start + length - 1}"
            )
            async with answer["Body"] as stream:
                data: bytes = await stream.read()
            return data

        return await self._call("read a range", once, key)

    async def head(self, key: str) -> ObjectInfo | None:
        """What is known of an object without its bytes; None where it is not there."""

        async def once() -> ObjectInfo:
            answer = await self._client.head_object(Bucket=self.bucket, Key=key)
            return _info(key, answer, int(answer["ContentLength"]))

        try:
            return await self._call("look up", once, key)
        except NotFound:
            return None

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object whose key begins with `prefix`, by key."""
        token: str | None = None
        while True:
            more = {"ContinuationToken": token} if token else {}

            async def once(more: dict[str, str] = more) -> Any:
                return await self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **more)

            page = await self._call("list", once, prefix)
            for item in page.get("Contents", ()):
                yield ObjectInfo(
                    item["Key"],
                    int(item["Size"]),
                    item.get("ETag", "").strip('"'),
                    item["LastModified"].timestamp(),
                )
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return

    async def delete(self, key: str) -> None:
        """Deletes an object; one that is not there is none."""

        async def once() -> None:
            await self._client.delete_object(Bucket=self.bucket, Key=key)

        try:
            await self._call("delete", once, key)
        except NotFound:
            return

    async def close(self) -> None:
        """Closes the connections. May be called twice."""
        await self._stack.aclose()
        self._client = None

    async def _call(
        self, doing: str, once: Callable[[], Awaitable[T]], key: str, timeout_seconds: float | None = None
    ) -> T:
        """Runs one request until it has an answer, or `ServiceUnreachable`."""
        if self._client is None:
            raise MegaflowError("the object store is not open", bucket=self.bucket)
        where: dict[str, Any] = {"bucket": self.bucket, "key": key or None}
        limit = self.retry_seconds if timeout_seconds is None else timeout_seconds
        try:
            async for attempt in stamina.retry_context(
                on=_NoAnswer, attempts=None, timeout=limit, wait_initial=0.1, wait_max=2.0, wait_jitter=0.2
            ):
                with attempt:
                    return await self._try(once)
        except _NoAnswer as error:
            raise ServiceUnreachable(
                f"could not {doing}: S3 at {self.endpoint_url or 'AWS'} does not answer: {error}",
                hint="check that it runs (`megaflow services status`) and that s3.endpoint_url is right",
                **where,
            ) from error.__cause__
        except ClientError as error:
            code = _code(error)
            if code in MISSING:
                raise NotFound(f"could not {doing}: there is no such object", **where) from error
            if code in CONFLICT:
                raise Precondition(f"could not {doing}: the condition does not hold", **where) from error
            if code in DENIED:
                raise SettingError(
                    f"could not {doing}: S3 refused the credentials: {code}",
                    hint="check s3.access_key, s3.secret_key and the bucket's policy",
                    **where,
                ) from error
            raise MegaflowError(f"could not {doing}: {error}", **where) from error
        except ParamValidationError as error:
            raise SettingError(f"could not {doing}: {error}", **where) from error
        except NoCredentialsError as error:
            raise self._without_credentials("no credentials are given, nor found where AWS looks for them") from error
        raise AssertionError("retry_context ended without a result")

    def _without_credentials(self, why: str) -> SettingError:
        return SettingError(
            f"S3 at {self.endpoint_url or 'AWS'} cannot be called: {why}",
            hint="set s3.access_key and s3.secret_key, or MEGAFLOW_S3__ACCESS_KEY and MEGAFLOW_S3__SECRET_KEY",
            bucket=self.bucket,
        )

    async def _try(self, once: Callable[[], Awaitable[T]]) -> T:
        """One request; `_NoAnswer` for every failure after which another try makes sense."""
        try:
            return await once()
        except ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if _code(error) in AGAIN or status in (408, 409, 429) or status >= 500:
                raise _NoAnswer(str(error)) from error
            raise
        except (ParamValidationError, NoCredentialsError):
            raise
        except (HTTPClientError, BotoCoreError, HttpError, OSError) as error:
            raise _NoAnswer(f"{type(error).__name__}: {error}") from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _etag(answer: Any) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _info(key: str, answer: Any, size_bytes: int) -> ObjectInfo:
    modified = answer.get("LastModified")
    return ObjectInfo(key, size_bytes, _etag(answer), modified.timestamp() if modified else 0.0)
