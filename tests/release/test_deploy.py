"""The files of `docs/deploy`, its page and the issue forms, checked without a daemon."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from shared.options.command_line import SHOWN, parse
from shared.options.options import Options
from shared.process.loop import EXIT_REFUSED
from shared.server.api.access_middleware import LIVE_PATH
from shared.server.api.connection import IDLE_S
from shared.server.api.transport import MAX_BODY_BYTES
from shared.server.engine_link.metric_texts import HELP
from tandem import command

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONFIG = DEPLOY / "serve.toml"
INSTRUCTIONS = {
    *("ARG", "FROM", "COPY", "RUN", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL"),
    *("HEALTHCHECK", "ENTRYPOINT"),
}


def instructions() -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction of the container file."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def unit() -> configparser.ConfigParser:
    made = configparser.ConfigParser(strict=False, interpolation=None)
    made.optionxform = str
    made.read_string((DEPLOY / "tandem.service").read_text(encoding="utf-8"))
    return made


def options_of(words: list[str]) -> Options:
    """The options of a command line of `tandem serve`, after its backend."""
    name, subcommand, *flags = words
    assert Path(name).name == "tandem"
    assert PROJECT["scripts"] == {"tandem": "tandem.command:main"}
    assert command.COMMANDS[subcommand] is command.serve
    if "--backend" in flags:
        at = flags.index("--backend")
        assert flags[at + 1] in command.backends.BACKENDS
        del flags[at : at + 2]
    return parse(flags)


def test_containerfile_has_known_instructions_and_declared_arguments():
    declared: set[str] = set()
    for keyword, rest in instructions():
        assert keyword in INSTRUCTIONS
        if keyword == "ARG":
            declared.add(rest.partition("=")[0])
        elif keyword in ("FROM", "RUN"):
            assert {*re.findall(r"\$\{(\w+)\}", rest)} <= declared, rest
            subprocess.run(["sh", "-n", "-c", rest if keyword == "RUN" else ":"], check=True)


def test_containerfile_extras_exist_in_project():
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    given = re.findall(r"EXTRAS=([\w,-]+)", text)
    assert len(given) == 3
    assert {name for names in given for name in names.split(",")} <= {
        *PROJECT["optional-dependencies"]
    }


def test_containerfile_port_equals_exposed_port():
    found = dict(instructions())
    words = json.loads(found["ENTRYPOINT"])
    assert "--api-key KEY" in (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    server = options_of([*words, "--api-key", "KEY"]).server
    assert str(server.port) == found["EXPOSE"]
    probe = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert f":{server.port}{LIVE_PATH}'" in probe[-1]
    compile(probe[-1], "HEALTHCHECK", "exec")


def test_dockerignore_keeps_build_inputs():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {"LICENSE", "README.md", "pyproject.toml", ".ci", "tandem", "models"} & {*ignored}
    assert {".git", ".venv*"} <= {*ignored}


def test_systemd_unit_starts_command_with_shipped_config():
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[-1] == "${CREDENTIALS_DIRECTORY}/serve.toml"
    assert service["LoadCredential"].startswith("serve.toml:")
    options = options_of([*words[:-1], str(CONFIG)])
    assert options.server.host == "127.0.0.1"
    assert int(service["TimeoutStopSec"]) > options.server.graceful_shutdown_timeout
    assert int(service["RestartPreventExitStatus"]) == EXIT_REFUSED == command.EXIT_REFUSED


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_unit_passes_verify(tmp_path: Path):
    text = (DEPLOY / "tandem.service").read_text(encoding="utf-8")
    made = tmp_path / "tandem.service"
    made.write_text(re.sub(r"(?<=^ExecStart=)\S+", "/bin/true", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert "tandem.service" not in done.stderr, done.stderr


PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
OF_OTHER_PROGRAMS = {"--now", "--gpus", "--time"}
"""Flags of systemctl and docker on the page."""


def block(language: str) -> str:
    """The first block of code in a language on the page."""
    return re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[1]


def test_deployment_page_flags_exist():
    named = {*re.findall(r"(?<!\w)--[a-z][a-z-]+", PAGE)}
    assert named - OF_OTHER_PROGRAMS <= SHOWN
    assert named >= OF_OTHER_PROGRAMS


def test_deployment_page_metrics_exist():
    named = {*re.findall(r"`tandem:(\w+)`", PAGE)}
    assert len(named) > 6
    assert named <= HELP.keys()


def test_deployment_page_config_is_valid(tmp_path: Path):
    config = tmp_path / "serve.toml"
    config.write_text(block("toml"), encoding="utf-8")
    options = parse(["--config", str(config)])
    scrape = yaml.safe_load(block("yaml"))["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"127.0.0.1:{options.server.admin_port}"]
    assert options.server.allowed_hosts in block("nginx")


def test_deployment_page_proxy_matches_limits():
    site = block("nginx")
    assert f"client_max_body_size {MAX_BODY_BYTES >> 20}m;" in site
    assert int(re.search(r"keepalive_timeout (\d+)s;", site)[1]) < IDLE_S
    assert f"after {IDLE_S} s" in site


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
KINDS = {"textarea", "input", "dropdown", "checkboxes", "markdown"}


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=str)
def test_issue_form_has_known_structure(path: Path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (
        {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels"}
    )
    ids = [part["id"] for part in form["body"]]
    assert len({*ids}) == len(ids)
    for part in form["body"]:
        assert part["type"] in KINDS
        assert part.keys() <= {"type", "id", "attributes", "validations"}
        assert part["attributes"]["label"]
        if part["type"] in ("dropdown", "checkboxes"):
            assert part["attributes"]["options"]
    assert "tandem env" in path.read_text(encoding="utf-8")


def test_ci_workflow_runs_developer_script():
    path = ROOT / ".github" / "workflows" / "ci.yml"
    steps = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {"make --jobs=2 test", "make wheel", "make docs"} <= {*lines}
