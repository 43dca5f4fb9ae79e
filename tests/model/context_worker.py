"""One rank of `test_model_context.py`, started by torchrun: `context_worker.py WORK`. Attends over its part of rows."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from vagen.learner.layout import ParallelLayout
from vagen.learner.model import parallel
from vagen.learner.model.batch import PackedBatch
from vagen.learner.model.context_attention import ContextSDPAttention, ContextSeqParams
from vagen.learner.model.context_shard import ContextShard

SIZES = (4, 2)


def attend(content: dict, dtype: torch.dtype, place: parallel.ParallelTopology) -> dict:
    """This rank's output and gradients, and the tokens they are of."""
    batch: PackedBatch = content["batches"][place.cp_size]
    query, key, value, weight = (x.to(dtype) for x in content["inputs"][place.cp_size])
    shard = ContextShard.build(batch, place.cp_size, place.cp_rank)
    config = TransformerConfig(num_layers=1, hidden_size=query[0].numel(), num_attention_heads=query.size(1))
    config.attention_dropout = 0.0
    attention = ContextSDPAttention(config, 1, AttnMaskType.causal, "self")
    mine = [x[shard.tokens].requires_grad_() for x in (query, key, value)]
    angles = torch.zeros(len(shard.tokens), 1, 1, query.size(-1))
    params = ContextSeqParams.of_shard(shard, batch.cu_seqlens, angles, dtype)
    output = attention(*(x[:, None] for x in mine), None, packed_seq_params=params)[:, 0]
    gradients = torch.autograd.grad((output * weight[shard.tokens]).sum(), mine)
    return {"tokens": shard.tokens, "output": output.detach(), "gradients": gradients}


def main(work: Path) -> None:
    torch.set_num_threads(1)
    content = torch.load(work / "content.pt", weights_only=False)
    for size in SIZES:
        with parallel.parallel_session(ParallelLayout(context=size), timeout_s=60) as place:
            result = {str(dtype): attend(content, dtype, place) for dtype in (torch.float32, torch.float64)}
            torch.save(result, work / f"cp{size}-rank{place.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
