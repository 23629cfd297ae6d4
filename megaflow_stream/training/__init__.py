"""Training: a plan of global batches over Kafka, ranks that train it to the bit, checkpoints of what was trained.

Read in this order: `plan` (what a step trains), `planlog` (where that is written down), `loader` (who reads it),
`exchange` (how ranks agree), `loop` (a rank's life), `checkpointing` and `restore`, `launcher` (a node's ranks).
"""
