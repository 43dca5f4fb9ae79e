"""The learner's model: policy and critic over one trunk, transformers' vision tower in front of megatron's decoder.

Owns the forward pass from packed rows to logprobs, entropies and values, and loading and saving as a transformers model
directory. Does not own the update (see `optimizer.py`), training checkpoints (see `checkpoint_io.py`) or losses.

The value of the state before token j and the distribution of token j come from one hidden state, that of token j - 1;
the output projection runs at scored positions only, so prompts cost nothing there.

Of several pipeline stages the first has the vision tower and the embedding, the last the output projection and the
value head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from transformers import AutoConfig

from vagen.common.errors import CheckpointError, TrajectoryError
from vagen.common.model_types import require_unquantised
from vagen.common.vocabulary import read_model_json
from vagen.common.weight_transfer import LowRankUpdate
from vagen.learner.frozen_weights import FrozenWeights
from vagen.learner.model.attention import SegmentedSeqParams
from vagen.learner.model.batch import PackedBatch, TokenOutputs
from vagen.learner.model.collectives import from_stage, gather_over_stages, last_stage
from vagen.learner.model.context_attention import ContextSeqParams
from vagen.learner.model.context_shard import ContextShard, divided
from vagen.learner.model.cpu_compat import compute_device
from vagen.learner.model.deepstack import DeepstackSeqParams
from vagen.learner.model.families import family_of
from vagen.learner.model.files import (
    MAX_SHARD_BYTES,
    atomic_directory,
    copy_companions,
    read_weights,
    set_dtype,
    write_weights,
)
from vagen.learner.model.gpt import ModelOptions, build_gpt
from vagen.learner.model.image_encoder import ImageEncoder
from vagen.learner.model.logprobs import logprobs_and_entropy
from vagen.learner.model.lora import AdapterOptions, save_adapter, start_adapters
from vagen.learner.model.spec import uses_transformer_engine
from vagen.learner.model.value_head import ValueHead, save_value_head
from vagen.learner.model.weights import adapter_tensors, hf_tensors, layer_adapters, load_decoder

__all__ = ["VisionLanguageActorCritic"]


class VisionLanguageActorCritic(MegatronModule):
    """Actor and critic, this rank's part of them. `visual` is None for text-only families and behind the first stage,
    `value_head` before the last stage. Build with `load_hf`."""

    def __init__(self, hf_config: Any, options: ModelOptions, source_dir: Path) -> None:
        self.family = family_of(hf_config.model_type)
        language_model = build_gpt(self.family, hf_config, options)
        super().__init__(config=language_model.config)
        self.hf_config, self.source_dir = hf_config, source_dir
        self.tied = bool(hf_config.tie_word_embeddings)
        self.language_model = language_model
        # Megatron's schedule and its reduction of gradients read these.
        self.model_type = language_model.model_type
        self.pre_process, self.post_process = language_model.pre_process, language_model.post_process
        self.share_embeddings_and_output_weights = self.tied
        self.options = options
        self.visual: nn.Module | None = None
        self.image_encoder: ImageEncoder | None = None
        if self.family.vision is not None and self.pre_process:
            self.visual = self.family.vision(hf_config)
            self.visual.to(options.dtype)
            for name, parameter in self.visual.named_parameters():
                parameter.requires_grad_(not self._is_frozen_vision(name))
            width = (1 + self.family.num_deepstack(hf_config)) * self.config.hidden_size
            self.image_encoder = ImageEncoder(
                self.visual, image_token_id=hf_config.image_token_id, width=width, config=self.config
            )
        self.value_head = ValueHead(self.config.hidden_size, options) if self.post_process else None
        self._rules = self.family.rules(self.family.text_config(hf_config), self.tied)
        self.adapter, self.base_model = options.adapter, str(source_dir)
        self._transformer_engine = options.adapter is None and uses_transformer_engine(
            post_norms=self.family.post_norms
        )
        if options.adapter is not None:
            start_adapters(self, language_model, [] if self.value_head is None else [self.value_head])

    def _is_frozen_vision(self, name: str) -> bool:
        """Whether a tensor of the vision module stays as it was loaded."""
        part = "projector" if name.partition(".")[0] in self.family.projector else "tower"
        return self.options.freeze_vision in (True, part)

    def _is_frozen(self, name: str) -> bool:
        """Whether a tensor of this HF name stays as it was loaded, on whatever stage it is. With adapters all do."""
        vision_name = self.family.vision_name(name)
        return self.adapter is not None or (vision_name is not None and self._is_frozen_vision(vision_name))

    # Forward ---------------------------------------------------------------------------------------------------------

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        forbidden_token_ids: Tensor | None = None,
        detach_value: bool = False,
        values_only: bool = False,
    ) -> TokenOutputs | Tensor:
        """Score `batch.score_positions`; a stage that is not the last returns its hidden states, [T, 1, hidden_size].

        Logprobs and entropy are those of softmax(logits / temperature) without `forbidden_token_ids` (int64; what the
        engine never samples, such as image placeholders). With `detach_value` the critic's loss does not reach the
        trunk. With `values_only` logprobs and entropy are not computed, and empty. Raises TrajectoryError for a batch
        that contradicts itself or scores a forbidden token.
        """
        batch.check()
        targets = batch.token_ids[batch.score_positions]
        if forbidden_token_ids is not None:
            forbidden_token_ids = forbidden_token_ids.to(targets.device)
        if forbidden_token_ids is not None and bool(torch.isin(targets, forbidden_token_ids).any()):
            raise TrajectoryError("score_positions", "a scored token is one that the policy can never sample")
        batch, shard = divided(batch, self.config)
        if shard is not None:
            targets = targets[shard.scored]
        hidden = self._hidden_states(batch, shard)
        head = self.value_head
        if head is None:
            return hidden
        # A rank without scored tokens has a row all the same.
        hidden = hidden[: len(targets)]
        critic_input = hidden.detach() if detach_value else hidden
        values, value_logits = head.values(critic_input)
        if values_only:
            nothing = values.new_empty(0)
            outputs = TokenOutputs(logprobs=nothing, entropy=nothing, values=values, value_logits=value_logits)
            return outputs if shard is None else shard.gathered(outputs, values_only=True)
        gpt = self.language_model
        weight = gpt.shared_embedding_or_output_weight() if self.tied else None
        logits, _ = gpt.output_layer(hidden[:, None], weight=weight)
        logprobs, entropy = logprobs_and_entropy(
            logits[:, 0],
            targets,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=temperature,
            forbidden_token_ids=forbidden_token_ids,
        )
        outputs = TokenOutputs(logprobs=logprobs, entropy=entropy, values=values, value_logits=value_logits)
        return outputs if shard is None else shard.gathered(outputs, values_only=False)

    def _hidden_states(self, batch: PackedBatch, shard: ContextShard | None) -> Tensor:
        """Hidden states behind the final norm of the tokens before the scored ones, [N, hidden_size]; behind the last
        layer of a stage that is not the last those of all tokens, [T, 1, hidden_size]. With `shard` of its tokens."""
        gpt = self.language_model
        embeddings: Tensor | None = None
        image_rows: Tensor | None = None
        deepstack: Tensor | None = None
        if self.pre_process:
            token_ids = batch.token_ids if shard is None else batch.token_ids[shard.tokens]
            embeddings = gpt.embedding(input_ids=token_ids[None], position_ids=None)
            embeddings, image_rows, deepstack = self._with_images(embeddings, batch, shard)
            if self.config.sequence_parallel:
                embeddings = scatter_to_sequence_parallel_region(embeddings)
                image_rows, deepstack = _of_this_shard(image_rows, deepstack, len(embeddings))
        positions, rows = batch.position_ids, batch.score_positions - 1
        if shard is not None:
            rows = shard.rows
            # megatron takes each rank's part of the angles itself where Transformer Engine's layers rotate.
            positions = positions if self._transformer_engine else positions[:, shard.tokens]
        angles = gpt.rotary_pos_emb(positions[:, None], gpt.mrope_section)
        if self._transformer_engine:
            longest, bounds = int(batch.cu_seqlens.diff().max()), batch.cu_seqlens
            padded = None if shard is None else bounds
            params = DeepstackSeqParams("thd", bounds, bounds, padded, padded, longest, longest, image_rows=image_rows)
            hidden = gpt.decoder(embeddings, None, context=deepstack, rotary_pos_emb=angles, packed_seq_params=params)
            return self._gathered(hidden)[rows, 0] if self.post_process else hidden
        if shard is None:
            segments = SegmentedSeqParams.build(batch.cu_seqlens, angles, rows, self.config.params_dtype, image_rows)
        else:
            segments = ContextSeqParams.of_shard(shard, batch.cu_seqlens, angles, self.config.params_dtype, image_rows)
        hidden = gpt.decoder(embeddings, None, context=deepstack, packed_seq_params=segments)
        if not self.post_process:
            return hidden
        return self._gathered(hidden)[rows, 0] if self.config.sequence_parallel else hidden[:, 0]

    def _gathered(self, hidden: Tensor) -> Tensor:
        """Hidden states of all tokens, of which sequence parallelism leaves each rank a part."""
        if not self.config.sequence_parallel:
            return hidden
        # What follows gives every rank the whole gradient.
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)

    def filler(self, forbidden_token_ids: Tensor | None = None) -> PackedBatch:
        """The least that can be scored, for a rank that goes through the layers only because others do."""
        banned = set() if forbidden_token_ids is None else set(forbidden_token_ids.tolist())
        banned.add(getattr(self.hf_config, "image_token_id", None))
        token_id = next(number for number in itertools.count() if number not in banned)
        return PackedBatch(
            token_ids=torch.tensor([token_id, token_id]),
            position_ids=torch.arange(2).expand(3, 2),
            cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
            score_positions=torch.tensor([1]),
        )

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Give the decoder what the stage before sent; megatron's schedule calls this."""
        self.language_model.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """This stage's copy of a tied embedding, whose gradients megatron sums over both stages that have one."""
        weight: Tensor | None = self.language_model.shared_embedding_or_output_weight()
        return weight

    def _with_images(
        self, embeddings: Tensor, batch: PackedBatch, shard: ContextShard | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[T, 1, hidden_size] with image features at the placeholders; the placeholders int64 [M]; and the features
        [K, M, hidden_size] that the first K layers add there, where the family has any. With `shard` of its tokens."""
        if self.image_encoder is None:
            if batch.images is not None:
                raise TrajectoryError("images", f"model_type {self.family.model_type!r} reads no images")
            return embeddings, None, None
        return self.image_encoder.place(embeddings, batch, shard)

    # Weights ---------------------------------------------------------------------------------------------------------

    @classmethod
    def load_hf(cls, model_dir: str | Path, options: ModelOptions | None = None) -> VisionLanguageActorCritic:
        """Model of a transformers directory (config.json, safetensors under hub or transformers 5 names), on this
        rank's device; the value head from `value_head.safetensors` where there is one of the same kind, else zero.

        Raises ConfigError for an unsupported model, CheckpointError for weights that do not fit it.
        """
        source = Path(model_dir)
        # Before transformers reads it, which has a sentence of its own for model types that it does not know.
        content = read_model_json(source / "config.json")
        family_of(str(content.get("model_type")))
        require_unquantised(content, source / "config.json")
        model = cls(AutoConfig.from_pretrained(source), options or ModelOptions(), source)
        family, text_config = model.family, model.family.text_config(model.hf_config)
        state = {family.hf_name(name): tensor for name, tensor in read_weights(source).items()}
        state = {name: family.from_disk(text_config, name, tensor) for name, tensor in state.items()}
        load_decoder(model.language_model, model._rules, state)
        try:
            if model.visual is not None:
                named = [(family.vision_name(name), tensor) for name, tensor in state.items()]
                model.visual.load_state_dict({name: tensor for name, tensor in named if name is not None})
            if model.value_head is not None:
                model.value_head.load_from(source)
        except RuntimeError as error:
            raise CheckpointError(f"{source}: {error}") from error
        return model.to(compute_device())

    def _named_tensors(
        self, wanted: Callable[[str], bool] = lambda name: True, *, merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor) of vision tower, then decoder, adapters `merged` or left out, of names that are
        `wanted`; collective over the ranks of a copy of the model."""
        vision = {} if self.visual is None else self.visual.state_dict()
        for name in gather_over_stages(list(vision))[0]:
            if wanted(f"{self.family.vision_prefix}{name}"):
                yield f"{self.family.vision_prefix}{name}", from_stage(vision.get(name), 0)
        rules = [rule for rule in self._rules if all(map(wanted, rule.hf))]
        yield from hf_tensors(self.language_model, rules, merged=merged)

    @torch.no_grad()
    def copy_policy(self, source: VisionLanguageActorCritic) -> None:
        """Take over the weights of a model of the same shape, but for the value head.

        Collective as `export_hf_state`.
        """
        load_decoder(self.language_model, self._rules, dict(hf_tensors(source.language_model, source._rules)))
        if self.visual is not None and source.visual is not None:
            self.visual.load_state_dict(source.visual.state_dict())

    def export_hf_state(self) -> dict[str, Tensor]:
        """Copies of all tensors under the names of transformers' `state_dict()`; a tied `lm_head.weight` is listed.

        Collective over the ranks of a copy of the model; every one of them gets the whole.
        """
        state = {name: tensor.detach().clone() for name, tensor in self._named_tensors()}
        if self.tied:
            state["lm_head.weight"] = state[f"{self.family.text_prefix}embed_tokens.weight"]
        return state

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """What `frozen_weights` leaves to each publish, one after the other and not copied: they change with the next
        optimizer step. Without adapters tensors as in `engine_named_tensors`, else factors of low-rank updates.

        Collective over the ranks of a copy of the model, each of which must iterate to the end.
        """
        if self.adapter is None:
            for name, tensor in self._named_tensors(lambda name: not self._is_frozen(name)):
                yield self.family.engine_name(name), tensor.detach()
            return
        for names, a, parts in layer_adapters(self.language_model, self._rules):
            update = self._low_rank_update(names, self.adapter)
            yield update.a, a
            yield update.b, torch.cat(list(parts))

    def frozen_weights(self) -> FrozenWeights:
        """What training leaves as it was loaded, under the engines' names and not copied, and how it is updated.

        Collective over the ranks of a copy of the model, after a checkpoint is loaded.
        """
        named = self._named_tensors(self._is_frozen, merged=False)
        tensors = [(self.family.engine_name(name), tensor.detach()) for name, tensor in named]
        if self.adapter is None:
            return FrozenWeights(tensors)
        layers = layer_adapters(self.language_model, self._rules)
        return FrozenWeights(tensors, [self._low_rank_update(names, self.adapter) for names, _, _ in layers])

    def _low_rank_update(self, names: Sequence[str], options: AdapterOptions) -> LowRankUpdate:
        weights = tuple(self.family.engine_name(name) for name in names)
        layer = weights[0].removesuffix(".weight")
        return LowRankUpdate(weights=weights, a=f"{layer}.lora_A", b=f"{layer}.lora_B", scale=options.scale)

    def engine_named_tensors(self, *, include_tied_head: bool = False) -> list[tuple[str, Tensor]]:
        """Contiguous copies for a broadcast under the engines' names, in a fixed order: `visual.*`, `model.*`, then
        `lm_head.weight`.

        A tied head is the embedding itself in SGLang (one parameter, listed once), so it is left out unless
        `include_tied_head`. Collective over the ranks of a copy of the model; every one of them gets the whole.
        """
        named = self._copies(self.family.engine_name)
        if self.tied and include_tied_head:
            named.append(("lm_head.weight", dict(named)["model.embed_tokens.weight"].clone()))
        return named

    def _copies(self, rename: Callable[[str], str]) -> list[tuple[str, Tensor]]:
        return [
            (rename(name), tensor.detach().clone(memory_format=torch.contiguous_format))
            for name, tensor in self._named_tensors()
        ]

    def save_hf(self, model_dir: str | Path) -> None:
        """Write a complete model directory that `load_hf`, transformers and SGLang read; it appears atomically.

        Adapters are merged into its weights; its folder `adapter` has them apart, as PEFT reads them.

        Everything but weights is copied from the directory the model was loaded from. Collective over all ranks.
        Raises CheckpointError where `model_dir` exists.
        """
        with atomic_directory(Path(model_dir)) as target:
            self.write_hf(target)

    def write_hf(self, target: Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None) -> None:
        """`save_hf` into a directory that is there already. Collective over all ranks.

        Policy weights are written as `dtype`, by default their own, and config.json names it; of more than
        `max_shard_bytes` in several files.
        """
        state = {name: tensor.to("cpu", dtype) for name, tensor in self._copies(self.family.disk_name)}
        low_rank = {name: x.clone().cpu() for name, x in adapter_tensors(self.language_model, self._rules)}
        head = self.value_head_state()
        if torch.distributed.get_rank() == 0:
            copy_companions(self.source_dir, target)
            set_dtype(target / "config.json", dtype or self.config.params_dtype)
            write_weights(state, target, max_shard_bytes or MAX_SHARD_BYTES)
            save_value_head(head, target, self.options)
            if self.adapter is not None:
                layers = f"{self.family.text_prefix}layers."
                save_adapter(target / "adapter", low_rank, self.adapter, self.base_model, layers)

    def value_head_state(self) -> dict[str, Tensor]:
        """Weights of the value head, on the CPU. Collective as `export_hf_state`."""
        state = {} if self.value_head is None else self.value_head.state_dict()
        return {name: from_stage(state.get(name), last_stage()).detach().cpu() for name in ("weight", "bias")}


def _of_this_shard(
    image_rows: Tensor | None, deepstack: Tensor | None, num_rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Image placeholders among the `num_rows` tokens that sequence parallelism leaves this rank, counted from the first
    of them, and their features [K, M, hidden_size]."""
    if image_rows is None or deepstack is None:
        return image_rows, deepstack
    rows = image_rows - parallel_state.get_tensor_model_parallel_rank() * num_rows
    mine = ((rows >= 0) & (rows < num_rows)).nonzero()[:, 0]
    return rows[mine], copy_to_tensor_model_parallel_region(deepstack).index_select(1, mine)
