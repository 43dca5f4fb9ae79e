"""`vagen sglang`, `vagen watch-engine` and `vagen doctor`: engines started, watched and examined.

What they run is imported inside the commands.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vagen.tools.console import user_errors

if TYPE_CHECKING:
    from vagen.tools.doctor import Finding

__all__ = ["doctor_app", "serve_sglang", "watch_engine"]

doctor_app = typer.Typer(
    invoke_without_command=True,
    help="""Say what this machine offers, and what is missing; exit code 1 when something needed is.

    Examples:

      vagen doctor

      vagen doctor engine http://127.0.0.1:30000 --model runs/demo-seed0/model
    """,
)

ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="VAGEN_API_KEY", help="Of generation.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-api-key", envvar="VAGEN_ADMIN_API_KEY", help="Of pausing and weights.")
]
PauseTimeout = Annotated[
    float,
    typer.Option(
        "--pause-timeout",
        metavar="SECONDS",
        min=1.0,
        help="Longest time without a token that a living learner may cause: more than its broadcast_timeout_s.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def serve_sglang(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Hugging Face model folder.")],
    port: Annotated[int, typer.Option("--port", help="0 picks a free one.")] = 0,
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    tp_size: Annotated[int, typer.Option("--tp-size", help="Processes that share the weights.")] = 1,
    max_running: Annotated[int, typer.Option("--max-running", help="Requests that generate at once.")] = 64,
    api_key: ApiKey = None,
    admin_api_key: AdminKey = None,
    pause_timeout_s: PauseTimeout = 60.0,
    ready_file: Annotated[Path | None, typer.Option("--ready-file", help="Written once it serves.")] = None,
    venv: Annotated[Path | None, typer.Option("--venv", help="Default: .sglang, of `make sglang-cpu`.")] = None,
) -> None:
    """Serve a model with SGLang on this machine's CPU, from the environment of `make sglang-cpu`.

    Goes on by itself when its learner is lost; ends with exit code 1 when it is stuck (see `vagen watch-engine`).

    Example:

      vagen sglang --model runs/demo-seed0/model --port 30000
    """
    with user_errors():
        from vagen.common.logging import setup_logging
        from vagen.tools.launch import free_port
        from vagen.tools.sglang_cpu.serve import SGLangOptions, run_sglang

        setup_logging("INFO")
        run_sglang(
            SGLangOptions(
                model_dir=model,
                host=host,
                port=port or free_port(),
                tp_size=tp_size,
                max_running=max_running,
                api_key=api_key,
                admin_api_key=admin_api_key,
                pause_timeout_s=pause_timeout_s,
                ready_file=ready_file,
                venv=venv,
            )
        )


def watch_engine(
    url: Annotated[str, typer.Argument(metavar="URL", help="A SGLang that serves.")],
    pause_timeout_s: PauseTimeout = 60.0,
    api_key: ApiKey = None,
    admin_api_key: AdminKey = None,
) -> None:
    """Let a SGLang go on whose learner was lost; exit code 1 once it is stuck and must be started anew.

    `vagen sglang` does this by itself.

    Example:

      vagen watch-engine http://127.0.0.1:30000 --admin-api-key KEY || systemctl restart sglang
    """
    with user_errors():
        import threading

        from vagen.common.logging import setup_logging
        from vagen.tools.engine_watchdog import EngineWatchdog

        setup_logging("INFO")
        EngineWatchdog(
            url=url.rstrip("/"), api_key=api_key, admin_api_key=admin_api_key, pause_timeout_s=pause_timeout_s
        ).watch(threading.Event())


@doctor_app.callback()
def doctor(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from vagen.tools.doctor import examine

        _report(examine(), as_json=False)


@doctor_app.command("engine")
def doctor_engine(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running engine: SGLang or the local one.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="The learner's model folder, to compare with.")
    ] = None,
    api_key: ApiKey = None,
    admin_api_key: AdminKey = None,
    update: Annotated[
        bool, typer.Option("--update", help="Publish changed weights and then those of DIR; not while it trains.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="Of each call.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Say whether an engine is fit to train with; exit code 1 when something would break training.

    Examples:

      vagen doctor engine http://127.0.0.1:30000

      vagen doctor engine http://10.0.0.7:30000 --model runs/a/model --admin-api-key KEY --update --json
    """
    with user_errors():
        from vagen.tools.engine_doctor import EngineDoctor

        doctor = EngineDoctor(
            url=url,
            model_dir=model,
            api_key=api_key,
            admin_api_key=admin_api_key,
            update=update,
            timeout_s=timeout_s,
        )
        findings = list(doctor.examine())
    _report(findings, as_json)


def _report(findings: Sequence[Finding], as_json: bool) -> None:
    """Print findings, and exit with 1 when something needed is missing."""
    passed = all(finding.ok for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": passed, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            typer.echo(f"{'ok ' if finding.ok else 'NO '} {finding.name:<14} {finding.text}")
    raise typer.Exit(0 if passed else 1)
