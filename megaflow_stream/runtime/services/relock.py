"""Writes `kafka.lock` anew: `python -m megaflow_stream.runtime.services.relock`, for whoever raises the version.

Resolves the coordinates below with everything they need at run time (jgo, in Python), downloads, and records the
SHA-256 of what came. Read the difference before it is committed: this is the one place where a hash is believed.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

KAFKA = "org.apache.kafka:kafka_2.13:4.3.1"
# Kafka's own jar depends on no logging backend: without one the broker writes not a line.
LOGGING = "org.slf4j:slf4j-simple:1.7.36"


def main() -> None:
    from jgo.maven import Dependency, MavenContext, PythonResolver

    with tempfile.TemporaryDirectory() as folder:
        maven = MavenContext(resolver=PythonResolver(), repo_cache=Path(folder), local_repos=[])
        wanted = []
        for coordinate in (KAFKA, LOGGING):
            group, artifact, version = coordinate.split(":")
            wanted.append(maven.project(group, artifact).at_version(version).artifact())
        _, nodes = maven.resolver.get_dependency_list([Dependency(artifact) for artifact in wanted])
        artifacts = {str(a.component): a for a in wanted}
        artifacts |= {
            str(node.dep.artifact.component): node.dep.artifact
            for node in sorted(nodes, key=lambda node: str(node.dep.artifact.component))
            if node.dep.scope not in ("test", "provided")
        }
        jars = {
            f"{a.groupId}:{a.artifactId}:{a.version}": hashlib.sha256(a.resolve().read_bytes()).hexdigest()
            for a in artifacts.values()
        }
    text = json.dumps({"kafka": KAFKA, "jars": jars}, indent=1)
    Path(__file__).with_name("kafka.lock").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
