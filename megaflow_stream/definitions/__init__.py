"""What a project declares: topics, processors, trainers, evaluations, the pipeline. Frozen data, no I/O."""
