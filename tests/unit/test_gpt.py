"""The reference model: packing must not leak, by hand-written comparison."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megaflow_stream.features.record import PackedSequence
from megaflow_stream.training.batch import MicroBatch, micro_batch
from megaflow_stream.training.gpt import GPT, GPTConfig, loss
from megaflow_stream.training.optimizers import BuildAdamW, WarmupConstant, WarmupCosine

torch.set_num_threads(1)
CONFIG = GPTConfig(vocabulary=50, layers=2, heads=2, width=16, hidden=24)


def model() -> GPT:
    torch.manual_seed(1)
    gpt = GPT(CONFIG)
    for p in gpt.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return gpt


def sequence(documents: list[list[int]]) -> PackedSequence:
    tokens = np.array([t for d in documents for t in d], dtype=np.uint16)
    return PackedSequence(
        tokens=tokens,
        loss_mask=np.ones(len(tokens), dtype=bool),
        lengths=np.array([len(d) for d in documents], dtype=np.int32),
        conversations=["c"] * len(documents),
        tokenizer="t",
    )


def logits(gpt: GPT, batch: MicroBatch) -> torch.Tensor:
    return gpt(batch.tokens, batch.sequence_ids, batch.positions)


def test_logits_of_a_packed_document_equal_those_of_the_same_document_alone() -> None:
    gpt = model()
    documents = [[1, 2, 3, 4], [7, 8], [9, 10, 11, 12, 13]]
    together = logits(gpt, micro_batch([sequence(documents)], rows=1, block_tokens=16))[0]
    start = 0
    for document in documents:
        alone = logits(gpt, micro_batch([sequence([document])], rows=1, block_tokens=len(document)))[0]
        torch.testing.assert_close(together[start : start + len(document)], alone)
        start += len(document)


def test_no_token_sees_a_later_one() -> None:
    gpt = model()
    a = logits(gpt, micro_batch([sequence([[1, 2, 3, 4]])], rows=1, block_tokens=4))
    b = logits(gpt, micro_batch([sequence([[1, 2, 3, 40]])], rows=1, block_tokens=4))
    torch.testing.assert_close(a[0, :3], b[0, :3])
    assert not torch.allclose(a[0, 3], b[0, 3])


def test_the_loss_is_the_sum_over_marked_targets() -> None:
    gpt = model()
    batch = micro_batch([sequence([[1, 2, 3], [4, 5]])], rows=2, block_tokens=8)
    total, tokens = loss(gpt, batch)
    all_logits = logits(gpt, batch)
    expected = F.cross_entropy(all_logits[batch.loss_mask], batch.targets[batch.loss_mask], reduction="sum")
    torch.testing.assert_close(total, expected)
    assert tokens == 3


def test_a_batch_without_a_trained_token_has_zero_loss_and_zero_gradients() -> None:
    gpt = model()
    total, tokens = loss(gpt, micro_batch([], rows=2, block_tokens=8))
    total.backward()
    assert (total.item(), tokens) == (0.0, 0)
    assert all(torch.isfinite(p.grad).all() and not p.grad.any() for p in gpt.parameters() if p.grad is not None)


def test_the_output_layer_is_the_embedding() -> None:
    names = [name for name, _ in model().named_parameters()]
    assert "embedding.weight" in names
    assert not any("head" in name for name in names)
    with pytest.raises(ValueError, match="multiple of heads"):
        GPTConfig(vocabulary=5, width=10, heads=4)


def test_schedules_rise_then_hold_or_fall() -> None:
    constant, cosine = WarmupConstant(warmup_steps=4), WarmupCosine(steps=20, warmup_steps=4, floor=0.1)
    assert [constant.factor(s) for s in (0, 3, 4, 1000)] == [0.25, 1.0, 1.0, 1.0]
    assert cosine.factor(0) == 0.25
    assert cosine.factor(4) == 1.0
    assert cosine.factor(12) == pytest.approx(0.55)
    assert cosine.factor(20) == cosine.factor(99) == pytest.approx(0.1)


def test_the_schedule_state_is_plain() -> None:
    optimizer = BuildAdamW(learning_rate=1e-3)(model().named_parameters())
    schedule = WarmupConstant()(optimizer)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert schedule.state_dict()["lr_lambdas"] == [None, None]
