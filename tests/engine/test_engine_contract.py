"""What every engine must do, whoever made it: run against the local engine and real SGLang (`make test-sglang`).

Instead of SGLang on this machine's CPU, VAGEN_TEST_ENGINE_URL, VAGEN_TEST_ENGINE_MODEL (its model folder, on a path
that it can read too), VAGEN_TEST_ENGINE_KEY and VAGEN_TEST_ENGINE_ADMIN_KEY may name one that runs elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import TimeoutError as NotYet
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2_5_VLForConditionalGeneration

from vagen.actor.client import HttpEngineClient
from vagen.actor.engines.config import EnginesConfig
from vagen.actor.engines.episode import EpisodeClient
from vagen.actor.engines.pool import EnginePool
from vagen.actor.engines.roster import Roster
from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer
from vagen.common.metrics import Metrics
from vagen.common.trajectory import SamplingParams
from vagen.common.wire import EngineStatus

TOLERANCE = 2e-5
LONG = 1500
"""Tokens of a generation that is still running when weights arrive."""
ENGINES = ["local", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)])]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, lab, tiny_model):
    """An engine with a vision-language model."""
    url = os.environ.get("VAGEN_TEST_ENGINE_URL")
    if request.param == "local":
        start = request.getfixturevalue("start_engines")
        return start(api_key=lab.api_key, admin_api_key=lab.admin_key, max_running=32)[0]
    if url is None:
        return request.getfixturevalue("start_sglang")(*tiny_model)
    return named_engine(lab, url, Qwen2_5_VLForConditionalGeneration)


@pytest.fixture(scope="module", params=ENGINES)
def text_engine(request, lab, tiny_text_model):
    """An engine with a text model."""
    if request.param == "local":
        start = request.getfixturevalue("start_text_engines")
        return start(api_key=lab.api_key, admin_api_key=lab.admin_key, max_running=32)[0]
    url = os.environ.get("VAGEN_TEST_TEXT_ENGINE_URL")
    if url is None:
        return request.getfixturevalue("start_sglang")(*tiny_text_model)
    return named_engine(lab, url, AutoModelForCausalLM)


def named_engine(lab, url, kind):
    """The engine of the environment, with the weights of its folder."""
    folder = Path(os.environ["VAGEN_TEST_ENGINE_MODEL"])
    engine = lab.handle(
        url=url,
        api_key=os.environ.get("VAGEN_TEST_ENGINE_KEY"),
        admin_key=os.environ.get("VAGEN_TEST_ENGINE_ADMIN_KEY"),
        reference=kind.from_pretrained(folder, dtype=torch.float32).eval(),
        model_dir=folder,
        forbidden=(lab.image, lab.video, lab.vision_start, lab.vision_end) if kind is not AutoModelForCausalLM else (),
    )
    engine.admin("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "0"})
    return engine


@pytest.fixture
def publish(publish_to):
    """Publishes new weights in a mode, and makes them the reference."""

    def go(engine, model, mode="retract"):
        version = str(int(engine.version()) + 1)
        publish_to(engine, model, version, mode)
        engine.reference = model
        return version

    return go


@pytest.fixture
def publish_during(publish):
    """Publishes new weights while a request of `start` generates; its future and the new version."""

    def go(engine, start, mode):
        # The group with the engine takes longer than many tokens, and stays.
        publish(engine, engine.reference, mode)
        future = start()
        engine.wait_running()
        return future, publish(engine, engine.perturbed(), mode)

    return go


def assert_close(reported, expected, tolerance=TOLERANCE):
    difference = (torch.tensor(reported) - torch.tensor(expected)).abs().max().item()
    assert difference < tolerance


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_logprobs_are_those_of_transformers(engine, lab, temperature, num_images):
    images = [lab.png(7), lab.png(8, width=84, height=56)][:num_images]
    ids = lab.image_prompt(30, 31) * num_images + [40, 41, 42]
    answer = engine.generate(ids, images, max_new_tokens=20, temperature=temperature)
    assert len(answer["output_ids"]) == 20
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    # The images were seen: 4 and 6 tokens instead of a placeholder each.
    assert answer["meta_info"]["prompt_tokens"] == len(ids) + [0, 3, 8][num_images]
    expected = lab.logprobs_of(
        engine.reference, ids, images, answer["output_ids"], temperature=temperature, forbidden=engine.forbidden
    )
    assert_close(lab.reported(answer), expected)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_of_a_text_model(text_engine, lab, temperature):
    answer = text_engine.generate([40, 41, 42], max_new_tokens=20, temperature=temperature)
    expected = lab.logprobs_of(text_engine.reference, [40, 41, 42], [], answer["output_ids"], temperature=temperature)
    assert_close(lab.reported(answer), expected)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_update_of_a_text_model_in_flight(text_engine, lab, publish, mode):
    before, old = text_engine.reference, text_engine.version()
    future = text_engine.submit([10, 11, 12], max_new_tokens=LONG)
    text_engine.wait_running()
    new = publish(text_engine, text_engine.perturbed(), mode)
    answer = future.result(60)
    spans = lab.spans(answer)
    assert [version for version, _, _ in spans] == [old, new]
    cut, output, reported = spans[0][2], answer["output_ids"], lab.reported(answer)
    assert_close(reported[:cut], lab.logprobs_of(before, [10, 11, 12], [], output)[:cut])
    recomputed = lab.logprobs_of(text_engine.reference, [10, 11, 12], [], output)[cut:]
    if mode == "retract":
        assert_close(reported[cut:], recomputed)
    else:
        assert max(abs(a - b) for a, b in zip(reported[cut:], recomputed, strict=True)) > 100 * TOLERANCE


def test_ids_that_the_template_places_are_never_sampled_and_do_not_count(engine, lab):
    # Near-uniform sampling: without the bias 4 of 96 ids would come up some 80 times in 2000 draws.
    futures = [engine.submit([10 + i], temperature=100.0, max_new_tokens=500) for i in range(4)]
    for i, future in enumerate(futures):
        answer = future.result(60)
        assert not set(answer["output_ids"]) & set(engine.forbidden)
        expected = lab.logprobs_of(
            engine.reference, [10 + i], [], answer["output_ids"], temperature=100.0, forbidden=engine.forbidden
        )
        assert_close(lab.reported(answer), expected)


def test_pixels_matter(engine, lab):
    ids = lab.image_prompt(30, 31)
    answer = engine.generate(ids, [lab.png(1)])
    other = lab.logprobs_of(engine.reference, ids, [lab.png(2)], answer["output_ids"], forbidden=engine.forbidden)
    assert max(abs(a - b) for a, b in zip(lab.reported(answer), other, strict=True)) > 100 * TOLERANCE


def test_greedy_takes_the_most_likely_token(engine, lab):
    ids = lab.image_prompt(30)
    answer = engine.generate(ids, [lab.png(1)], temperature=0.0, max_new_tokens=6)
    with torch.no_grad():
        logits = engine.reference(**lab.inputs(engine.reference, ids, [lab.png(1)], answer["output_ids"])).logits[0]
    logits[:, list(engine.forbidden)] = -torch.inf
    assert answer["output_ids"] == logits[-7:-1].argmax(-1).tolist()
    assert_close(lab.reported(answer), lab.gather_logprobs(logits[-7:-1], answer["output_ids"], 1.0, ()))


def test_answers_do_not_depend_on_what_else_runs(engine, lab):
    prompts = []
    for i in range(40):
        images = [lab.png(100 + i, width=56 + 28 * (i % 3))] if i % 2 else []
        ids = (lab.image_prompt() if images else []) + [50 + (i + j) % 40 for j in range(1 + 5 * (i % 7))]
        prompts.append((ids, images, 3 + (i * 7) % 40))
    futures = [engine.submit(ids, images, max_new_tokens=n) for ids, images, n in prompts]
    for (ids, images, n), future in zip(prompts, futures, strict=True):
        answer = future.result(60)
        assert len(answer["output_ids"]) == n
        expected = lab.logprobs_of(engine.reference, ids, images, answer["output_ids"], forbidden=engine.forbidden)
        assert_close(lab.reported(answer), expected)


def test_stop_token_ends_the_output_and_is_part_of_it(engine, lab):
    stops = [token for token in range(lab.vocab) if token % 3 == 0]
    answer = engine.generate([10, 11], max_new_tokens=200, ignore_eos=False, stop_token_ids=stops)
    reason = answer["meta_info"]["finish_reason"]
    assert reason["type"] == "stop" and reason["matched"] == answer["output_ids"][-1]
    assert answer["output_ids"][-1] in {*stops, lab.eos}
    assert not set(answer["output_ids"][:-1]) & {*stops, lab.eos}
    assert len(lab.reported(answer)) == len(answer["output_ids"])


def test_update_reaches_text_and_an_image_seen_before(engine, lab, publish):
    ids, image = lab.image_prompt(30, 31), lab.png(3)
    engine.generate(ids, [image])
    for part in ("visual", "language_model"):
        before = engine.reference
        version = publish(engine, engine.perturbed(0.1, only=part))
        answer = engine.generate(ids, [image])
        assert lab.spans(answer) == [(version, 0, 12)]
        output = answer["output_ids"]
        new, old = (
            lab.logprobs_of(model, ids, [image], output, forbidden=engine.forbidden)
            for model in (engine.reference, before)
        )
        assert max(abs(a - b) for a, b in zip(new, old, strict=True)) > 0.05
        assert_close(lab.reported(answer), new)


def test_retract_recomputes_the_cache_and_splits_versions(engine, lab, publish_during):
    ids, image, before = lab.image_prompt(30), lab.png(4), engine.reference
    start = partial(engine.submit, ids, [image], max_new_tokens=LONG)
    future, new = publish_during(engine, start, "retract")
    answer = future.result(60)
    spans = lab.spans(answer)
    assert [int(version) for version, _, _ in spans] == [int(new) - 1, int(new)]
    assert answer["meta_info"]["num_retractions"] == 1
    cut, output, reported = spans[0][2], answer["output_ids"], lab.reported(answer)
    assert_close(reported[:cut], lab.logprobs_of(before, ids, [image], output, forbidden=engine.forbidden)[:cut])
    assert_close(
        reported[cut:], lab.logprobs_of(engine.reference, ids, [image], output, forbidden=engine.forbidden)[cut:]
    )


def test_in_place_keeps_the_old_cache_and_splits_versions(engine, lab, publish_during):
    ids, before = [10, 11, 12], engine.reference
    future, new = publish_during(engine, partial(engine.submit, ids, max_new_tokens=LONG), "in_place")
    answer = future.result(60)
    spans = lab.spans(answer)
    assert [int(version) for version, _, _ in spans] == [int(new) - 1, int(new)]
    cut, output, reported = spans[0][2], answer["output_ids"], lab.reported(answer)
    assert_close(reported[:cut], lab.logprobs_of(before, ids, [], output, forbidden=engine.forbidden)[:cut])
    # The last token of the old weights enters the cache under the new ones.
    row, kept = torch.tensor([[*ids, *output]]), len(ids) + cut - 1
    cache = DynamicCache()
    with torch.no_grad():
        before(input_ids=row[:, :kept], cache=cache, use_cache=True)
        logits = engine.reference(input_ids=row[:, kept:-1], cache=cache, use_cache=True).logits[0]
    assert_close(reported[cut:], lab.gather_logprobs(logits, output[cut:], 1.0, engine.forbidden))
    recomputed = lab.logprobs_of(engine.reference, ids, [], output, forbidden=engine.forbidden)
    assert max(abs(a - b) for a, b in zip(reported[cut:], recomputed[cut:], strict=True)) > 100 * TOLERANCE


def test_abort_pause_ends_running_requests_with_what_they_have(engine, lab, publish_during):
    future, new = publish_during(engine, partial(engine.submit, [10, 11], max_new_tokens=LONG), "abort")
    answer = future.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < LONG
    assert [int(version) for version, _, _ in lab.spans(answer)] == [int(new) - 1]
    assert lab.spans(engine.generate([10, 11]))[0][0] == new


def test_requests_wait_while_paused(engine, lab):
    engine.admin("/pause_generation", {"mode": "retract"})
    future = engine.submit([10, 11])
    # A request of 12 tokens takes milliseconds.
    with pytest.raises(NotYet):
        future.result(2)
    engine.admin("/continue_generation", {})
    assert len(future.result(30)["output_ids"]) == 12


def test_abort_by_id(engine, lab):
    futures = {rid: engine.submit([10, 11], max_new_tokens=LONG, rid=rid) for rid in ("a.1", "b.1")}
    engine.wait_running(2)
    assert engine.call("/abort_request", {"rid": "a.1"}, key=engine.admin_key)[0] == 200
    reasons = {rid: future.result(60)["meta_info"]["finish_reason"]["type"] for rid, future in futures.items()}
    assert reasons == {"a.1": "abort", "b.1": "length"}


@asynccontextmanager
async def single_client(engine, renderer):
    """The client of one engine."""
    client = HttpEngineClient(engine.url, renderer, api_key=engine.api_key or "")
    try:
        await client.connect(10)
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def pooled_client(engine, renderer):
    """The same engine in a pool, which has seen its load by the end."""
    metrics = Metrics("vagen_actor", "run")
    pool = EnginePool(Roster([engine.url]), renderer, EnginesConfig(probe_s=0.1), metrics, api_key=engine.api_key or "")
    await pool.connect(10)
    (announced,) = pool.announcements
    version = int(engine.version())
    pool.admit([EngineStatus(url=engine.url, incarnation=announced.incarnation, policy_version=version)])
    work = asyncio.create_task(pool.run())
    usages = []

    async def watch():
        while True:
            await pool.changed.wait(10)
            usages.append(metrics.registry.get_sample_value("vagen_actor_engine_kv_usage", labels))

    labels = {"run": "run", "engine": engine.url}
    watching = asyncio.create_task(watch())
    try:
        yield EpisodeClient(pool)
        assert 0 < max(usages) <= 1 and announced.kind in ("local", "sglang")
    finally:
        for task in (watching, work):
            task.cancel()
        await asyncio.gather(watching, work, return_exceptions=True)
        await pool.close()


@pytest.mark.parametrize("connected", [single_client, pooled_client])
def test_an_actor_goes_on_from_an_aborted_generation_with_both_versions(
    engine, lab, publish_during, endless, connected
):
    renderer = ChatRenderer.load(engine.model_dir)
    prompt = renderer.render((Message("user", (Picture(lab.png(4), (56, 56)), "w30")),))
    before = engine.reference

    async def generate():
        async with connected(engine, renderer) as client:
            return await client.generate(
                prompt, sampling=SamplingParams(), max_new_tokens=LONG, rid="episode", timeout_s=60
            )

    renderer.stop_token_ids = ()
    future, new = publish_during(engine, lambda: engine.threads.submit(asyncio.run, generate()), "abort")
    answer = future.result(90)
    assert sorted(set(answer.versions)) == [int(new) - 1, int(new)]
    cut = answer.versions.index(int(new))
    arguments = (prompt.token_ids, [lab.png(4)], answer.token_ids)
    expected = [lab.logprobs_of(m, *arguments, forbidden=engine.forbidden) for m in (before, engine.reference)]
    assert_close(answer.logprobs[:cut], expected[0][:cut])
    assert_close(answer.logprobs[cut:], expected[1][cut:])


def test_begin_is_mandatory(engine):
    body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "none"}
    status, answer = engine.call("/update_weights_from_distributed", body, key=engine.admin_key)
    assert status == 400, answer


def test_checksum_covers_every_weight(engine, lab, publish):
    first = engine.admin("/weights_checker", {"action": "checksum"})
    again = engine.admin("/weights_checker", {"action": "checksum"})
    publish(engine, engine.perturbed(only="visual.blocks.1.attn.proj.bias"))
    other = engine.admin("/weights_checker", {"action": "checksum"})
    assert first["per_engine_checksum"] == again["per_engine_checksum"] != other["per_engine_checksum"]
    names = set(first["ranks"][0]["checksums"])
    changed = [n for n in names if first["ranks"][0]["checksums"][n] != other["ranks"][0]["checksums"][n]]
    assert changed == ["visual.blocks.1.attn.proj.bias"]


def test_keys(engine, lab):
    if engine.api_key is None or engine.admin_key is None:
        pytest.skip("this engine is open")
    generation = {"input_ids": [10], "sampling_params": {"max_new_tokens": 1}}
    for path, body, keys in (
        ("/generate", generation, [None, "wrong"]),
        ("/pause_generation", {"mode": "retract"}, [None, "wrong", engine.api_key]),
        ("/weights_checker", {"action": "checksum"}, [None, engine.api_key]),
        ("/begin_weight_update", {}, [None, engine.api_key]),
    ):
        for key in keys:
            status, answer = engine.call(path, body, key=key)
            assert status in (401, 403), (path, key, answer)
    assert engine.call("/generate", generation, key=engine.api_key)[0] == 200
    for path in ("/health", "/ready", "/metrics"):
        assert engine.call(path)[0] == 200


def test_info(engine):
    status, info = engine.call("/server_info", key=engine.api_key)
    assert status == 200 and isinstance(info, dict)
    status, info = engine.call("/model_info", key=engine.api_key)
    assert status == 200 and info["weight_version"] == engine.version()


def test_weights_from_a_folder(engine, lab, tmp_path):
    model = engine.perturbed(0.1)
    model.save_pretrained(tmp_path / "saved")
    version = str(int(engine.version()) + 1)
    engine.admin("/update_weights_from_disk", {"model_path": str(tmp_path / "saved"), "weight_version": version})
    engine.reference = model
    ids, image = lab.image_prompt(30), lab.png(5)
    answer = engine.generate(ids, [image])
    assert lab.spans(answer) == [(version, 0, 12)]
    expected = lab.logprobs_of(model, ids, [image], answer["output_ids"], forbidden=engine.forbidden)
    assert_close(lab.reported(answer), expected)


def test_many_updates_under_load(engine, lab, publish):
    stop = threading.Event()
    answers = []

    def keep_asking(i):
        while not stop.is_set():
            answers.append(engine.generate([10 + i, 11], max_new_tokens=30))

    workers = [engine.threads.submit(keep_asking, i) for i in range(6)]
    models = {engine.version(): engine.reference}
    for _ in range(5):
        model = engine.perturbed(0.02)
        models[publish(engine, model)] = model
    stop.set()
    for worker in workers:
        worker.result(60)
    assert {version for answer in answers for version, _, _ in lab.spans(answer)} <= set(models)
    assert all(len(answer["output_ids"]) == 30 for answer in answers)
