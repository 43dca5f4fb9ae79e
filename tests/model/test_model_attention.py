"""Packed attention and vocabulary-parallel logprobs against slow references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from vagen.learner.model.attention import SegmentedSDPAttention, SegmentedSeqParams, SegmentPlan
from vagen.learner.model.logprobs import logprobs_and_entropy

HEADS, GROUPS, WIDTH = 4, 2, 8


def _reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    parts = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / WIDTH**0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), float("-inf"))
        parts.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "lengths", [[7] * 5, [3, 60, 5, 41, 1, 60, 2, 33, 90], [1], [200, 1, 17]], ids=["equal", "mixed", "one", "few"]
)
def test_segments_equal_a_loop(lengths: list[int]) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    config = TransformerConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS)
    config.attention_dropout = 0.0
    attention = SegmentedSDPAttention(config, 1, AttnMaskType.causal, "self")
    inputs = [torch.randn(total, heads, WIDTH, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    params = SegmentedSeqParams.build(bounds, torch.zeros(total, 1, 1, WIDTH), torch.zeros(0).long(), torch.float32)
    query, key, value = (x[:, None] for x in inputs)
    out = attention(query, key, value, None, packed_seq_params=params)
    expected = _reference(inputs[0], inputs[1], inputs[2], lengths)
    assert out.shape == (total, 1, HEADS * WIDTH)
    torch.testing.assert_close(out[:, 0], expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for got, want in zip(torch.autograd.grad((out[:, 0] * weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_plan_makes_few_calls_and_little_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 400, (500,), generator=generator).tolist()
    plan = SegmentPlan.build(lengths, torch.device("cpu"))
    assert plan.gather is not None and plan.scatter is not None
    assert len(plan.shapes) <= 20
    assert len(plan.gather) <= 1.1 * sum(lengths)
    assert torch.equal(plan.gather[plan.scatter], torch.arange(sum(lengths)))


def test_logprobs_and_entropy_equal_log_softmax() -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(9, 40)).requires_grad_()
    targets, forbidden = torch.randint(0, 30, (9,)), torch.tensor([31, 39])
    logprobs, entropy = logprobs_and_entropy(
        logits,
        targets,
        group=parallel_state.get_tensor_model_parallel_group(),
        temperature=0.7,
        forbidden_token_ids=forbidden,
    )
    allowed = [i for i in range(40) if i not in (31, 39)]
    reference = F.log_softmax(logits[:, allowed] / 0.7, -1)
    expected, expected_entropy = reference.gather(1, targets[:, None])[:, 0], -(reference.exp() * reference).sum(-1)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    weights = torch.randn(2, 9)
    (got,) = torch.autograd.grad((weights[0] * logprobs + 100 * weights[1] * entropy).sum(), logits)
    (want,) = torch.autograd.grad((weights[0] * expected + 100 * weights[1] * expected_entropy).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not got[:, [31, 39]].any()
