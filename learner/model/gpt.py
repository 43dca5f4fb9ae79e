"""Builds megatron's GPTModel from a transformers config: the one place that constructs megatron modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from vagen.common.errors import ConfigError
from vagen.learner.layout import ParallelLayout
from vagen.learner.model.collectives import is_first_stage, is_last_stage, num_stages
from vagen.learner.model.cpu_compat import cuda_as_cpu
from vagen.learner.model.families.base import ModelFamily, refuse_unsupported, rotary_base
from vagen.learner.model.lora import AdapterOptions, adapt_layers
from vagen.learner.model.rotary import InterleavedRotaryEmbedding, PartialRotaryEmbedding
from vagen.learner.model.spec import decoder_layer_spec, decoder_spec, uses_transformer_engine

__all__ = ["ModelOptions", "build_gpt", "transformer_config"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How the model is held and run. `bf16` keeps fp32 master weights in the optimizer; `recompute` trades one more
    forward of each decoder layer for its activations; `freeze_vision` keeps as loaded the blocks of the vision module
    ("tower"), what projects their output into the decoder ("projector"), or both (True). With `adapter` low-rank
    updates of the decoder and the value head are all that is trained. `value_bins` makes the critic categorical, with
    so many bins over `value_range`; None: one scalar. `sequence_parallel` leaves a part of the tokens of norms and
    residuals on each tensor-parallel rank."""

    bf16: bool = False
    recompute: bool = False
    sequence_parallel: bool = False
    freeze_vision: bool | Literal["tower", "projector"] = False
    adapter: AdapterOptions | None = None
    value_bins: int | None = None
    value_range: tuple[float, float] = (-3.0, 3.0)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def num_value_outputs(self) -> int:
        return self.value_bins or 1


def transformer_config(family: ModelFamily, text_config: Any, options: ModelOptions) -> TransformerConfig:
    """Megatron's config of an HF text config. Raises ConfigError for what cannot be represented or sharded."""
    refuse_unsupported(text_config)
    tp, stages = parallel_state.get_tensor_model_parallel_world_size(), num_stages()
    experts = int(parallel_state.get_expert_model_parallel_world_size())
    context = int(parallel_state.get_context_parallel_world_size())
    layout = ParallelLayout(tensor=tp, pipeline=stages, context=context, expert=experts)
    layout.require_model(text_config.to_dict(), "config.json", sequence_parallel=options.sequence_parallel)
    peculiar = family.transformer_options(text_config)
    cuda = torch.cuda.is_available()
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=text_config.num_hidden_layers,
        hidden_size=text_config.hidden_size,
        ffn_hidden_size=text_config.intermediate_size,
        num_attention_heads=text_config.num_attention_heads,
        num_query_groups=text_config.num_key_value_heads,
        kv_channels=head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=text_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        mrope_section=family.mrope_section(text_config),
        tensor_model_parallel_size=tp,
        sequence_parallel=options.sequence_parallel and tp > 1,
        pipeline_model_parallel_size=stages,
        context_parallel_size=context,
        pipeline_dtype=options.dtype,
        # Packs differ in length.
        variable_seq_lengths=stages > 1,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=int(parallel_state.get_expert_tensor_parallel_world_size()),
        moe_token_dispatcher_type="alltoall",
        params_dtype=options.dtype,
        bf16=options.bf16,
        # Weights come from a file. Turning initialisation off would also leave out the attributes by which megatron
        # tells shards from replicas, and make the gradient norm wrong under tensor parallelism.
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        # The sum over data-parallel ranks is what losses are defined on.
        calculate_per_token_loss=True,
        use_cpu_initialization=not cuda,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        **peculiar,
        **(recompute if options.recompute else {}),
    )
    if experts == 1:
        # megatron forbids it for packs that differ in length, which they do not over tensor-parallel ranks.
        config.moe_token_dispatcher_type = "allgather"
    return config


def build_gpt(family: ModelFamily, hf_config: Any, options: ModelOptions) -> GPTModel:
    """A GPTModel of this rank's shards of its stage, with uninitialised weights, on the CPU or on this rank's GPU.

    `hf_config` is the top-level config: a vision-language model states there whether input and output embeddings
    are tied.
    """
    text_config = family.text_config(hf_config)
    config = transformer_config(family, text_config, options)
    deepstack = family.num_deepstack(hf_config)
    per_stage = config.num_layers // num_stages()
    if deepstack >= config.num_layers or (num_stages() > 1 and deepstack > per_stage):
        raise ConfigError(
            f"config.json: {deepstack} deepstack_visual_indexes for {config.num_layers} decoder layers in "
            f"{num_stages()} PP stages; the first stage must hold all layers that add inner vision features"
        )
    engine = options.adapter is None and uses_transformer_engine(post_norms=family.post_norms)
    spec = decoder_layer_spec(config, transformer_engine=engine, deepstack=deepstack > 0, post_norms=family.post_norms)
    if options.adapter is not None:
        if family.post_norms:
            raise ConfigError(f"lora: not available for model_type {family.model_type!r}")
        adapt_layers(spec, options.adapter, config)
    if config.sequence_parallel and family.post_norms:
        raise ConfigError(
            "$.learner.sequence_parallel: not available with norms behind attention and MLP (config.json)"
        )
    with cuda_as_cpu():
        gpt = GPTModel(
            config,
            decoder_spec(config, spec, transformer_engine=engine),
            vocab_size=text_config.vocab_size,
            max_sequence_length=text_config.max_position_embeddings,
            position_embedding_type="mrope",
            rotary_base=rotary_base(text_config),
            pre_process=is_first_stage(),
            post_process=is_last_stage(),
            parallel_output=True,
            # Image features come before the tokens are shared out, scored rows after they are gathered.
            scatter_embedding_sequence_parallel=False,
            share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        )
    if config.sequence_parallel and gpt.post_process:
        gpt.output_layer.sequence_parallel, gpt.output_layer.allreduce_dgrad = False, True
    if family.interleaved_mrope:
        gpt.rotary_pos_emb = InterleavedRotaryEmbedding(config.kv_channels, 1.0, rotary_base=rotary_base(text_config))
    rotary_dim = family.rotary_dim(text_config)
    if rotary_dim is not None:
        assert config.kv_channels is not None
        gpt.rotary_pos_emb = PartialRotaryEmbedding(rotary_dim, config.kv_channels, rotary_base(text_config))
    # It would cut positions as if they were one row; its caller gives those that a rank needs.
    gpt.rotary_pos_emb.cp_group = None
    # torch's norms ignore params_dtype, and megatron's distributed optimizer confuses the tensors of a parameter group
    # that holds two dtypes.
    return gpt.to(options.dtype)


def _leave_uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
