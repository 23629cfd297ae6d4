"""From the conversations as they came to packed sequences of tokens.

conversations.raw --clean--> conversations.clean --features--> features.<dataset> and features.<dataset>.validation
"""

from pathlib import Path

from megaflow_stream.config.load import datasets
from megaflow_stream.definitions.processor import Backlog, Deduplicate, Processor, Sink
from megaflow_stream.features import record
from megaflow_stream.processing.steps import clean as cleaning
from megaflow_stream.processing.steps import features as packing

clean = Processor(
    name="clean",
    source="conversations.raw",
    headers=cleaning.HEADERS,
    build=cleaning.Clean(output="conversations.clean"),
    sinks=[
        Sink(
            topic="conversations.clean",
            partition="key",
            headers={"content-type": "application/json", "schema": "megaflow.conversation/1"},
        )
    ],
    backlog=Backlog(
        topic="conversations.clean", group="megaflow.process.features", high_bytes=64 << 20, low_bytes=16 << 20
    ),
)

packed = {"content-type": record.CONTENT_TYPE, "schema": record.SCHEMA}
features = Processor(
    name="features",
    source="conversations.clean",
    headers=packing.HEADERS,
    build=packing.Features(
        tokenizer=Path(__file__).parent / "tokenizer.json",
        block_tokens=512,
        datasets=datasets(Path(__file__).parents[1]),
        validation_share=0.05,
    ),
    sinks=[
        Sink(topic="features.{dataset}", headers=packed),
        Sink(topic="features.{dataset}.validation", headers=packed),
    ],
    state=Deduplicate(changelog="state.features"),
    linger_seconds=1.0,
    backlog=Backlog(
        topic="features.agent", group="megaflow.train.model_finetune", high_bytes=64 << 20, low_bytes=16 << 20
    ),
)
