"""Sessions of agents and libraries from package registries with a scripted model.

`make clients` installs them. `python -m tests.support.client_sessions` records their requests into
`tests/server/recorded`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.counting import NO_CLIENTS
from tests.support.http_fixtures import ROOT
from tests.support.recorded_requests import FOLDER, RecordedRequest, RecordingProxy, distinct
from tests.support.scripted_model import call_of, products, serving_script

CLIENTS = ROOT / ".clients"
PROGRAMS = ROOT / "tests" / "server" / "clients"
MODEL = "repeater"
CATALOGUED = "gpt-5.5"  # a name for which Codex sends `apply_patch`
END = "All done."
NUM_CALLS = 10
TIMEOUT_S = 180.0
_PROVIDER = (
    'model_providers.tandem={{name="Tandem",base_url="{url}/v1",wire_api="responses",'
    'env_key="KEY",request_max_retries=0,stream_max_retries=0}}'
)


@dataclass(frozen=True)
class Session:
    """Session of a client; it makes `NUM_CALLS` calls or more.

    Attributes:
      command: Program and arguments; `{url}` is the server's address.
      script: Outputs of the model.
      env: Additional environment variables; `{url}` as in `command`.
      recovers_from: Code of an error after which the client sends another request.
      model: Name of the served model.
    """

    command: Sequence[str]
    script: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    recovers_from: str | None = None
    model: str = MODEL

    def run(self, folder: Path) -> tuple[str, list[RecordedRequest]]:
        """Runs the client until it ends.

        Args:
          folder: Empty folder for model, home and project.

        Returns:
          The standard output of the client and the requests that were accepted.

        Raises:
          AssertionError: The client failed, or an answer is an error.
        """
        model, home, project = (folder / name for name in ("model", "home", "project"))
        for each in (model, home, project):
            each.mkdir()
        with (
            serving_script(model, self.script, "--model-name", self.model) as server,
            RecordingProxy(server.url).running() as proxy,
        ):
            env = {name: value.format(url=proxy.url) for name, value in self.env.items()}
            env |= {"HOME": str(home), "PATH": os.environ["PATH"]}
            command = [part.format(url=proxy.url) for part in self.command]
            done = subprocess.run(
                command,
                cwd=project,
                env=env,
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                capture_output=True,
                text=True,
                check=False,
            )
        failed = [each.answer.decode()[:500] for each in proxy.requests if each.status != 200]
        is_expected = [self.recovers_from and self.recovers_from in each for each in failed]
        assert all(is_expected), failed
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, [each for each in proxy.requests if each.status == 200]


def _codex_command(model: str, *settings: str) -> list[str]:
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", model]
    for value in ("model_provider=tandem", "web_search=disabled", _PROVIDER, *settings):
        flags += ["-c", value]
    program = str(CLIENTS / "node_modules" / ".bin" / "codex")
    return [program, "exec", *flags, "Write notes."]


def _codex() -> Session:
    shell = [call_of("exec_command", cmd=f"echo {n} >> a.txt; wc -l a.txt") for n in range(6)]
    script = [
        f"<think>\nI need a file.\n</think>\n\nI write it.{shell[0]}",
        *shell[1:],
        call_of("exec_command", cmd="cat a.txt") + call_of("exec_command", cmd="echo 'ü \"q\"'"),
        "",
        call_of("exec_command", cmd="exit 3"),
        f"Well.{call_of('multi_agent_v1.close_agent', target='none')}",
        END,
    ]
    return Session(_codex_command(MODEL), script, {"KEY": "none"})


def _codex_patching() -> Session:
    """Returns a session with a model of Codex's catalogue, which has a custom tool."""

    def patch(*lines: str) -> str:
        text = "\n".join(("*** Begin Patch", *lines, "*** End Patch"))
        return call_of("apply_patch", input=f"{text}\n")

    changes = [
        patch("*** Update File: a.txt", "@@", f"-{n}", f"+{n + 1}") for n in range(NUM_CALLS - 2)
    ]
    script = [patch("*** Add File: a.txt", "+0"), *changes, patch("no patch"), END]
    command = _codex_command(CATALOGUED, "features.multi_agent=false")
    return Session(command, script, {"KEY": "none"}, model=CATALOGUED)


def _claude() -> Session:
    shell = [call_of("Bash", command=f"echo {n} >> a.txt", description="Add") for n in range(4)]
    script = [
        f"<think>\nI need a file.\n</think>\n\nI write it.{shell[0]}",
        *shell[1:],
        call_of("Read", file_path="a.txt"),
        call_of("Edit", file_path="a.txt", old_string="2", new_string="two"),
        call_of("Write", file_path="b.txt", content='a "quoted" ü line\n'),
        call_of("Bash", command="cat a.txt", description="Show")
        + call_of("Read", file_path="b.txt"),
        "",
        f"It fails.{call_of('Bash', command='exit 3', description='Fail')}",
        END,
    ]
    program = str(CLIENTS / "node_modules" / ".bin" / "claude")
    command = [program, "-p", "Write notes.", "--model", MODEL, "--dangerously-skip-permissions"]
    env = {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none"}
    env |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL, "IS_SANDBOX": "1"}
    return Session(command, script, env)


def _library(program: str, api: str) -> Session:
    python = str(CLIENTS / "venv" / "bin" / "python")
    command = [python, str(PROGRAMS / f"{program}.py"), "{url}", api]
    return Session(command, products(NUM_CALLS), {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})


NODE_ENV = {"NODE_PATH": str(CLIENTS / "node_modules")}


def node_command(program: str, *words: str) -> list[str]:
    """Returns the command of a program in `PROGRAMS`; it requires `NODE_ENV`."""
    return ["node", str(PROGRAMS / f"{program}.cjs"), *words]


def _node(program: str, recovers_from: str | None = None) -> Session:
    command = node_command(program, "{url}")
    return Session(command, products(NUM_CALLS), NODE_ENV, recovers_from)


SESSIONS = {
    "codex": _codex(),
    "codex_patching": _codex_patching(),
    "claude_code": _claude(),
    "openai_node": _node("openai_loop"),
    "anthropic_node": _node("anthropic_loop", "thread_unsupported_request"),
    "litellm_chat": _library("litellm_loop", "chat"),
    "litellm_responses": _library("litellm_loop", "responses"),
    "litellm_messages": _library("litellm_loop", "messages"),
    "langchain_openai_chat": _library("langchain_loop", "chat"),
    "langchain_openai_responses": _library("langchain_loop", "responses"),
    "langchain_anthropic": _library("langchain_loop", "messages"),
}


def skip_without(path: str) -> None:
    """Skips a test if a program or package of `make clients` is not installed."""
    if not (CLIENTS / path).exists():
        pytest.skip(f"{NO_CLIENTS}: {path}")


def main() -> None:
    """Records the sessions with the given names, or all."""
    for name in sys.argv[1:] or SESSIONS:
        with tempfile.TemporaryDirectory() as folder:
            _, requests = SESSIONS[name].run(Path(folder))
        stored = [request.to_json() for request in distinct(requests)]
        text = json.dumps(stored, indent=1, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {len(requests)} requests, {len(stored)} stored", flush=True)


if __name__ == "__main__":
    main()
