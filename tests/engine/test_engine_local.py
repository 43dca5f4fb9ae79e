"""What only the local engine promises: refusals, seeds, bounds, and weights that are never half new."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vagen.actor.local_engine.cache import ByteBoundedCache
from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.local_engine.model import EngineModel
from vagen.actor.local_engine.sampling import Sampler, uniform
from vagen.common.config import convert
from vagen.common.errors import ConfigError
from vagen.common.weight_transfer import combined_checksum, flatten_bucket, split_bucket, tensor_checksum
from vagen.learner.engine_links import EngineLinks

LONG = 3000
PAUSE_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def engine(start_engines):
    return start_engines(max_running=8, max_waiting=4, pause_timeout_s=PAUSE_TIMEOUT_S)[0]


def body_of(lab, **changes):
    body = {"input_ids": lab.image_prompt(30), "image_data": [base64.b64encode(lab.png(1)).decode()]}
    params = {"max_new_tokens": 4, **changes.pop("sampling_params", {})}
    return body | {"sampling_params": params} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_data": None}, "1 image placeholders for 0 images"),
        ({"input_ids": [10, 3, 1, 1, 1, 1, 4]}, "4 image placeholders for 1 images .*do not expand"),
        ({"input_ids": [10]}, "0 image placeholders for 1 images"),
        ({"image_data": ["bm90IGFuIGltYWdl"]}, r"image_data\[0\]: image does not decode"),
        ({"image_data": ["%%%"]}, r"image_data\[0\]"),
        ({"input_ids": [10, 96], "image_data": None}, r"input_ids: expected ids in \[0, 96\), got 96"),
        ({"input_ids": [-1], "image_data": None}, "input_ids"),
        ({"input_ids": [2], "image_data": None}, "video"),
        ({"input_ids": [], "image_data": None}, "at least one token"),
        ({"input_ids": [10] * 4095, "image_data": None}, "exceed the context of 4096"),
        ({"input_ids": "hello"}, r"Expected `array`, got `str` - at `\$.input_ids`"),
        ({"sampling_params": {"top_p": 0.9}}, "top_p: expected 1"),
        ({"sampling_params": {"top_k": 5}}, "top_k: expected -1"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 4001}}, r"max_new_tokens: expected int in \[1, 4000\]"),
        ({"sampling_params": {"stop_token_ids": [1000]}}, "stop_token_ids"),
        ({"sampling_params": {"sampling_seed": -5}}, "sampling_seed"),
        (
            {"sampling_params": {"logit_bias": {"10": -1e9}}},
            r"logit_bias\[10\]: expected -1e9 for one of",
        ),
        ({"sampling_params": {"logit_bias": {"1": -1.0}}}, r"logit_bias\[1\]"),
        ({"sampling_params": {"beams": 4}}, "beams"),
        ({"stream": True}, "stream"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(engine, lab, changes, message):
    status, answer = engine.call("/generate", body_of(lab, **changes))
    assert status == 400
    assert re.search(message, answer["error"]["message"]), answer


def test_bad_json_is_refused(engine):
    assert engine.call("/generate", b"{not json")[0] == 400
    assert engine.call("/generate", b"[]")[0] == 400
    assert engine.call("/pause_generation", {"mode": "forever"})[0] == 400
    assert engine.call("/abort_request", {})[0] == 400


def test_data_url_is_an_image(engine, lab):
    plain = body_of(lab, sampling_params={"sampling_seed": 3}, return_logprob=True)
    url = plain | {"image_data": ["data:image/png;base64," + plain["image_data"][0]]}
    answers = [engine.call("/generate", body)[1] for body in (plain, url)]
    assert answers[0]["meta_info"]["output_token_logprobs"] == answers[1]["meta_info"]["output_token_logprobs"]


def test_abort_by_prefix_of_the_id(engine, lab):
    futures = {rid: engine.submit([10, 11], max_new_tokens=LONG, rid=rid) for rid in ("a.1", "a.2", "b.1")}
    engine.wait_running(3)
    engine.call("/abort_request", {"rid": "a."})
    reasons = {rid: future.result(60)["meta_info"]["finish_reason"]["type"] for rid, future in futures.items()}
    assert reasons == {"a.1": "abort", "a.2": "abort", "b.1": "length"}


def test_forbidden_tokens_are_never_sampled(engine, lab):
    # Near-uniform sampling: 4 of 96 ids are forbidden, 2000 draws would meet them some 80 times.
    futures = [engine.submit([10 + i], temperature=1000.0, max_new_tokens=500, logit_bias=None) for i in range(4)]
    sampled = [token for future in futures for token in future.result(60)["output_ids"]]
    assert not set(sampled) & set(engine.forbidden)
    assert len(set(sampled)) > 80


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_after_a_retraction(engine, lab):
    def ask(**more):
        return engine.submit(lab.image_prompt(30), [lab.png(2)], sampling_seed=99, max_new_tokens=600, **more)

    alone = ask().result(60)
    crowd = [engine.submit([10 + i], max_new_tokens=50 + i) for i in range(6)]
    crowded = ask().result(60)
    retracted = ask()
    engine.wait_running()
    engine.admin("/pause_generation", {"mode": "retract"})
    engine.admin("/continue_generation", {})
    again = retracted.result(60)
    assert again["meta_info"]["num_retractions"] == 1
    assert alone["output_ids"] == crowded["output_ids"] == again["output_ids"]
    assert alone["output_ids"] != engine.generate([10], sampling_seed=100, max_new_tokens=600)["output_ids"]
    for future in crowd:
        future.result(60)


def test_a_disconnected_client_frees_its_slot(engine, lab):
    host, port = engine.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    body = {"input_ids": [10], "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
    connection.request("POST", "/generate", json.dumps(body))
    engine.wait_running()
    aborted = 'vagen_engine_requests_total{reason="abort",run="run"}'
    before = engine.metric(aborted)
    connection.close()
    engine.wait_until(lambda: engine.metric(aborted) == before + 1, "aborted")
    assert engine.metric("vagen_engine_running_requests") == 0


def test_administrators_that_hang_up_do_no_harm(engine):
    host, port = engine.url.removeprefix("http://").split(":")
    text = b"POST /continue_generation HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    # Stopped, the engine finds request and hang-up at the same time, and drops the call before its turn has come.
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        for _ in range(50):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(text)
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)
    assert len(engine.generate([10])["output_ids"]) == 12
    assert engine.call("/health")[0] == 200


def test_more_requests_than_slots_wait_and_more_than_the_queue_are_turned_away(engine):
    engine.admin("/pause_generation", {"mode": "in_place"})
    futures = [engine.submit([10 + i]) for i in range(12)]
    engine.wait_until(lambda: engine.metric("vagen_engine_waiting_requests") == 12, "12 waiting")
    status, answer = engine.call("/generate", {"input_ids": [10]})
    assert status == 503 and "queue is full" in answer["error"]["message"]
    engine.admin("/continue_generation", {})
    assert all(len(future.result(60)["output_ids"]) == 12 for future in futures)


def test_a_pause_without_an_administrator_ends_by_itself(engine, lab):
    engine.admin("/pause_generation", {"mode": "in_place"})
    engine.admin("/begin_weight_update", {})
    start = time.monotonic()
    assert len(engine.generate([10])["output_ids"]) == 12
    assert time.monotonic() - start > 0.5 * PAUSE_TIMEOUT_S
    status, answer = engine.call("/end_weight_update", {})
    assert status == 400 and "no update runs" in answer["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("names", "model.language_model.norm.weight"), "no parameter model.language_model.norm.weight"),
        (("shapes", [63]), r"shapes: model.norm.weight is \[64\], got \[63\]"),
        (("dtypes", "bfloat16"), "dtypes: model.norm.weight is float32, got bfloat16"),
        (("dtypes", "float8_e4m3fn"), "dtypes: model.norm.weight is float32, got float8_e4m3fn"),
    ],
)
def test_wrong_weights_are_refused_before_anything_is_received(engine, change, message):
    before = engine.admin("/weights_checker", {"action": "checksum"})
    links = EngineLinks(5.0)
    try:
        group = join(engine, links)
        engine.admin("/begin_weight_update", {})
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        body = {"names": names, "dtypes": ["float32"] * 2, "shapes": [[96, 64], [64]], "group_name": group}
        body[change[0]][1] = change[1]
        status, answer = engine.call("/update_weights_from_distributed", body)
        assert status == 400 and re.search(message, answer["message"]), answer
        status, answer = engine.call("/update_weights_from_distributed", body | {"group_name": "other"})
        assert status == 400 and "no group other" in answer["message"]
    finally:
        links.close()
    assert engine.admin("/weights_checker", {"action": "checksum"}) == before


def join(engine, links, timeout_s=None):
    """Name of a new group with the engine, whose trainer never sends anything."""
    info = {"device": "cpu", "kind": "local"}
    plan = links.plan({engine.url: info}, is_cuda=False, timeout_s=timeout_s)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(plan.join)
        engine.admin("/init_weights_update_group", plan.requests[engine.url])
        return links.keep(plan, joining.result()).name


@pytest.mark.parametrize("told_s", [None, 1.0])
def test_a_trainer_that_sends_nothing_costs_the_time_out_and_changes_nothing(engine, lab, told_s):
    bound_s = told_s or lab.broadcast_timeout_s
    before = engine.admin("/weights_checker", {"action": "checksum"})
    links = EngineLinks(5.0)
    try:
        group = join(engine, links, told_s)
        engine.admin("/begin_weight_update", {})
        body = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": group}
        start = time.monotonic()
        answer = {}
        waiting = threading.Thread(
            target=lambda: answer.update(dict([engine.call("/update_weights_from_distributed", body)]))
        )
        waiting.start()
        # Generation goes on meanwhile.
        assert len(engine.generate([10])["output_ids"]) == 12
        waiting.join(30)
        assert bound_s * 0.5 < time.monotonic() - start < bound_s + 2.5
        assert 400 in answer
        status, ended = engine.call("/end_weight_update", {})
        assert status == 400 and "begin anew" in ended["message"]
    finally:
        links.close()
    assert engine.admin("/weights_checker", {"action": "checksum"}) == before


def test_a_trainer_that_never_joins_costs_the_time_out(engine, lab):
    body = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    start = time.monotonic()
    status, answer = engine.call("/init_weights_update_group", body | {"group_name": "nobody"})
    assert status == 400 and "127.0.0.1:9" in answer["message"]
    assert time.monotonic() - start < 3 * lab.broadcast_timeout_s
    assert engine.call("/destroy_weights_update_group", {"group_name": "nobody"})[0] == 400


def test_a_folder_that_lacks_weights_changes_nothing(engine, tmp_path):
    before = engine.admin("/weights_checker", {"action": "checksum"})
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    update = {"model_path": str(tmp_path), "load_format": "safetensors"}
    status, answer = engine.call("/update_weights_from_disk", update)
    assert status == 400 and "lacks" in answer["message"]
    status, answer = engine.call("/end_weight_update", {})
    assert status == 400 and "no update runs" in answer["message"]
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "once_more.safetensors")
    status, answer = engine.call("/update_weights_from_disk", update)
    assert status == 400 and "once_more.safetensors: ['model.norm.weight'] is there twice" in answer["message"]
    status, answer = engine.call("/update_weights_from_disk", {"model_path": str(tmp_path / "none")})
    assert status == 400 and f"no folder {tmp_path}/none" in answer["message"]
    assert engine.admin("/weights_checker", {"action": "checksum"}) == before


def test_info_says_what_an_actor_and_a_learner_need(engine, lab):
    info = engine.call("/server_info")[1]
    assert info["kind"] == "local" and len(info["incarnation"]) == 32
    assert info["max_context"] == 4096 and info["forbidden_token_ids"] == list(engine.forbidden)
    assert info["model_hash"] and info["tokenizer_hash"]


def test_the_process_ends_in_order_on_sigterm(start_engines):
    engine = start_engines(host="::1")[0]
    assert engine.url.startswith("http://[::1]:")
    engine.admin("/pause_generation", {"mode": "in_place"})
    future = engine.submit([10])
    engine.wait_until(lambda: engine.metric("vagen_engine_waiting_requests") == 1, "one waiting")
    os.kill(engine.process.pid, signal.SIGTERM)
    assert future.result(30)["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.process.wait(30) == 0


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected a model folder with a config.json"):
        EngineModel(tmp_path, EngineConfig())
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="the local engine runs .*qwen2_5_vl, qwen3.*, got model type gpt2"):
        EngineModel(tmp_path, EngineConfig())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"max_running": 0}, r"\$.engine.max_running: expected int >= 1, got 0"),
        ({"device": "tpu"}, r"\$.engine.device: expected cpu, cuda or cuda:N"),
        ({"pause_timeout_s": 0}, r"\$.engine.pause_timeout_s"),
        ({"slots": 3}, r"\$.engine.slots: unknown key"),
    ],
)
def test_bad_settings_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        convert(raw, EngineConfig, "$.engine")


def test_samples_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(20000, 4)
    sampler = Sampler(4, [2], torch.device("cpu"))
    n = len(logits)
    tokens, logprobs = sampler(
        logits,
        torch.full((n,), 2.0).numpy(),
        torch.arange(n).numpy().astype("uint64"),
        torch.zeros(n, dtype=torch.int64).numpy(),
    )
    expected = torch.tensor([0.0, 0.5, -torch.inf, 1.5]).softmax(0)
    counts = torch.bincount(torch.from_numpy(tokens), minlength=4) / n
    assert counts[2] == 0
    torch.testing.assert_close(counts, expected, atol=0.012, rtol=0)
    torch.testing.assert_close(torch.from_numpy(logprobs), expected.log()[torch.from_numpy(tokens)])


def test_uniform_numbers_differ_by_seed_and_index_and_stay_below_one():
    draws = uniform(np.arange(1000, dtype=np.uint64).repeat(10), np.tile(np.arange(10), 1000))
    assert len(set(draws.tolist())) == 10000 and draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.01
    assert uniform(np.array([2**64 - 1], np.uint64), np.array([5]))[0] < 1


def test_bucket_is_raw_bytes_in_order():
    tensors = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.randn(2, 3), torch.randn(4, dtype=torch.bfloat16)]
    flat = flatten_bucket(tensors)
    assert flat.dtype == torch.uint8 and flat[:3].tolist() == [1, 2, 3] and len(flat) == 3 + 24 + 8
    for got, sent in zip(
        split_bucket(flat, [t.dtype for t in tensors], [t.shape for t in tensors]), tensors, strict=True
    ):
        assert torch.equal(got, sent)


def test_checksum_sees_values_and_names_but_no_order():
    a, b = torch.randn(3, 4), torch.randn(5)
    assert tensor_checksum(a) == tensor_checksum(a.clone()) != tensor_checksum(a + 1)
    assert tensor_checksum(a.T) == tensor_checksum(a.T.contiguous())
    sums = {"a": tensor_checksum(a), "b": tensor_checksum(b)}
    assert combined_checksum(sums) == combined_checksum(dict(reversed(sums.items())))
    assert combined_checksum(sums) != combined_checksum({"a": sums["b"], "b": sums["a"]})


def test_cache_drops_the_least_recently_used():
    cache = ByteBoundedCache[str](10)
    cache.put("a", "A", 5)
    cache.put("b", "B", 5)
    assert cache.get("a") == "A"
    cache.put("c", "C", 5)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("A", None, "C")
    cache.put("big", "X", 11)
    assert cache.get("big") is None and cache.get("a") == "A"
