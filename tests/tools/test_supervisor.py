"""The supervisor with real child processes: readiness, death, return by hand, interrupt, stop, CPU time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vagen.tools.child import Death, ProcessSpec, Stage
from vagen.tools.supervisor import InterruptedByUserError, ProcessLostError, Supervisor, stop_leftover

SERVER = """
import json, os, pathlib, signal, sys
ready = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("I serve", flush=True)
partial = ready.with_suffix(".partial")
partial.write_text(json.dumps({"pid": os.getpid()}))
partial.replace(ready)
while True:
    signal.pause()
"""
STUBBORN = SERVER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


class Events:
    """What the supervisor reported."""

    def __init__(self) -> None:
        self.deaths: list[Death] = []
        self.returns: list[tuple[str, int]] = []


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def supervisor(events: Events):
    made = Supervisor(
        restart_grace_s=20,
        stop_timeout_s=10,
        on_death=events.deaths.append,
        on_return=lambda name, pid: events.returns.append((name, pid)),
    )
    yield made
    made.stop_all()


def server(folder: Path, name: str = "server", program: str = SERVER, **more) -> ProcessSpec:
    ready = folder / f"{name}.json"
    return ProcessSpec(
        name=name, argv=(sys.executable, "-c", program, str(ready)), log=folder / f"{name}.log", ready=ready, **more
    )


def script(folder: Path, program: str, **more) -> ProcessSpec:
    return ProcessSpec(name="script", argv=(sys.executable, "-c", program), log=folder / "script.log", **more)


def test_a_process_serves_once_it_says_so(tmp_path, supervisor):
    supervisor.start(server(tmp_path))
    assert supervisor.processes["server"].stage is Stage.STARTING
    supervisor.wait_ready("server", 20)
    assert supervisor.processes["server"].stage is Stage.SERVING


def test_a_ready_file_of_an_earlier_start_does_not_count(tmp_path, supervisor):
    spec = server(tmp_path)
    assert spec.ready is not None
    spec.ready.write_text(f'{{"pid": {os.getpid()}}}')
    supervisor.start(spec)
    supervisor.processes["server"].poll()
    assert supervisor.processes["server"].stage is Stage.STARTING


def test_death_is_reported_with_signal_last_lines_and_command(tmp_path, supervisor, events):
    spec = server(tmp_path)
    supervisor.start(spec)
    supervisor.start(server(tmp_path, "other"))
    supervisor.wait_ready("server", 20)
    supervisor.wait_ready("other", 20)
    os.kill(supervisor.processes["server"].pid, signal.SIGKILL)
    supervisor.wait(lambda: bool(events.deaths), 20, "the death is seen")
    (death,) = events.deaths
    assert death.name == "server" and "SIGKILL" in death.cause
    assert death.log_tail == ("I serve",)
    assert death.command == spec.command
    assert supervisor.processes["other"].stage is Stage.SERVING


def test_a_process_started_again_by_hand_with_the_printed_command_is_watched(tmp_path, supervisor, events):
    supervisor.start(server(tmp_path))
    supervisor.wait_ready("server", 20)
    first = supervisor.processes["server"].pid
    os.kill(first, signal.SIGKILL)
    supervisor.wait(lambda: bool(events.deaths), 20, "the death is seen")

    by_hand = subprocess.Popen(["sh", "-c", f"exec {events.deaths[0].command}"], start_new_session=True)
    supervisor.wait(lambda: bool(events.returns), 20, "the return is seen")
    assert events.returns == [("server", by_hand.pid)]
    assert supervisor.processes["server"].stage is Stage.SERVING

    by_hand.kill()
    by_hand.wait()
    supervisor.wait(lambda: len(events.deaths) == 2, 20, "the second death is seen")
    assert "started by hand" in events.deaths[1].cause


def test_a_zombie_started_by_hand_counts_as_gone(tmp_path, supervisor, events):
    supervisor.start(server(tmp_path))
    supervisor.wait_ready("server", 20)
    os.kill(supervisor.processes["server"].pid, signal.SIGKILL)
    supervisor.wait(lambda: bool(events.deaths), 20, "the death is seen")
    by_hand = subprocess.Popen(["sh", "-c", f"exec {events.deaths[0].command}"], start_new_session=True)
    supervisor.wait(lambda: bool(events.returns), 20, "the return is seen")
    by_hand.kill()  # and nobody waits for it
    supervisor.wait(lambda: len(events.deaths) == 2, 20, "the second death is seen")
    by_hand.wait()


def test_a_process_started_by_hand_is_stopped_too(tmp_path, supervisor, events):
    supervisor.start(server(tmp_path))
    supervisor.wait_ready("server", 20)
    os.kill(supervisor.processes["server"].pid, signal.SIGKILL)
    supervisor.wait(lambda: bool(events.deaths), 20, "the death is seen")
    by_hand = subprocess.Popen(["sh", "-c", f"exec {events.deaths[0].command}"], start_new_session=True)
    supervisor.wait(lambda: bool(events.returns), 20, "the return is seen")
    supervisor.stop_all()
    assert by_hand.wait(timeout=20) == 0


def test_nobody_starts_it_again(tmp_path, events):
    supervisor = Supervisor(restart_grace_s=0.3, stop_timeout_s=5, on_death=events.deaths.append)
    supervisor.start(server(tmp_path))
    supervisor.wait_ready("server", 20)
    os.kill(supervisor.processes["server"].pid, signal.SIGKILL)
    with pytest.raises(ProcessLostError, match="server was killed by SIGKILL and was not started again within 0.3 s"):
        supervisor.wait(lambda: False, 20, "never")
    supervisor.stop_all()


def test_a_process_that_finds_its_work_done_need_not_serve(tmp_path, supervisor):
    supervisor.start(server(tmp_path, program="pass", is_complete=lambda: True))
    supervisor.wait_ready("server", 20)
    assert supervisor.processes["server"].stage is Stage.DONE


def test_death_before_serving_is_final_and_shows_why(tmp_path, supervisor):
    spec = server(tmp_path, program="import sys; print('no port left', flush=True); sys.exit(3)")
    supervisor.start(spec)
    with pytest.raises(ProcessLostError, match="ended with exit code 3 before it served(.|\n)*no port left"):
        supervisor.wait_ready("server", 20)


def test_a_time_out_names_what_was_waited_for(tmp_path, supervisor):
    supervisor.start(server(tmp_path, program="import signal\nsignal.pause()"))
    with pytest.raises(ProcessLostError, match="server serves: not within 0.2 s"):
        supervisor.wait_ready("server", 0.2)


def test_run_to_the_end_and_fail(tmp_path, supervisor):
    supervisor.run(script(tmp_path, "print('fine')"), 20)
    assert supervisor.processes["script"].stage is Stage.DONE
    with pytest.raises(ProcessLostError, match="script ended with exit code 1(.|\n)*ValueError: boom"):
        supervisor.run(script(tmp_path, "raise ValueError('boom')"), 20)
    supervisor.check()


ENDS = SERVER.replace("while True:\n    signal.pause()", "")


def test_the_end_of_a_process_whose_work_is_done_is_no_death(tmp_path, supervisor, events):
    supervisor.start(server(tmp_path, program=ENDS, is_complete=lambda: True))
    supervisor.wait(lambda: supervisor.processes["server"].stage is Stage.DONE, 20, "it ends")
    assert events.deaths == []


def test_a_process_that_ends_before_its_work_is_done_is_lost_even_with_exit_code_0(tmp_path, supervisor, events):
    supervisor.start(server(tmp_path))
    supervisor.wait_ready("server", 20)
    os.kill(supervisor.processes["server"].pid, signal.SIGTERM)
    supervisor.wait(lambda: bool(events.deaths), 20, "the end is seen")
    assert events.deaths[0].cause == "ended with exit code 0"


def test_an_unknown_exit_code_is_an_end_when_the_work_is_done(tmp_path, supervisor, events):
    spec = server(tmp_path, is_complete=(tmp_path / "finished").exists)
    supervisor.start(spec)
    supervisor.wait_ready("server", 20)
    os.kill(supervisor.processes["server"].pid, signal.SIGKILL)
    supervisor.wait(lambda: bool(events.deaths), 20, "the death is seen")
    by_hand = subprocess.Popen(["sh", "-c", f"exec {spec.command}"], start_new_session=True)
    supervisor.wait(lambda: bool(events.returns), 20, "the return is seen")
    (tmp_path / "finished").touch()
    by_hand.terminate()
    by_hand.wait()
    supervisor.wait(lambda: supervisor.processes["server"].stage is Stage.DONE, 20, "it is done")
    assert len(events.deaths) == 1


def test_a_stubborn_process_is_killed_within_the_time_out(tmp_path, events):
    supervisor = Supervisor(restart_grace_s=5, stop_timeout_s=0.3)
    supervisor.start(server(tmp_path, program=STUBBORN))
    supervisor.wait_ready("server", 20)
    pid = supervisor.processes["server"].pid
    started = time.monotonic()
    supervisor.stop_all()
    assert time.monotonic() - started < 10
    assert not psutil.pid_exists(pid)


def test_what_a_dead_process_left_behind_is_stopped(tmp_path, supervisor, events):
    parent = (
        f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {SERVER!r}, {str(tmp_path / "grandchild.json")!r}])
"""
        + SERVER
    )
    supervisor.start(server(tmp_path, program=parent))
    supervisor.wait_ready("server", 20)
    supervisor.wait((tmp_path / "grandchild.json").exists, 20, "the grandchild serves")
    os.kill(supervisor.processes["server"].pid, signal.SIGKILL)
    supervisor.wait(lambda: bool(events.deaths), 20, "the death is seen")
    grandchild = psutil.Process(int((tmp_path / "grandchild.json").read_text().split(":")[1].strip(" }")))
    supervisor.stop_all()
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_ctrl_c_ends_the_wait_and_leaves_the_children_to_an_orderly_stop(tmp_path):
    """In a process of its own, which gets the signal as a whole group would from a terminal."""
    program = f"""
import os, pathlib, signal, sys
from vagen.tools.child import *
from vagen.tools.supervisor import *
folder = pathlib.Path({str(tmp_path)!r})
spec = ProcessSpec(name="server", argv=(sys.executable, "-c", {SERVER!r}, str(folder / "server.json")),
                   log=folder / "server.log", ready=folder / "server.json")
supervisor = Supervisor(restart_grace_s=20, stop_timeout_s=10)
with supervisor.signals():
    supervisor.start(spec)
    supervisor.wait_ready("server", 20)
    os.killpg(0, signal.SIGINT)
    try:
        supervisor.wait(lambda: False, 20, "never")
    except InterruptedByUserError:
        # The child is still there: only this process was told.
        alive = supervisor.processes["server"].poll() is None and supervisor.processes["server"].alive
        supervisor.stop_all()
        sys.exit(130 if alive and supervisor.processes["server"].exit_code == 0 else 99)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, start_new_session=True, check=False)
    assert done.returncode == 130


def test_interrupt_is_raised_at_the_next_look(supervisor):
    with supervisor.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(InterruptedByUserError):
            supervisor.check()


def test_cpu_time_is_counted_over_all_starts(tmp_path, supervisor):
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    for expected in (0.4, 0.8):
        supervisor.run(script(tmp_path, burn), 60)
        assert expected <= supervisor.cpu_seconds()["script"] < expected + 1.5


def test_the_environment_is_part_of_child_and_command(tmp_path, supervisor):
    spec = script(tmp_path, "import os; print(os.environ['ANSWER'])", env={"ANSWER": "forty two"})
    supervisor.run(spec, 20)
    assert (tmp_path / "script.log").read_text() == "forty two\n"
    shown = subprocess.run(["sh", "-c", spec.command], capture_output=True, text=True, check=True)
    assert shown.stdout == "forty two\n"


def test_a_leftover_of_this_folder_is_stopped_and_a_stranger_is_not(tmp_path):
    spec = server(tmp_path)
    assert spec.ready is not None
    left = subprocess.Popen(spec.argv, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not spec.ready.exists() and time.monotonic() < deadline:
        left.poll()
    stop_leftover(spec.ready, tmp_path / "elsewhere", 5)
    assert left.poll() is None
    stop_leftover(spec.ready, tmp_path, 5)
    assert left.wait(timeout=20) == 0
