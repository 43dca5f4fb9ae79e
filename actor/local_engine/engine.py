"""The engine's loop: one thread that owns the model and batches whatever requests there are.

    inbox  <- submit, abort, pause, resume, apply_weights   (any thread; run here, between two steps)
    step   =  schedule (waiting -> slots), run (prefill arrivals, then one token for every slot), postprocess
    outbox -> `on_finished(requests)`, once a step

Consumes the inbox; waits only when nothing can run, at most `_TICK_S`; is unblocked by whatever enters the inbox.
Running requests occupy the slots 0..R-1 of the KV cache without gaps. Weights change between two steps only, so the
version of a token is the version in force while its logits were computed. Knows nothing of HTTP or of process groups.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from vagen.actor.local_engine.cache import ByteBoundedCache
from vagen.actor.local_engine.config import EngineConfig
from vagen.actor.local_engine.model import EngineModel
from vagen.actor.local_engine.requests import Request
from vagen.actor.local_engine.sampling import Sampler
from vagen.common.metrics import Metrics

__all__ = ["Engine", "PauseMode"]

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
R = TypeVar("R")

_TICK_S = 0.1
"""Longest wait for the inbox: the grain of the time-outs of requests and pauses."""


class Engine:
    """Continuous batching over the slots of one model."""

    def __init__(
        self,
        model: EngineModel,
        config: EngineConfig,
        metrics: Metrics,
        *,
        on_finished: Callable[[Sequence[Request]], None],
        on_pause_expired: Callable[[], None],
        on_died: Callable[[], None],
    ) -> None:
        """The callbacks are called on the engine's thread and must not block."""
        self.weight_version = config.weight_version
        self._model = model
        self._config = config
        self._metrics = metrics
        self._on_finished = on_finished
        self._on_pause_expired = on_pause_expired
        self._on_died = on_died
        forbidden = model.vision_tokens.forbidden_token_ids if model.vision_tokens is not None else ()
        self._sampler = Sampler(model.vocab_size, forbidden, model.device)
        self._features = ByteBoundedCache[Tensor](config.image_cache_bytes)
        # The server bounds the requests that it lets in, administrators are few.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        slots = config.max_running
        self._tokens = np.zeros(slots, np.int64)
        """By slot: last sampled token, not in the cache yet."""
        self._positions = np.zeros(slots, np.int64)
        self._lengths = np.zeros(slots, np.int64)
        self._temperatures = np.zeros(slots, np.float32)
        self._seeds = np.zeros(slots, np.uint64)
        self._indices = np.zeros(slots, np.int64)
        """By slot: tokens sampled so far."""
        self._columns = (
            self._tokens,
            self._positions,
            self._lengths,
            self._temperatures,
            self._seeds,
            self._indices,
        )
        self._paused_since: float | None = None
        self._pause_deadline = 0.0
        self._next_sweep = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Abort everything and stop the thread."""
        self._inbox.put(self._shut_down)
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """False once the thread has ended, whether closed or by an error."""
        return self._thread.is_alive()

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self._paused_since is not None

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting."""
        return len(self._running), len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Tokens held over tokens that all slots can hold."""
        running = len(self._running)
        return float(self._lengths[:running].sum()) / (self._config.max_running * self._model.max_context)

    def submit(self, request: Request) -> None:
        """Queue a request; it comes back through `on_finished`. Any thread."""
        self._inbox.put(lambda: self._waiting.append(request))

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Run a method of the engine, or anything that writes to the model, between two steps. Any thread.

        Cancelling the future before its turn comes drops the call.
        """
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # handed to the caller, who raises it
                future.set_exception(error)

        self._inbox.put(run)
        return future

    # Run on the engine's thread, through `call`.

    def pause(self, mode: PauseMode) -> None:
        """Stop generating. `abort` ends all requests, `retract` drops their KV cache, `in_place` keeps it."""
        if self._paused_since is None:
            self._paused_since = time.monotonic()
        self.touch_pause()
        if mode == "abort":
            self.abort(lambda _: True, "aborted by a pause")
        elif mode == "retract":
            for request in reversed(self._running):
                request.num_retractions += 1
                self._waiting.appendleft(request)
            self._running.clear()

    def touch_pause(self) -> None:
        """Put off the end of the pause: an administrator is there."""
        self._pause_deadline = time.monotonic() + self._config.pause_timeout_s

    def resume(self) -> None:
        """Go on generating."""
        if self._paused_since is not None:
            self._metrics.count("vagen_engine_paused_seconds_total", time.monotonic() - self._paused_since)
            self._paused_since = None

    def abort(self, matches: Callable[[Request], bool], message: str) -> int:
        """End the requests that match with what they have, and return how many there were."""
        running = [slot for slot, request in enumerate(self._running) if matches(request)]
        ended = [self._running[slot] for slot in running] + [r for r in self._waiting if matches(r)]
        for request in ended:
            request.finish_reason = {"type": "abort", "message": message}
        self._release(running)
        if len(ended) > len(running):
            self._waiting = deque(request for request in self._waiting if request.finish_reason is None)
        self._finish(ended)
        return len(ended)

    def apply_weights(self, write: Callable[[], None], version: str | None) -> None:
        """Let `write` change the model's parameters, and forget what was computed from the old ones.

        The KV cache of running requests stays, as `in_place` asks; `retract` has dropped it before.
        """
        write()
        self._features.clear()
        if version is not None:
            self.weight_version = version
        self._metrics.count("vagen_engine_weight_updates_total")
        logger.info("weights are at version %s", self.weight_version)

    # The loop.

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_inbox()
                self._sweep()
                if self._can_run():
                    self.step()
        except Exception:
            logger.exception("the engine's thread died at version %s", self.weight_version)
            self._on_died()
            raise

    def _can_run(self) -> bool:
        return self._paused_since is None and bool(self._running or self._waiting)

    def _take_inbox(self) -> None:
        try:
            self._inbox.get(block=not self._can_run(), timeout=_TICK_S)()
            while not self._inbox.empty():
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def step(self) -> None:
        """Admit what fits, then generate one token for every request that runs."""
        start = time.perf_counter()
        for batch in self._schedule():
            first = len(self._running)
            self._append(first, self._prefill(batch))
        if self._running:
            running = len(self._running)
            logits = self._model.decode(self._tokens[:running], self._positions[:running], self._lengths[:running])
            self._positions[:running] += 1
            self._lengths[:running] += 1
            self._append(0, logits)
            self._metrics.count("vagen_engine_tokens_total", running, phase="decode")
        self._metrics.count("vagen_engine_busy_seconds_total", time.perf_counter() - start)

    def _schedule(self) -> list[list[Request]]:
        """Move waiting requests to free slots, in batches of similar length within `max_prefill_tokens`."""
        free = self._config.max_running - len(self._running)
        admitted = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        admitted.sort(key=_num_tokens)
        batches: list[list[Request]] = []
        for request in admitted:
            length = _num_tokens(request)
            batch = batches[-1] if batches else None
            padded = (len(batch) + 1) * length if batch else 0
            if batch and padded <= self._config.max_prefill_tokens and 4 * (length - _num_tokens(batch[0])) <= length:
                batch.append(request)
            else:
                batches.append([request])
        return batches

    def _prefill(self, batch: list[Request]) -> Tensor:
        """Logits [n, V] after the tokens of each request, which now occupies a slot."""
        first, n = len(self._running), len(batch)
        rows = [request.tokens_and_positions() for request in batch]
        lengths = np.array([len(ids) for ids, _ in rows])
        ids = np.zeros((n, int(lengths.max())), np.int64)
        positions = np.zeros((3, *ids.shape), np.int64)
        for i, (row_ids, row_positions) in enumerate(rows):
            ids[i, : lengths[i]] = row_ids
            positions[:, i, : lengths[i]] = row_positions
        for slot, request in enumerate(batch, first):
            self._positions[slot] = request.next_position + len(request.output_ids)
            self._temperatures[slot] = request.temperature
            self._seeds[slot] = request.seed
            self._indices[slot] = len(request.output_ids)
        self._lengths[first : first + n] = lengths
        logits = self._model.prefill(first, ids, positions, lengths, self._image_features(batch))
        self._running.extend(batch)
        self._metrics.count("vagen_engine_tokens_total", int(lengths.sum()), phase="prefill")
        return logits

    def _image_features(self, batch: Sequence[Request]) -> list[Tensor]:
        """Features of all images of a batch, in order; an image seen under these weights is not computed again."""
        images = [image for request in batch for image in request.images]
        known = {i.digest: features for i in images if (features := self._features.get(i.digest)) is not None}
        new = {image.digest: image for image in images if image.digest not in known}
        if new:
            computed = self._model.image_features([i.patches for i in new.values()], [i.grid for i in new.values()])
            for digest, features in zip(new, computed, strict=True):
                known[digest] = features
                # A copy: the split keeps the features of the whole batch alive.
                self._features.put(digest, features.clone(), features.nbytes)
        return [known[image.digest] for image in images]

    def _append(self, first: int, logits: Tensor) -> None:
        """Sample one token for each of the slots from `first` on, and let go of the requests that it finishes."""
        slots = slice(first, len(self._running))
        tokens, logprobs = self._sampler(logits, self._temperatures[slots], self._seeds[slots], self._indices[slots])
        self._tokens[slots] = tokens
        self._indices[slots] += 1
        batch = self._running[slots]
        for request, token, logprob in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
            request.add_token(token, logprob, self.weight_version)
        ended = [slot for slot, request in enumerate(batch, first) if request.finish_reason is not None]
        if ended:
            finished = [self._running[slot] for slot in ended]
            self._release(ended)
            self._finish(finished)

    def _release(self, slots: Sequence[int]) -> None:
        """Free slots, ascending; the last running ones move into the gaps."""
        for slot in reversed(slots):
            last = len(self._running) - 1
            request = self._running.pop()
            if slot != last:
                self._model.move_slot(last, slot, int(self._lengths[last]))
                for column in self._columns:
                    column[slot] = column[last]
                self._running[slot] = request

    def _finish(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.finish_reason is not None
            self._metrics.count("vagen_engine_requests_total", reason=request.finish_reason["type"])
        if requests:
            self._on_finished(requests)

    def _sweep(self) -> None:
        """Time-outs of requests and of a pause; looks once a tick."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + _TICK_S
        self.abort(lambda request: request.deadline < now, f"not finished in {self._config.request_timeout_s} s")
        if self.is_paused and now > self._pause_deadline:
            logger.warning(
                "paused and no administrator for %.0f s: resuming with version %s",
                self._config.pause_timeout_s,
                self.weight_version,
            )
            self._on_pause_expired()
            self.resume()

    def _shut_down(self) -> None:
        self.abort(lambda _: True, "the engine is shutting down")
        self._closing = True


def _num_tokens(request: Request) -> int:
    return len(request.prompt) + len(request.output_ids)
