"""Each family once around: an actor plays on the local engine, the learner trains what was played and publishes, and
engine and learner compute the same before and after.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
import torch

from vagen.actor.client import HttpEngineClient
from vagen.actor.config import HarnessConfig
from vagen.actor.environments import EnvironmentPool
from vagen.actor.episode import EpisodeLimits, EpisodeTask, run_episode
from vagen.actor.harness import make_harness
from vagen.actor.rendering import ChatRenderer
from vagen.common.trajectory import SamplingParams, Trajectory
from vagen.common.wire import decode_trajectory, encode_trajectory
from vagen.learner.batching import RowPreparer, prepare_batch
from vagen.learner.broadcast import Broadcaster, probe_engine
from vagen.learner.config import BroadcastConfig, LearnerConfig, OptimizerConfig
from vagen.learner.model.parallel import parallel_session
from vagen.learner.models import load_models, load_trained
from vagen.learner.probe import Probe
from vagen.learner.update import PolicyUpdate

TEXT = ("qwen2", "qwen3")
VISION = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl")
NUM_EPISODES, NUM_TURNS = 4, 2
BOUND = 1e-4
LIMITS = EpisodeLimits(sampling=SamplingParams(temperature=0.8, max_new_tokens=6), max_context=512)
ENV = {
    "size": 4,
    "hole_probability": 0.1,
    "cell_pixels": 14,
    "system_prompt": "none",
    "max_turns": NUM_TURNS,
    "invalid_penalty": -0.5,
}


def play(engine, folder: Path, family: str) -> list[Trajectory]:
    """Episodes of the game, as they come out of the wire."""
    settings = ENV | {"observation": "text" if family in TEXT else "image"}

    async def main() -> list[Trajectory]:
        renderer = ChatRenderer.load(folder)
        client = HttpEngineClient(engine.url, renderer, api_key=engine.api_key)
        pool = EnvironmentPool("frozen_lake", settings, 1)
        try:
            await client.connect(20.0)
            episodes = [
                run_episode(
                    EpisodeTask(seed=seed, task="lake", env_name="frozen_lake", group_id=f"g{seed // 2}", group_size=2),
                    pool.take(),
                    make_harness(HarnessConfig(name=("no_concat", "concat")[seed % 2])),
                    client,
                    renderer,
                    LIMITS,
                )
                for seed in range(NUM_EPISODES)
            ]
            results = await asyncio.gather(*episodes)
            return [result.trajectory for result in results]
        finally:
            await pool.close()
            await client.close()

    return [decode_trajectory(encode_trajectory(trajectory)[1]) for trajectory in asyncio.run(main())]


def prepared(trajectories: list[Trajectory], preparer: RowPreparer):
    groups = {name: index for index, name in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    return prepare_batch(trajectories, [0] * len(trajectories), groups, preparer)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_what_is_played_is_trained_and_published(lab, serve, tmp_path, family):
    folder = tmp_path / "model"
    folder.mkdir()
    engine = serve(folder, lab.build(family, folder))
    trajectories = play(engine, folder, family)
    assert [len(t.turns) for t in trajectories] == [NUM_TURNS] * NUM_EPISODES
    assert all(bool(t.images) == (family in VISION) for t in trajectories)
    keys = BroadcastConfig(api_key=engine.api_key, admin_api_key=engine.admin_key)
    config = LearnerConfig(ppo_epochs=1, optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0), broadcast=keys)
    with parallel_session(seed=3), closing(Broadcaster(keys)) as broadcaster:
        preparer, trained = RowPreparer.load(folder), load_trained(folder, config)
        model = trained.policy.model
        forbidden = preparer.forbidden_token_ids
        update = PolicyUpdate(model, trained.policy, config, seed=5, forbidden_token_ids=forbidden)
        probe = Probe.of(trajectories, 2)
        version = int(engine.version())
        stats = update.run(prepared(trajectories, preparer), 0, version)
        assert (stats.num_updates, stats.skipped_updates) == (1, 0) and stats.grad_norm > 0
        assert stats.ratio.fresh.num_tokens == sum(int(row.policy_mask.sum()) for t in trajectories for row in t.rows)
        assert stats.ratio.fresh.mean_abs_log_ratio < BOUND

        report = broadcaster.publish(model.engine_named_tensors(), version + 1, [engine.url])
        assert report.ok == (engine.url,), report.failed
        answers = probe_engine(engine.url, probe.requests(preparer.vision), version + 1, keys)
        assert probe.mismatch(model, preparer, answers) < BOUND
        before, _ = load_models(folder, config)
        assert probe.mismatch(before, preparer, answers) > 10 * BOUND, "the update has moved what is compared"
        again = play(engine, folder, family)
        batch = prepared(again, preparer)
        assert {version + 1} == {t.newest_version for t in again}
        torch.testing.assert_close(update.score(batch).logprobs, batch.behaviour_logprobs, rtol=0, atol=BOUND)
