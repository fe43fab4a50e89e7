"""Sources contain no code that runs foreign code or opens foreign addresses.

Behaviour that only a call of a library shows is tested in `tests/server/test_no_remote_code.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ("shared", "jax_impl", "torch_impl", "kernels", "tandem")
BESIDE = ("bench", "models", "tests")

UNPICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
HTTP_CLIENTS = {"requests", "httpx", "aiohttp", "urllib", "urllib3", "ftplib", "smtplib"}
DOWNLOADS = {"huggingface_hub", "modelscope", "datasets"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.hub.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "runpy.run_path",
    "runpy.run_module",
    "joblib.load",
    "socket.create_connection",
    "http.client",
    "http.client.HTTPConnection",
}
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Arguments that only False leaves harmless."""

OF_TESTS_AND_BENCHES = HTTP_CLIENTS | {"eval", "exec", "compile", "__import__"}
OF_TESTS_AND_BENCHES |= {"socket.create_connection", "http.client", "http.client.HTTPConnection"}
"""Calls that clients and code inspection need."""

ALLOWED = {
    ("models/demo/functions.py", "exec"): "runs functions that it made itself",
    ("kernels/rooms.py", "import_module"): "names a kernel or an op of this project",
    ("torch_impl/triton_precompile.py", "import_module"): "names a kernel of this project",
    ("torch_impl/__init__.py", "import_module"): "names `llm` of this package",
    ("jax_impl/__init__.py", "import_module"): "the same",
    ("shared/offline/late_platform.py", "import_module"): "names the platform of a backend",
    ("shared/models/hub_client.py", "huggingface_hub"): "downloads a model that is given by its id",
    ("tandem/__init__.py", "import_module"): "names the default backend",
    ("tandem/command.py", "import_module"): "names one of two backends",
    ("shared/process/tp/worker.py", "import_module"): "names a backend, by the command line",
    ("shared/process/tp/worker.py", "socket.create_connection"): "calls the engine's process",
    ("shared/cluster/connecting.py", "socket.create_connection"): "tries the address of a Ray",
    ("shared/process/disaggregation/prefill_client.py", "http.client"): "calls `--prefill-servers`",
    ("shared/process/disaggregation/prefill_client.py", "http.client.HTTPConnection"): "the same",
    ("shared/cluster/transfer/memory_agent.py", "import_module"): "names a module of NIXL",
    ("shared/cluster/transfer/record_client.py", "socket.create_connection"): "fetches a record",
    ("shared/server/protocol/http_normalization.py", "urllib"): "decodes a path",
    ("shared/server/api/connection.py", "urllib"): "the same of another form",
    ("shared/router/starting.py", "import_module"): "imports Ray where it is chosen",
    ("shared/router/upstream.py", "urllib"): "splits the URL of a server",
    ("shared/options/router.py", "urllib"): "the same of a flag",
    ("shared/cluster/ray_serve.py", "urllib"): "checks the health of its own server",
    ("shared/text/json_schema_refs.py", "urllib"): "the same of a pointer",
    ("shared/images/data_url.py", "urllib"): "the same of a data URL",
}


def sources(folders: tuple[str, ...]) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def findings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of all that is forbidden anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            names = list(_called(node))
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if isinstance(node, ast.Call) or name in CALLS:
                yield node.lineno, name
            elif top in UNPICKLING | HTTP_CLIENTS | DOWNLOADS:
                yield node.lineno, top


def _called(call: ast.Call) -> Iterator[str]:
    name = _dotted(call.func)
    if name in CALLS:
        yield name
    if name.endswith("import_module"):
        named = call.args[0] if call.args else None
        if isinstance(named, ast.Constant):
            top = str(named.value).partition(".")[0]
            if top in UNPICKLING | HTTP_CLIENTS | DOWNLOADS:
                yield top
        elif not isinstance(named, ast.JoinedStr) or not isinstance(named.values[0], ast.Constant):
            yield "import_module"  # of a name that data gives
    for keyword in call.keywords:
        value = keyword.value
        is_false = isinstance(value, ast.Constant) and not value.value
        if keyword.arg in KEYWORDS and not is_false:
            yield keyword.arg


def _dotted(node: ast.expr) -> str:
    """The name that an expression is, as far as it is one."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def found_in(folders: tuple[str, ...]) -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), name)
        for path in sources(folders)
        for _, name in findings(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_sources_run_no_foreign_code_or_addresses():
    beside = {
        (path, name)
        for path, name in found_in(BESIDE)
        if name not in OF_TESTS_AND_BENCHES | {"import_module"} or path.startswith("models")
    }
    found = found_in(PROGRAM) | beside
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() <= found, "an exception that nothing needs any more"


FORBIDDEN = {
    "import pickle": "pickle",
    "from pickle import loads": "pickle",
    "import numpy, dill as d": "dill",
    "def f():\n    import shelve": "shelve",
    "import marshal": "marshal",
    "torch.load(path)": "torch.load",
    "from torch import load": "torch.load",
    "eval('1')": "eval",
    "exec(code)": "exec",
    "yaml.load(text)": "yaml.load",
    "np.load(path, allow_pickle=True)": "allow_pickle",
    "AutoModel.from_pretrained(name, trust_remote_code=flag)": "trust_remote_code",
    "subprocess.run('ls', shell=True)": "shell",
    "os.system('ls')": "os.system",
    "from urllib.request import urlopen": "urllib",
    "import requests": "requests",
    "import httpx": "httpx",
    "from http.client import HTTPConnection": "http.client",
    "importlib.import_module('pickle')": "pickle",
    "import_module(config['auto_map'])": "import_module",
    "socket.create_connection(('a', 80))": "socket.create_connection",
    "from huggingface_hub import snapshot_download": "huggingface_hub",
}


@pytest.mark.parametrize("code", FORBIDDEN)
def test_findings_detects_forbidden_code(code):
    assert FORBIDDEN[code] in {name for _, name in findings(ast.parse(code))}


@pytest.mark.parametrize(
    "code",
    ["model.eval()", "np.load(path, allow_pickle=False)", "subprocess.run(['ls'])", "json.loads(t)"]
    + ["import_module(f'shared.spec.{name}')", "re.compile('a')", "from http import HTTPStatus"],
)
def test_findings_accepts_harmless_code(code):
    assert not list(findings(ast.parse(code)))
