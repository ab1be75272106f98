"""The page's settings: command-line flags, `CHATGLM_WEBUI_*` variables, and which combinations are refused.

The reading itself is `service.settings`. Secrets never appear in a message.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.settings import LOG_LEVELS, SettingsError, one_of, read_settings, setting, some_text, whole

ENV_PREFIX = "CHATGLM_WEBUI_"


def _yes_or_no(text: str) -> bool:
    return one_of("true", "false")(text.lower()) == "true"


def _root_path(text: str) -> str:
    if text and (not text.startswith("/") or text.endswith("/")):
        raise ValueError("a path such as /glm, or nothing")
    return text


@dataclass(frozen=True, slots=True)
class WebSettings:
    """The page's settings."""

    host: str = setting("127.0.0.1", "address to listen on", some_text)
    port: int = setting(7860, "port to listen on", whole(1, 65535))
    socket_path: str = setting("/tmp/chatglm.sock", "the daemon's Unix socket [also CHATGLM_SOCKET_PATH]", some_text)
    auth: str = setting("", "USER:PASSWORD who may use the page; repeatable", some_text)
    auth_file: str = setting("", "file with one USER:PASSWORD a line", some_text)
    allow_anonymous: bool = setting(False, "serve other machines without passwords", _yes_or_no)
    root_path: str = setting("", "path below which a proxy serves the page, such as /glm", _root_path)
    log_level: str = setting("info", "debug, info, warning or error", LOG_LEVELS)


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that were found to be usable, and the (user, password) pairs they name."""

    settings: WebSettings
    credentials: tuple[tuple[str, str], ...]


def read_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """Settings from the command line and the environment. Raises `SettingsError`."""
    environ = dict(environ)
    if ENV_PREFIX + "SOCKET_PATH" not in environ and "CHATGLM_SOCKET_PATH" in environ:
        environ[ENV_PREFIX + "SOCKET_PATH"] = environ["CHATGLM_SOCKET_PATH"]
    settings = read_settings(WebSettings, _with_values(argv), environ, prog="chatglm-webui", prefix=ENV_PREFIX)
    credentials = (*_pairs(settings.auth, "--auth"), *_pairs_of_file(settings.auth_file))
    if not (_is_loopback(settings.host) or credentials or settings.allow_anonymous):
        raise SettingsError(
            f"--host {settings.host}: other machines could use the page without a password; give --auth USER:PASSWORD "
            "or --auth-file FILE, or --allow-anonymous if that is meant"
        )
    return Config(settings, credentials)


def _with_values(argv: Sequence[str]) -> list[str]:
    """`--allow-anonymous` needs no value, and all values of a repeated `--auth` become one, a line each."""
    plain: list[str] = []
    pairs: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--allow-anonymous":
            plain.append("--allow-anonymous=true")
        elif word.startswith("--auth="):
            pairs.append(word.removeprefix("--auth="))
        elif word == "--auth":
            pair = next(words, None)
            if pair is None:
                raise SettingsError("--auth: expected USER:PASSWORD")
            pairs.append(pair)
        else:
            plain.append(word)
    return [*plain, "--auth=" + "\n".join(pairs)] if pairs else plain


def _pairs(text: str, source: str) -> list[tuple[str, str]]:
    pairs = []
    for line in text.splitlines():
        user, colon, password = line.strip().partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not (user and colon and password):
            raise SettingsError(f"{source}: expected USER:PASSWORD, neither of them empty")
        pairs.append((user, password))
    return pairs


def _pairs_of_file(path: str) -> list[tuple[str, str]]:
    if not path:
        return []
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--auth-file {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    pairs = _pairs(text, f"--auth-file {path}")
    if not pairs:
        raise SettingsError(f"--auth-file {path}: names nobody")
    return pairs


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
