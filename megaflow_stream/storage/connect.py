"""From settings to a store."""

from __future__ import annotations

from megaflow_stream.storage.api import ObjectStore


async def connect(
    *, endpoint_url: str | None, bucket: str, access_key: str = "", secret_key: str = "", region: str = "us-east-1"
) -> ObjectStore:
    """A store on an S3 bucket, which is made where it is missing. Raises `ServiceUnreachable`."""
    from megaflow_stream.storage.s3 import S3Store

    store = S3Store(
        endpoint_url=endpoint_url, bucket=bucket, access_key=access_key, secret_key=secret_key, region=region
    )
    await store.open()
    return store
