"""`vagen sft`: make the small model and its tokenizer from nothing, and warm it up on scripted episodes.

Owns the composition: an environment's script plays, the recipe's harness and the actor's recorder lay out rows exactly
as in reinforcement learning, and the learner imitates them. Deterministic for a seed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from vagen.actor.client import Generation
from vagen.actor.config import EnvSection, HarnessConfig
from vagen.actor.harness import make_harness
from vagen.actor.harness.base import Harness
from vagen.actor.messages import Response, observation_message
from vagen.actor.recorder import Recorder
from vagen.actor.rendering import ChatRenderer
from vagen.common.config import RunConfig, section
from vagen.common.errors import ConfigError
from vagen.common.trajectory import Row
from vagen.envs.base import ParsedResponse
from vagen.envs.registry import make_core
from vagen.envs.scripted import ScriptableCore, ScriptedEpisode, scripted_episodes
from vagen.learner.batching import RowPreparer
from vagen.learner.config import LearnerConfig, ModelConfig, SFTConfig
from vagen.learner.model.actor_critic import VisionLanguageActorCritic
from vagen.learner.model.parallel import parallel_session
from vagen.learner.model.tiny import Channels, save_tiny_model
from vagen.learner.sft import SFTData, SFTProgress, train_sft
from vagen.tools.tiny_tokenizer import CHAT_TEMPLATE, train_tokenizer

logger = logging.getLogger(__name__)

_FIRST_SEED = 1_000_000_000
"""Scripts play other seeds than actors do."""
_SEEDS_PER_RUN = 10_000_000


def run_sft(recipe: Mapping[str, Any], out_dir: Path, on_step: Callable[[SFTProgress], None]) -> dict[str, float]:
    """Write a warm model directory to `out_dir` and return its statistics (also in `sft.json` there).

    Raises `ConfigError` for a recipe that cannot be scripted, or when `out_dir` exists.
    """
    run, config = section(recipe, "run", RunConfig), section(recipe, "sft", SFTConfig)
    if out_dir.exists():
        raise ConfigError(f"{out_dir}: exists already; remove it or choose another --out")
    started = time.perf_counter()
    torch.set_num_threads(config.num_threads)
    cold = out_dir.with_name(f".{out_dir.name}.cold")
    shutil.rmtree(cold, ignore_errors=True)
    env = section(recipe, "env", EnvSection)
    core = _scriptable(env)
    episodes = _episodes(core, run.seed, config)
    _make_model(section(recipe, "model", ModelConfig), run.seed, core, episodes, cold)
    harness = make_harness(section(recipe, "harness", HarnessConfig))
    discount = section(recipe, "learner", LearnerConfig).advantage.turn_discount
    losses: list[float] = []

    def record(progress: SFTProgress) -> None:
        losses.append(progress.loss)
        on_step(progress)

    with parallel_session(seed=run.seed + 1):
        model = VisionLanguageActorCritic.load_hf(cold)
        renderer, preparer = ChatRenderer.load(cold), RowPreparer.load(cold)
        data = asyncio.run(_lay_out(episodes, core.system_prompt(), harness, renderer, preparer, discount))
        train_sft(
            *(model, data, config),
            seed=run.seed,
            forbidden_token_ids=preparer.forbidden_token_ids,
            on_step=record,
        )
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        model.save_hf(out_dir)
    shutil.rmtree(cold)
    stats = {
        "rows": float(len(data.rows)),
        "policy_tokens": float(len(data.returns)),
        "script_success": float(np.mean([episode.success for episode in episodes])),
        "parameters": float(sum(parameter.numel() for parameter in model.parameters())),
        "final_loss": float(np.mean(losses[-20:])),
        "seconds": time.perf_counter() - started,
    }
    (out_dir / "sft.json").write_text(json.dumps(stats, indent=2) + "\n")
    return stats


async def script_rows(recipe: Mapping[str, Any], model_dir: Path) -> list[Row]:
    """The rows of the recipe's scripted episodes; the cold model whose tokenizer wrote them is left in `model_dir`."""
    run, config = section(recipe, "run", RunConfig), section(recipe, "sft", SFTConfig)
    core = _scriptable(section(recipe, "env", EnvSection))
    episodes = _episodes(core, run.seed, config)
    _make_model(section(recipe, "model", ModelConfig), run.seed, core, episodes, model_dir)
    harness, renderer = make_harness(section(recipe, "harness", HarnessConfig)), ChatRenderer.load(model_dir)
    system_prompt = core.system_prompt()
    recorders = [await _record(episode, system_prompt, harness, renderer) for episode in episodes]
    return [row for recorder in recorders for row in recorder.rows()]


def _scriptable(env: EnvSection) -> ScriptableCore:
    core = make_core(env.name, env.config)
    if not hasattr(core, "expert_actions"):
        raise ConfigError(f"$.env.name: expected an environment with a script, got {env.name!r}")
    return cast(ScriptableCore, core)


def _episodes(core: ScriptableCore, seed: int, config: SFTConfig) -> list[ScriptedEpisode]:
    """Whole episodes of at least `config.turns` turns."""
    first = _FIRST_SEED + seed * _SEEDS_PER_RUN
    episodes: list[ScriptedEpisode] = []
    turns = 0
    played = scripted_episodes(
        core, range(first, first + _SEEDS_PER_RUN), script_seed=seed, expert_probability=config.expert_probability
    )
    for episode in played:
        episodes.append(episode)
        turns += len(episode.turns)
        if turns >= config.turns:
            break
    return episodes


def _make_model(
    config: ModelConfig, seed: int, core: ScriptableCore, episodes: list[ScriptedEpisode], model_dir: Path
) -> None:
    """Random weights and a tokenizer trained on everything that is said in the environment.

    The model is a text model where the environment shows no pictures.
    """
    shape = core.response_format
    tags = [tag for name in (*shape.sections, "answer") for tag in (f"<{name}>", f"</{name}>")]
    tags = list(dict.fromkeys(tags))
    said = [turn.response for episode in episodes for turn in episode.turns]
    seen = [turn.observation.text.replace("<image>", "") for episode in episodes for turn in episode.turns]
    roles = [f"{role}\n" for role in ("system", "user", "assistant")]
    for tag in tags:
        said = [text.replace(tag, " ") for text in said]
    corpus = [*roles * 20, core.system_prompt(), *sorted(set(seen)) * 20, *sorted(set(said)) * 20]
    tokenizer = train_tokenizer(corpus, tags, config.vocab_size)
    statistics = _pixel_statistics(episodes)
    save_tiny_model(
        config,
        tokenizer,
        model_dir,
        chat_template=CHAT_TEMPLATE,
        seed=seed,
        sees_pictures=statistics is not None,
        pixel_statistics=statistics,
    )


def _pixel_statistics(episodes: list[ScriptedEpisode]) -> tuple[Channels, Channels] | None:
    """Mean and standard deviation of the pictures, per channel in [0, 1].

    CLIP's, which are those of photographs, would leave drawings of little contrast to small differences of large
    inputs.
    """
    pictures = [image for episode in episodes for turn in episode.turns for image in turn.observation.images]
    if not pictures:
        return None
    pixels = np.concatenate([np.asarray(picture).reshape(-1, 3) for picture in pictures]) / 255.0
    red, green, blue = zip(pixels.mean(axis=0).round(4).tolist(), pixels.std(axis=0).round(4).tolist(), strict=True)
    return (red[0], green[0], blue[0]), (red[1], green[1], blue[1])


async def _lay_out(
    episodes: list[ScriptedEpisode],
    system_prompt: str,
    harness: Harness,
    renderer: ChatRenderer,
    preparer: RowPreparer,
    discount: float,
) -> SFTData:
    store = preparer.new_store()
    rows, returns = [], []
    num_slots = 0
    for episode in episodes:
        recorder = await _record(episode, system_prompt, harness, renderer)
        images = recorder.images(None)
        of_turn = _returns(episode, discount)
        for row in recorder.rows():
            size = int(row.policy_mask.sum())
            rows.append(preparer.policy_row(row, np.arange(num_slots, num_slots + size), images, store))
            returns.append(of_turn[row.turn_index[row.policy_mask != 0]])
            num_slots += size
    return SFTData(rows=rows, images=store, returns=torch.from_numpy(np.concatenate(returns)))


async def _record(episode: ScriptedEpisode, system_prompt: str, harness: Harness, renderer: ChatRenderer) -> Recorder:
    """The episode's rows, as if an engine had sampled what the script wrote."""
    recorder = Recorder(renderer)
    messages = [await observation_message(turn.observation) for turn in episode.turns]
    harness.start(system_prompt, messages[0])
    for turn, following in zip(episode.turns, [*messages[1:], None], strict=True):
        ids = renderer.encode_response(turn.response)
        written = Generation(
            token_ids=ids,
            logprobs=[0.0] * len(ids),
            versions=[0] * len(ids),
            finish_reason="stop",
            engine_s=0.0,
        )
        recorder.add_response(renderer.render(harness.prompt()), written)
        recorder.add_outcome(ParsedResponse(format_ok=True, action_valid=True, actions=()), turn.reward, {}, 0.0)
        if following is not None:
            harness.add_turn(Response(tuple(ids)), following)
    return recorder


def _returns(episode: ScriptedEpisode, discount: float) -> np.ndarray:
    """Discounted return from each turn on, float32 [K]."""
    returns: list[float] = []
    following = 0.0
    for turn in reversed(episode.turns):
        following = sum(turn.reward.values()) + discount * following
        returns.append(following)
    return np.asarray(returns[::-1], dtype=np.float32)
