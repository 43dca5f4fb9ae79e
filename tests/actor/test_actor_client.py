from __future__ import annotations

import asyncio
import socket
import time
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from vagen.actor.client import Generation, HttpEngineClient
from vagen.actor.messages import Message, Picture
from vagen.actor.rendering import ChatRenderer, Prompt
from vagen.common.errors import EngineAbortedError, EngineError, EngineRefusedError, EngineUnavailableError
from vagen.common.trajectory import SamplingParams
from vagen.envs.base import encode_png


def prompt_of(renderer: ChatRenderer) -> Prompt:
    picture = Picture(encode_png(Image.new("RGB", (56, 56))), (56, 56))
    return renderer.render((Message("user", (picture, "look")),))


async def ask(engine: Any, renderer: ChatRenderer, **options: Any) -> Generation:
    """One generation against a scripted engine."""
    arguments = {"max_new_tokens": 16, "timeout_s": 10.0, "prompt": prompt_of(renderer), "api_key": ""} | options
    client = HttpEngineClient(engine.url, renderer, api_key=arguments.pop("api_key"), retries=3)
    try:
        await client.connect(5.0)
        prompt = arguments.pop("prompt")
        return await client.generate(prompt, sampling=SamplingParams(temperature=0.7), rid="r", **arguments)
    finally:
        await client.close()


def run(fakes: ModuleType, renderer: ChatRenderer, script: Any, **options: Any) -> tuple[Generation, Any]:
    async def main() -> tuple[Generation, Any]:
        async with fakes.ScriptedEngine(script) as engine:
            return await ask(engine, renderer, **options), engine

    return asyncio.run(main())


def test_a_request_speaks_sglangs_fields(fakes: ModuleType, renderer: ChatRenderer) -> None:
    generation, engine = run(fakes, renderer, lambda body, n: fakes.generated([5, 6, 7]))
    assert generation.token_ids == [5, 6, 7]
    assert generation.logprobs == pytest.approx([-0.1, -0.2, -0.3])
    assert generation.versions == [3, 3, 3]
    assert generation.finish_reason == "stop"
    (body,) = engine.requests
    prompt = prompt_of(renderer)
    assert body["input_ids"] == prompt.token_ids
    assert body["image_data"] == [prompt.pictures[0].base64]
    assert body["return_logprob"] is True and body["logprob_start_len"] == -1
    assert body["sampling_params"] == {
        "max_new_tokens": 16,
        "temperature": 0.7,
        "stop_token_ids": list(renderer.stop_token_ids),
        "logit_bias": {str(token): -1e9 for token in renderer.vision.forbidden_token_ids},
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def test_versions_are_those_of_the_spans(fakes: ModuleType, renderer: ChatRenderer) -> None:
    spans = [(3, 0, 1), (7, 1, 4)]
    generation, _ = run(fakes, renderer, lambda body, n: fakes.generated([5, 6, 7, 8], versions=spans))
    assert generation.versions == [3, 7, 7, 7]


def test_an_aborted_generation_goes_on_from_its_tokens(fakes: ModuleType, renderer: ChatRenderer) -> None:
    answers = [
        fakes.generated([5, 6], "abort", [(3, 0, 2)]),
        fakes.generated([], "abort", []),
        fakes.generated([7, 8, 9], "length", [(4, 0, 3)]),
    ]
    generation, engine = run(fakes, renderer, lambda body, n: answers[n], max_new_tokens=5)
    assert generation.token_ids == [5, 6, 7, 8, 9]
    assert generation.versions == [3, 3, 4, 4, 4]
    assert generation.logprobs == pytest.approx([-0.1, -0.2, -0.1, -0.2, -0.3])
    assert generation.finish_reason == "length"
    start = prompt_of(renderer).token_ids
    assert [body["input_ids"] for body in engine.requests] == [start, [*start, 5, 6], [*start, 5, 6]]
    assert [body["sampling_params"]["max_new_tokens"] for body in engine.requests] == [5, 3, 3]
    assert len({body["rid"] for body in engine.requests}) == 3


def test_an_abort_at_the_end_of_the_budget_is_a_full_response(fakes: ModuleType, renderer: ChatRenderer) -> None:
    generation, engine = run(fakes, renderer, lambda body, n: fakes.generated([5, 6], "abort"), max_new_tokens=2)
    assert (generation.token_ids, generation.finish_reason, len(engine.requests)) == ([5, 6], "length", 1)


def test_endless_aborts_are_an_error(fakes: ModuleType, renderer: ChatRenderer) -> None:
    with pytest.raises((EngineAbortedError, EngineUnavailableError), match="aborted r"):
        run(fakes, renderer, lambda body, n: fakes.generated([], "abort", []), timeout_s=1.5)


@pytest.mark.parametrize("status", [503, 429])
def test_a_busy_engine_is_tried_again_and_its_tokens_count_once(
    fakes: ModuleType, renderer: ChatRenderer, status: int
) -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        return web.Response(status=status, text="queue full") if number < 2 else fakes.generated([5, 6])

    generation, engine = run(fakes, renderer, script)
    assert generation.token_ids == [5, 6]
    assert len(engine.requests) == 3
    assert len({body["rid"] for body in engine.requests}) == 3


def test_5xx_answers_are_tried_a_bounded_number_of_times(fakes: ModuleType, renderer: ChatRenderer) -> None:
    counts = []

    def script(body: dict[str, Any], number: int) -> Any:
        counts.append(number)
        return web.Response(status=500, text="broken")

    with pytest.raises(EngineUnavailableError, match="HTTP 500: broken"):
        run(fakes, renderer, script)
    assert len(counts) == 4


def test_a_4xx_answer_is_not_tried_again(fakes: ModuleType, renderer: ChatRenderer) -> None:
    counts = []

    def script(body: dict[str, Any], number: int) -> Any:
        counts.append(number)
        return web.Response(status=400, text="too long")

    with pytest.raises(EngineRefusedError, match="HTTP 400: too long"):
        run(fakes, renderer, script)
    assert counts == [0]


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_wrong_token_is_refused(fakes: ModuleType, renderer: ChatRenderer, key: str) -> None:
    async def main() -> None:
        async with fakes.ScriptedEngine(lambda body, n: fakes.generated([5]), api_key="right") as engine:
            assert (await ask(engine, renderer, api_key="right")).token_ids == [5]
            with pytest.raises(EngineRefusedError, match="HTTP 401"):
                await ask(engine, renderer, api_key=key)

    asyncio.run(main())


def test_a_missing_engine_is_an_error_within_seconds_that_says_what_to_start(renderer: ChatRenderer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    async def main() -> None:
        client = HttpEngineClient(f"http://127.0.0.1:{port}", renderer)
        try:
            await client.connect(1.0)
        finally:
            await client.close()

    started = time.monotonic()
    with pytest.raises(EngineUnavailableError, match=rf"127.0.0.1:{port} within 1 s.*vagen-actor engine --model"):
        asyncio.run(main())
    assert time.monotonic() - started < 3


def test_a_hung_engine_costs_the_time_out_and_is_told(fakes: ModuleType, renderer: ChatRenderer) -> None:
    async def main() -> None:
        async def hang(body: dict[str, Any], number: int) -> Any:
            await asyncio.sleep(30)

        async with fakes.ScriptedEngine(hang) as engine:
            started = time.monotonic()
            with pytest.raises(EngineUnavailableError, match="no answer"):
                await ask(engine, renderer, timeout_s=0.5)
            assert time.monotonic() - started < 3
            (rid,) = engine.aborted
            assert rid == engine.requests[0]["rid"]

    asyncio.run(main())


def test_a_cancelled_generation_is_aborted_at_the_engine(fakes: ModuleType, renderer: ChatRenderer) -> None:
    async def main() -> None:
        arrived = asyncio.Event()

        async def hang(body: dict[str, Any], number: int) -> Any:
            arrived.set()
            await asyncio.sleep(30)

        async with fakes.ScriptedEngine(hang) as engine:
            task = asyncio.create_task(ask(engine, renderer))
            await asyncio.wait_for(arrived.wait(), 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.aborted == [engine.requests[0]["rid"]]

    asyncio.run(main())


def test_a_restarted_engine_does_not_finish_the_old_ones_response(fakes: ModuleType, renderer: ChatRenderer) -> None:
    async def main() -> None:
        async with fakes.ScriptedEngine(lambda body, n: None) as engine:

            def script(body: dict[str, Any], number: int) -> Any:
                engine.incarnation = "second"
                return web.Response(status=503)

            engine.script = script
            with pytest.raises(EngineUnavailableError, match="restarted"):
                await ask(engine, renderer)
            assert len(engine.requests) == 1

    asyncio.run(main())


def _without(answer: dict[str, Any], key: str) -> dict[str, Any]:
    answer["meta_info"].pop(key)
    return answer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda g: g([5, 6], versions=[(3, 0, 1)]), "cover 1 of 2"),
        (lambda g: g([5, 6], versions=[(3, 0, 1), (4, 0, 1)]), "gap"),
        (lambda g: g([5, 6], versions=[("default", 0, 2)]), "no version of the learner's"),
        (lambda g: g([5, 6], versions=[(-1, 0, 2)]), "'-1' is no version"),
        (lambda g: _without(g([5, 6]), "weight_versions"), "cover 0 of 2"),
        (lambda g: g([5, 6], output_token_logprobs=[[-0.1, 5, None]]), "1 logprobs do not match the 2"),
        (lambda g: g([5, 6], output_token_logprobs=[[-0.1, 5, None], [-0.1, 9, None]]), "do not match"),
        (lambda g: g([5], output_token_logprobs=[[None, 5, None]]), "non-finite"),
        (lambda g: g([5] * 17), "17 tokens, asked for at most 16"),
        (lambda g: g([]), "without tokens"),
        (lambda g: g([5], versions=[(3, 0, 9**9)]), "gap"),
        (lambda g: g([5], "odd"), "finish_reason.type"),
        (lambda g: g(["x"]), "output_ids"),
        (lambda g: g([5], output_token_logprobs=[[-0.1]]), "output_token_logprobs"),
        (lambda g: web.Response(text="<html>"), "not the answer of an engine"),
        (lambda g: {"output_ids": [5]}, "meta_info"),
    ],
)
def test_an_answer_that_may_not_be_trained_on_is_an_error(
    fakes: ModuleType, renderer: ChatRenderer, make: Any, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        run(fakes, renderer, lambda body, n: make(fakes.generated))


def test_a_sampled_vision_token_is_an_error(fakes: ModuleType, renderer: ChatRenderer) -> None:
    assert renderer.vision is not None
    for token in renderer.vision.forbidden_token_ids:
        with pytest.raises(EngineError, match="sampled vision tokens"):
            run(fakes, renderer, lambda body, n, token=token: fakes.generated([5, token]))


def test_placeholders_and_images_are_compared_before_anything_is_sent(
    fakes: ModuleType, renderer: ChatRenderer
) -> None:
    async def main() -> None:
        async with fakes.ScriptedEngine(lambda body, n: fakes.generated([5])) as engine:
            prompt = prompt_of(renderer)
            with pytest.raises(EngineRefusedError, match="1 image placeholders and 0 images"):
                await ask(engine, renderer, prompt=Prompt(prompt.token_ids, ()))
            with pytest.raises(EngineRefusedError, match="0 image placeholders and 1 images"):
                await ask(engine, renderer, prompt=Prompt([5], prompt.pictures))
            assert engine.requests == []

    asyncio.run(main())
