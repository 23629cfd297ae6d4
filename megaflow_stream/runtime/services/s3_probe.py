"""Asks an S3 server for its buckets, and stores a byte, signed as any client signs (AWS Signature Version 4).

A client library would retry and keep connections; readiness needs one exchange and a plain answer. Source of the
signature: "Create a signed AWS API request", AWS IAM user guide.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
from datetime import UTC, datetime

from megaflow_stream.runtime.services.service import NotReady

REGION = "us-east-1"


def request(
    method: str,
    path: str,
    *,
    host: str,
    port: int,
    access_key: str,
    secret_key: str,
    body: bytes = b"",
    timeout_seconds: float = 2.0,
) -> bytes:
    """The body of an answer with status 2xx. `path` has no query and needs no quoting. Raises `NotReady`."""
    headers = _signed(method, path, f"{host}:{port}", access_key, secret_key, body, datetime.now(UTC))
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    if answer.status // 100 != 2:
        raise NotReady(f"{method} {path}: HTTP {answer.status} {content[:200].decode('utf-8', 'replace')}")
    return content


def _signed(
    method: str, path: str, host: str, access_key: str, secret_key: str, body: bytes, now: datetime
) -> dict[str, str]:
    moment, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    digest = hashlib.sha256(body).hexdigest()
    signed = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": moment}
    names = ";".join(signed)
    lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
    canonical = "\n".join([method, path, "", lines, names, digest])
    scope = f"{day}/{REGION}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret_key}".encode()
    for part in (day, REGION, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    return {
        **{name: value for name, value in signed.items() if name != "host"},
        "Authorization": (
            f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        ),
    }
