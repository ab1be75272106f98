"""The shape of the project: who may import whom, a test for every module, and what must be nowhere."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from service.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("service", "webui") for path in (ROOT / folder).rglob("*.py"))

# Module → the modules of ours that it may import. A name stands for itself and, with a dot behind, for what is in it.
MAY_IMPORT: dict[str, set[str]] = {
    "service": set(),
    "service.__main__": {"service.daemon"},
    "service.protocol": set(),
    "service.settings": set(),
    "service.lifeline": set(),
    "service.socketfile": set(),
    "service.text": set(),
    "service.slots": set(),
    "service.metrics": set(),
    "service.audit": set(),
    "service.logs": set(),
    "service.probe": {"service.client", "service.protocol"},
    "service.doctor": {"service.client", "service.models.", "service.protocol", "service.settings"},
    "service.ledger": {"service.engine.base", "service.metrics", "service.protocol"},
    "service.client": {"service.protocol"},
    "service.prompt": {"service.protocol"},
    "service.admission": {"service.protocol"},
    "service.scheduler": set(),
    "service.sampling": {"service.protocol"},
    "service.streams": {"service.protocol", "service.text", "service.engine.base", "service.connection"},
    "service.connection": {"service.protocol", "service.server", "service.streams"},
    "service.server": {
        "service", "service.protocol", "service.engine.base", "service.streams", "service.metrics",
        "service.ledger", "service.connection", "service.desk", "service.hangup", "service.spool", "service.shelf",
    },
    "service.desk": {
        "service.protocol", "service.engine.base", "service.streams", "service.metrics", "service.ledger",
        "service.connection", "service.server", "service.shelf",
    },
    "service.spool": {"service.protocol", "service.engine.base", "service.streams"},
    "service.shelf": {
        "service.protocol", "service.engine.base", "service.ledger", "service.spool", "service.streams",
    },
    "service.guard": {"service.server", "service.socketfile"},
    "service.hangup": {"service.connection"},
    "service.engine": set(),
    "service.engine.base": {"service.protocol"},
    "service.engine.steps": {
        "service.engine.base", "service.protocol", "service.scheduler", "service.slots", "service.text",
    },
    "service.engine.local": {
        "service.engine.base", "service.engine.steps", "service.engine.thread", "service.admission",
        "service.prompt", "service.protocol",
    },
    "service.engine.thread": {
        "service.engine.base", "service.engine.steps", "service.protocol", "service.scheduler", "service.slots",
        "service.text",
    },
    "service.engine.runner": {"service.engine.base", "service.models.", "service.sampling", "service.protocol"},
    "service.models.": {"service.models.", "service.protocol", "service.engine.base", "service.text"},
    "service.daemon": {"service."},
    "webui": set(),
    "webui.": {"webui.", "service.client", "service.protocol", "service.settings", "service.lifeline"},
}  # fmt: skip
TORCH_FILES = ("service.models.", "service.engine.runner", "service.sampling")
GRADIO_FILES = ("webui.app",)
# Modules whose behaviour a test of another name covers.
TESTED_ELSEWHERE = {
    "service/__main__": "test_daemon",
    "service/daemon": "test_daemon",
    "service/connection": "test_server",
    "service/desk": "test_server",
    "service/hangup": "test_server",
    "service/shelf": "test_server",
    "service/guard": "faults/test_place",
    "service/lifeline": "test_supervisor",
    "service/engine/base": "test_server",
    "service/engine/local": "test_server",
    "service/engine/thread": "test_server",
    "service/engine/steps": "engine/test_steps",
    "service/models/compiled": "test_doctor",
    "webui/__main__": "test_supervisor",
    "webui/gateway": "webui/test_app",
    "webui/main": "webui/test_settings",
    "webui/script": "webui/test_restart",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (ROOT / inner.replace(".", "/")).with_suffix(".py").exists() or (
                    ROOT / inner.replace(".", "/") / "__init__.py"
                ).exists()
                yield inner if is_module else str(node.module)


def matches(name: str, patterns: set[str] | tuple[str, ...]) -> bool:
    return any(name == p or (p.endswith(".") and (name + ".").startswith(p)) for p in patterns)


def allowed(module: str) -> set[str]:
    exact = MAY_IMPORT.get(module)
    if exact is not None:
        return exact
    return next(names for key, names in MAY_IMPORT.items() if key.endswith(".") and module.startswith(key[:-1]))


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_modules_import_only_what_the_table_allows(path: Path) -> None:
    module = module_name(path)
    for name in imports(path):
        top = name.split(".")[0]
        if top in ("service", "webui"):
            assert matches(name, allowed(module)), f"{module} imports {name}"
        elif top in ("torch", "bitsandbytes", "accelerate"):
            assert matches(module, TORCH_FILES), f"{module} imports {top}"
        elif top == "gradio":
            assert matches(module, GRADIO_FILES), f"{module} imports {top}"
        elif top == "asyncio":
            policy = ("protocol", "text", "prompt", "admission", "slots", "scheduler", "sampling")
            assert module.removeprefix("service.") not in policy, f"{module} imports asyncio"
        assert top not in ("tests", "benchmarks")


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "__init__.py"], ids=module_name)
def test_every_module_has_its_test(path: Path) -> None:
    name = path.relative_to(ROOT).with_suffix("")
    default = Path(*name.parts[1 if name.parts[0] == "service" else 0 : -1]) / f"test_{name.name}"
    found = ROOT / "tests" / f"{TESTED_ELSEWHERE.get(str(name), default)}.py"
    assert found.exists(), f"{name} has no {found.relative_to(ROOT)}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert path.name == "__main__.py" or ast.get_docstring(ast.parse(path.read_text()))


def test_no_remote_code_and_no_evaluation_of_text_anywhere() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword):
                assert node.arg != "trust_remote_code", path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), path


def test_readme_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| `?([^|`]*)`? \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    for item in fields(Settings):
        flag = item.name.replace("_", "-")
        assert rows.get(flag, "missing").strip() == str(item.default), f"README: --{flag}"
    assert ENV_PREFIX in (ROOT / "README.md").read_text()


def test_readme_names_every_dependency() -> None:
    readme = (ROOT / "README.md").read_text()
    wanted = re.search(r"install_requires =\n((?:    .*\n)+)", (ROOT / "setup.cfg").read_text())
    assert wanted is not None
    for line in wanted[1].splitlines():
        name = re.split(r"[<>=]", line.strip())[0]
        assert f"`{name}`" in readme, f"README gives no reason for {name}"


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_static_checks_are_clean(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
