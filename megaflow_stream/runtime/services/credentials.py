"""User names and passwords of a project's embedded services: made once, in a file that only its owner reads."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from megaflow_stream.errors import MegaflowError

FILE = "credentials.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """kafka_password "" means that the broker asks for none."""

    kafka_username: str
    kafka_password: str
    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        return f"Credentials(kafka_username={self.kafka_username!r}, access_key={self.access_key!r}, ...)"


def load_or_make(state_dir: Path, *, authenticate: bool) -> Credentials:
    """The project's credentials; the caller holds the project's services lock.

    authenticate: whether a broker whose credentials are made now asks for them. Those made earlier stay.
    """
    path = state_dir / FILE
    if found := load(state_dir):
        return found
    made = Credentials(
        kafka_username="megaflow",
        kafka_password=secrets.token_urlsafe(24) if authenticate else "",
        access_key=secrets.token_hex(10),
        secret_key=secrets.token_urlsafe(30),
    )
    write_private(path, json.dumps(asdict(made), indent=1) + "\n")
    return made


def load(state_dir: Path) -> Credentials | None:
    """None where none were made yet."""
    path = state_dir / FILE
    try:
        return Credentials(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise MegaflowError(
            "the credentials of the embedded services cannot be read",
            hint="`megaflow services down`, delete the file, `megaflow services up`: new ones are made",
            file=str(path),
        ) from error


def write_private(path: Path, text: str) -> None:
    """Writes a file whole or not at all, mode 0600 from its first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
