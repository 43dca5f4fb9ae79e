"""A synchronous core on the shared pool: what blocks, what fails, and how."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vagen.common.errors import EnvironmentFailure, ObservationError
from vagen.envs.base import Info, Observation, ParsedResponse, StepResult
from vagen.envs.registry import make_environment
from vagen.envs.threaded import ThreadedEnvironment

WAIT_S = 30.0


class GatedCore:
    """A core whose steps return only when the gate opens, and which raises what it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.closed = threading.Event()
        self.num_steps = 0
        self._error = error

    def reset(self, seed: int) -> tuple[Observation, Info]:
        return Observation(f"seed {seed}"), Info()

    def step(self, response: str) -> StepResult:
        self.num_steps += 1
        self.entered.set()
        if self._error is not None:
            raise self._error
        assert self.gate.wait(WAIT_S)
        return StepResult(
            observation=Observation(response),
            reward={"task": 1.0},
            terminated=True,
            truncated=False,
            info=Info(success=True),
            parsed=ParsedResponse(format_ok=True, action_valid=True, actions=()),
        )

    def system_prompt(self) -> str:
        return "rules"

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def _entered(core: GatedCore) -> None:
    assert await asyncio.to_thread(core.entered.wait, WAIT_S)


def test_a_slow_core_blocks_no_other_episode(executor: ThreadPoolExecutor) -> None:
    slow = GatedCore()

    async def play(seed: int) -> int:
        environment = make_environment("frozen_lake", {"max_turns": 4}, executor)
        await environment.reset(seed)
        num_turns = 0
        done = False
        while not done:
            done = (await environment.step("<think>left</think><answer>Left</answer>")).done
            num_turns += 1
        await environment.close()
        return num_turns

    async def main() -> None:
        held = asyncio.create_task(ThreadedEnvironment(slow, executor).step("go"))
        await _entered(slow)
        async with asyncio.timeout(WAIT_S):
            turns = await asyncio.gather(*(play(seed) for seed in range(40)))
        assert all(1 <= count <= 4 for count in turns)
        assert not held.done(), "the other episodes ended while the slow one was held"
        slow.gate.set()
        assert (await held).info.success

    asyncio.run(main())


def test_an_exception_of_the_core_is_an_environment_failure(executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        core = GatedCore(KeyError("lost"))
        environment = ThreadedEnvironment(core, executor)
        with pytest.raises(EnvironmentFailure, match="GatedCore.step raised KeyError: 'lost'") as caught:
            await environment.step("go")
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(EnvironmentFailure, match="an earlier step raised KeyError"):
            await environment.step("go")
        assert core.num_steps == 1
        await environment.close()
        await environment.close()
        assert core.closed.is_set()

    asyncio.run(main())


def test_an_error_of_ours_keeps_its_type(executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        with pytest.raises(ObservationError, match="as it was"):
            await ThreadedEnvironment(GatedCore(ObservationError("as it was")), executor).step("go")

    asyncio.run(main())


def test_a_hanging_call_times_out_and_its_thread_closes_the_core(executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        core = GatedCore()
        environment = ThreadedEnvironment(core, executor, timeout_s=0.2)
        with pytest.raises(EnvironmentFailure, match="still running after 0.2 s"):
            await environment.step("go")
        with pytest.raises(EnvironmentFailure, match="an earlier step timed out"):
            await environment.reset(0)
        await environment.close()
        assert not core.closed.is_set(), "the core is still in use by its thread"
        core.gate.set()
        assert await asyncio.to_thread(core.closed.wait, WAIT_S)

    asyncio.run(main())


def test_a_call_that_finds_no_thread_never_runs() -> None:
    async def main(pool: ThreadPoolExecutor) -> None:
        holder, waiting = GatedCore(), GatedCore()
        held = asyncio.create_task(ThreadedEnvironment(holder, pool).step("go"))
        await _entered(holder)
        with pytest.raises(EnvironmentFailure, match="still waiting for a thread after 0.1 s"):
            await ThreadedEnvironment(waiting, pool, timeout_s=0.1).step("go")
        holder.gate.set()
        await held
        assert waiting.num_steps == 0

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(main(pool))


def test_a_cancelled_call_leaves_the_environment_unusable(executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        core = GatedCore()
        environment = ThreadedEnvironment(core, executor)
        call = asyncio.create_task(environment.step("go"))
        await _entered(core)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(EnvironmentFailure, match="an earlier step was cancelled"):
            await environment.step("again")
        core.gate.set()
        await environment.close()
        assert await asyncio.to_thread(core.closed.wait, WAIT_S)

    asyncio.run(main())


def test_a_closed_environment_refuses_calls(executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        environment = ThreadedEnvironment(GatedCore(), executor)
        assert (await environment.reset(3))[0].text == "seed 3"
        assert environment.system_prompt() == "rules"
        await environment.close()
        with pytest.raises(EnvironmentFailure, match="closed"):
            await environment.reset(3)

    asyncio.run(main())
