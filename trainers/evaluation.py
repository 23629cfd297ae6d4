"""The evaluator of `model_finetune`: each checkpoint's loss on the held-out split; the best is promoted."""

from megaflow_stream.definitions.trainer import Evaluation

evaluation = Evaluation(name="evaluation", trainer="model_finetune")
