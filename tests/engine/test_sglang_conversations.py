"""Conversations that real SGLang keeps, against the same ones sent whole each time, and against transformers."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.episode import EpisodeClient
from vagen.actor.engines.http import EngineHttp
from vagen.actor.engines.pool import EnginePool
from vagen.actor.engines.roster import Roster
from vagen.actor.messages import Message, Picture, Response
from vagen.actor.rendering import ChatRenderer
from vagen.common.errors import EngineRefusedError
from vagen.common.metrics import Metrics
from vagen.common.trajectory import SamplingParams
from vagen.common.wire import EngineStatus

pytestmark = pytest.mark.usefixtures("endless")
TOLERANCE = 2e-5
LONG = 1000
GREEDY = SamplingParams(temperature=0.0)


@asynccontextmanager
async def pooled(*engines, conversations, **more):
    """A pool of engines that are all admitted."""
    # SGLang is not ready while it is paused, which is no reason to look for another here.
    settings = {"probe_s": 0.2, "probe_timeout_s": 20.0, "request_timeout_s": 300.0, "failures": 1000} | more
    config = EnginesConfig(conversations=conversations, **settings)
    renderer = ChatRenderer.load(engines[0].model_dir)
    roster = Roster([engine.url for engine in engines])
    pool = EnginePool(roster, renderer, config, Metrics("vagen_actor", "run"), api_key=engines[0].api_key or "")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        await pool.connect(20)
        work = asyncio.create_task(pool.run())
        stack.push_async_callback(asyncio.gather, work, return_exceptions=True)
        stack.callback(work.cancel)
        while len(pool.announcements) < len(engines):
            await pool.changed.wait(1)
        admit(pool, *engines)
        yield pool, renderer


def admit(pool, *engines):
    """As the buffer does once checksums have matched; all are one SGLang, under several URLs."""
    version = int(engines[0].version())
    now = {a.url: a.incarnation for a in pool.announcements}
    pool.admit(
        [EngineStatus(url=engine.url, incarnation=now[engine.url], policy_version=version) for engine in engines]
    )


class Episode:
    """One conversation of several turns; `generate` is one turn."""

    def __init__(self, lab, pool, renderer):
        self.lab, self.client, self._renderer = lab, EpisodeClient(pool), renderer
        self._conversation, self._images, self._turn = [], [], 0

    async def generate(self, *seeds, num_tokens=12, sampling=GREEDY):
        """A turn with a text and pictures of these seeds; the answer, and its prompt and pictures."""
        self._turn += 1
        pictures = [(self.lab.png(seed), (56, 56)) for seed in seeds]
        self._images += [image for image, _ in pictures]
        parts = (f"w{20 + self._turn}", *(Picture(*picture) for picture in pictures))
        self._conversation.append(Message("user", parts))
        prompt = self._renderer.render(tuple(self._conversation))
        answer = await self.client.generate(
            prompt, sampling=sampling, max_new_tokens=num_tokens, rid=f"{id(self)}-{self._turn}", timeout_s=300
        )
        self._conversation.append(Response(tuple(answer.token_ids)))
        return answer, prompt.token_ids, list(self._images)

    def mismatch(self, engine, model, turn, start=0, end=None, temperature=1.0):
        """Greatest difference from transformers' log-probabilities given the whole prompt."""
        answer, ids, images = turn
        expected = self.lab.logprobs_of(
            model, ids, images, answer.token_ids, temperature=temperature, forbidden=engine.forbidden
        )
        pairs = list(zip(answer.logprobs, expected, strict=True))
        return max(abs(a - b) for a, b in pairs[start:end])


@pytest.fixture
def calls(monkeypatch):
    """Path and body of all calls of the actor's."""
    seen = []
    call = EngineHttp.call

    async def recorded(http, method, path, body=None, *args):
        seen.append((http.url, path, body))
        return await call(http, method, path, body, *args)

    monkeypatch.setattr(EngineHttp, "call", recorded)
    return seen


def of(calls, path):
    return [body for _, called, body in calls if called == path]


@pytest.fixture
def engine(start_sglang, tiny_model, lab, publish_to):
    """SGLang with weights that it got by a publish."""
    engine = start_sglang(*tiny_model)
    # Not on top of what other tests have published: rounding grows with the weights.
    engine.reference = tiny_model[1]
    publish(engine, publish_to)
    return engine


def publish(engine, publish_to, mode="retract"):
    """New weights under the next version."""
    version = str(1 + (int(engine.version()) if engine.version().isdecimal() else 0))
    model = engine.perturbed(0.05) if mode != "same" else engine.reference
    publish_to(engine, model, version, mode)
    engine.reference = model
    return int(version)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_logprobs_and_versions_are_those_of_whole_prompts(engine, lab, calls):
    async def play(conversations):
        async with pooled(engine, conversations=conversations) as (pool, renderer):
            episode = Episode(lab, pool, renderer)
            turns = [await episode.generate(*seeds) for seeds in ((1,), (), (2, 3), (), (1,))]
            episode.client.close()
            return episode, turns

    episode, kept = asyncio.run(play("server"))
    (opened,) = of(calls, "/open_session")
    assert opened["timeout"] == 3000.0
    assert [len(body.get("image_data", ())) for body in of(calls, "/generate")] == [1, 0, 2, 0, 1]
    sent = [len(body["input_ids"]) for body in of(calls, "/generate")]
    prompts = [ids for _, ids, _ in kept]
    assert sent[0] == len(prompts[0]) and sent[-1] == len(prompts[-1]) - len(prompts[-2]) - 12
    assert len(of(calls, "/close_session")) == 1
    _, whole = asyncio.run(play("client"))
    for (a, *asked), (b, *asked_whole) in zip(kept, whole, strict=True):
        assert asked == asked_whole
        assert a.token_ids == b.token_ids and a.versions == b.versions and a.finish_reason == b.finish_reason
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < TOLERANCE


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_conversation_outlives_a_publish_and_is_left_after_an_abort(engine, lab, calls, publish_to):
    """Sampled, so that greedy ties do not matter: each token's log-probability is that of the model of its version."""

    async def change_during(episode, mode, *seeds):
        before = engine.reference
        turn = asyncio.create_task(episode.generate(*seeds, num_tokens=LONG, sampling=SamplingParams()))
        await asyncio.to_thread(engine.wait_running)
        version = await asyncio.to_thread(publish, engine, publish_to, mode)
        answer, *asked = await turn
        cut = answer.versions.index(version)
        assert answer.versions == [version - 1] * cut + [version] * (LONG - cut) and cut > 0
        assert episode.mismatch(engine, before, (answer, *asked), 0, cut) < TOLERANCE
        assert episode.mismatch(engine, engine.reference, (answer, *asked), cut) < TOLERANCE

    async def main():
        # The groups of both modes, which take longer to build than many tokens.
        for mode in ("retract", "abort"):
            await asyncio.to_thread(publish, engine, publish_to, mode)
        async with pooled(engine, conversations="server") as (pool, renderer):
            episode = Episode(lab, pool, renderer)
            await episode.generate(1)
            await change_during(episode, "retract", 2)
            turn = await episode.generate(3)
            assert episode.mismatch(engine, engine.reference, turn) < TOLERANCE
            assert len(of(calls, "/open_session")) == 1 and not of(calls, "/close_session")
            await change_during(episode, "abort", 4)
            assert len(of(calls, "/open_session")) == 2
            # The whole prompt with what there was of the answer, since SGLang has let go of the turn's picture.
            assert len(of(calls, "/generate")[-1]["image_data"]) == 4
            turn = await episode.generate(5)
            assert episode.mismatch(engine, engine.reference, turn) < TOLERANCE
            assert len(of(calls, "/generate")[-1]["image_data"]) == 1 and len(of(calls, "/open_session")) == 2

    asyncio.run(main())


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_conversation_that_is_gone_goes_on_with_the_whole_prompt(engine, lab, calls):
    """Forgotten by its engine; kept by an engine that is gone; kept by one that has it with other words."""
    proxy = lab.proxy(engine.url)
    other = dataclasses.replace(engine, url=proxy.url)

    async def main():
        async with pooled(engine, other, conversations="server", failures=1) as (pool, renderer):
            episode = Episode(lab, pool, renderer)
            admit(pool, other)
            await episode.generate(1)
            (session,) = {body["session_params"]["id"] for body in of(calls, "/generate")}
            assert engine.call("/close_session", {"session_id": session}, key=engine.api_key)[0] == 200
            turn = await episode.generate(2)
            assert episode.mismatch(engine, engine.reference, turn) < TOLERANCE
            assert [len(body["image_data"]) for body in of(calls, "/generate")] == [1, 1, 2]
            proxy.close()
            admit(pool, engine, other)
            turn = await episode.generate(3)
            assert episode.mismatch(engine, engine.reference, turn) < TOLERANCE
            url, _, body = [call for call in calls if call[1] == "/generate"][-1]
            assert url == engine.url and len(body["image_data"]) == 3
            episode._conversation[0] = Message("user", ("w90", *episode._conversation[0].parts[1:]))
            turn = await episode.generate()
            assert episode.mismatch(engine, engine.reference, turn) < TOLERANCE
            assert len(of(calls, "/generate")[-1]["image_data"]) == 3

    asyncio.run(main())


def test_the_local_engine_keeps_none(start_engines, lab):
    async def main():
        (engine,) = start_engines()
        async with pooled(engine, conversations="server"):
            pass

    with pytest.raises(EngineRefusedError, match="is the local engine, which keeps no conversations: set actor.eng"):
        asyncio.run(main())
