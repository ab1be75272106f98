"""One frozen dataclass of settings → command-line flags, environment variables, validation.

Knows nothing of what the settings are for. A flag beats the environment, the environment beats the default; an
unknown flag, variable or value is a `SettingsError` that names itself. The webui declares its own dataclass and
reads it with the same `read_settings`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

S = TypeVar("S")
ENV_PREFIX = "CHATGLM_"
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class SettingsError(Exception):
    """A setting is unknown or has an impossible value. The message is one sentence for the operator."""


def setting(default: Any, help: str, parse: Callable[[str], Any]) -> Any:
    """A field of a settings dataclass. `parse` turns text into the value, or raises ValueError saying what it wants."""
    return field(default=default, metadata={"help": help, "parse": parse})


def one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return text

    return parse


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    wanted = f"a whole number from {low}" + (f" to {high}" if high is not None else "")

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < low or (high is not None and int(text) > high):
            raise ValueError(wanted)
        return int(text)

    return parse


def seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g}")
        return value

    return parse


def memory(text: str) -> int:
    """Bytes, with an optional unit: 512M, 2G."""
    match = re.fullmatch(r"(\d{1,12})([kmg]?)(i?b)?", text.lower())
    if match is None:
        raise ValueError("a size such as 512M or 2G")
    return int(match[1]) * _UNITS[match[2]]


def some_text(text: str) -> str:
    if not text:
        raise ValueError("a value that is not empty")
    return text


FAMILIES = ("chatglm", "chatglm2", "chatglm3", "glm4", "llama")
LOG_LEVELS = one_of("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Settings:
    """The daemon's settings."""

    socket_path: str = setting("/tmp/chatglm.sock", "Unix socket to serve", some_text)
    model: str = setting("auto", "model folder or GGUF file; auto: the one under --weights-dir", some_text)
    weights_dir: str = setting("model_weights", "where --model auto looks", some_text)
    family: str = setting("auto", "auto, chatglm, chatglm2, chatglm3, glm4 or llama", one_of("auto", *FAMILIES))
    max_batch_size: int = setting(3, "answers that are generated at once (KV slots)", whole(1, 64))
    max_context: int = setting(0, "tokens of one conversation, answer included; 0: the model's own", whole(0))
    kv_memory: int = setting(0, "memory for all KV slots, such as 2G; 0: what --max-context needs", memory)
    quantization: str = setting("auto", "auto, nf4, int4 or none", one_of("auto", "nf4", "int4", "none"))
    quantized_cache: str = setting("on", "on or off: keep what nf4 made beside the checkpoint", one_of("on", "off"))
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16", one_of("auto", "float32", "bfloat16", "float16"))
    device: str = setting("auto", "auto, cpu or cuda", one_of("auto", "cpu", "cuda"))
    threads: int = setting(0, "CPU threads of the engine; 0: one a core", whole(0, 1024))
    max_queue: int = setting(32, "requests that may wait; further ones are told busy", whole(0, 100_000))
    step_budget_ms: int = setting(100, "time of one engine step while somebody reads", whole(1, 10_000))
    drain_s: float = setting(25.0, "seconds that running answers get after the first TERM or INT", seconds(0, 3600))
    resume_s: float = setting(30.0, "seconds that an answer can be resumed or fetched", seconds(0, 3600))
    write_stall_s: float = setting(10.0, "seconds after which a reader that takes nothing is cut", seconds(0.1, 3600))
    max_connections: int = setting(4096, "connections at once", whole(1, 1_000_000))
    max_requests_per_connection: int = setting(64, "live requests of one connection", whole(1, 100_000))
    idle_s: float = setting(30.0, "seconds that a message which was begun may stand still", seconds(0.1, 3600))
    max_new_tokens: int = setting(0, "tokens that a client may ask for; 0: what the context holds", whole(0))
    max_deadline_s: float = setting(86400.0, "seconds that a client may ask for", seconds(0.1, 86400))
    step_limit_s: float = setting(30.0, "seconds after which an engine step is reported", seconds(0.1, 3600))
    spool_dir: str = setting("auto", "private folder for drained answers; auto: <socket>.spool", some_text)
    audit_file: str = setting("auto", "a line a request; auto: logs/audit.jsonl under Supervisor, else off", some_text)
    audit_max_bytes: int = setting(10_485_760, "size at which the audit file is rotated, such as 10M", memory)
    audit_backups: int = setting(5, "rotated audit files that are kept", whole(1, 1000))
    audit_text: str = setting("off", "on: the audit has prompts and answers too", one_of("on", "off"))
    log_level: str = setting("info", "debug, info, warning or error", LOG_LEVELS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def read_settings(
    cls: type[S],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    prefix: str,
    not_ours: Sequence[str] = (),
) -> S:
    """Settings from the command line and the environment. Raises `SettingsError`.

    `prefix` marks our variables; those that begin with one of `not_ours` belong to a sister program.
    """
    parser = _Parser(prog=prog, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    by_name: dict[str, Field[Any]] = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for name, item in by_name.items():
        parser.add_argument(
            "--" + name.replace("_", "-"), metavar="V", default=argparse.SUPPRESS,
            help=f"{item.metadata['help']} [{prefix}{name.upper()}, {item.default!s}]",
        )  # fmt: skip
    given = {**_from_environment(by_name, environ, prefix, not_ours)}
    given |= {name: ("--" + name.replace("_", "-"), text) for name, text in vars(parser.parse_args(argv)).items()}
    values = {}
    for name, (source, text) in given.items():
        try:
            values[name] = by_name[name].metadata["parse"](text)
        except ValueError as error:
            raise SettingsError(f"{source}: expected {error}, got {text!r}") from None
    return cls(**values)


def _from_environment(
    by_name: Mapping[str, Any], environ: Mapping[str, str], prefix: str, not_ours: Sequence[str]
) -> dict[str, tuple[str, str]]:
    found = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix) or variable.startswith(tuple(not_ours)):
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in by_name or variable != variable.upper():
            raise SettingsError(
                f"{variable}: no such setting; known are {', '.join(prefix + n.upper() for n in by_name)}"
            )
        found[name] = (variable, text)
    return found
