"""Flags and variables: what is unknown or impossible names itself."""

from __future__ import annotations

import pytest

from service.settings import ENV_PREFIX, Settings, SettingsError, memory, read_settings


def read(*argv: str, **environ: str) -> Settings:
    return read_settings(
        Settings, argv, environ, prog="chatglm-service", prefix=ENV_PREFIX, not_ours=("CHATGLM_WEBUI_",)
    )


def test_a_flag_beats_the_environment_which_beats_the_default() -> None:
    assert read().max_batch_size == 3
    assert read(CHATGLM_MAX_BATCH_SIZE="5").max_batch_size == 5
    assert read("--max-batch-size", "7", CHATGLM_MAX_BATCH_SIZE="5").max_batch_size == 7
    assert read("--kv-memory=2G", "--drain-s", "0.5").kv_memory == 2 * 2**30


@pytest.mark.parametrize(
    ("argv", "environ", "names"),
    [
        (["--colour", "red"], {}, "--colour"),
        (["--max-batch", "3"], {}, "--max-batch"),
        (["extra"], {}, "extra"),
        (["--max-batch-size", "0"], {}, "--max-batch-size"),
        (["--max-batch-size", "three"], {}, "three"),
        (["--quantization", "int8"], {}, "int8"),
        (["--drain-s", "nan"], {}, "--drain-s"),
        (["--socket-path", ""], {}, "--socket-path"),
        ([], {"CHATGLM_COLOUR": "red"}, "CHATGLM_COLOUR"),
        ([], {"CHATGLM_DEVICE": "tpu"}, "CHATGLM_DEVICE"),
        ([], {"CHATGLM_MAX_QUEUE": "-1"}, "CHATGLM_MAX_QUEUE"),
    ],
)
def test_what_is_wrong_names_itself(argv: list[str], environ: dict[str, str], names: str) -> None:
    with pytest.raises(SettingsError, match=names):
        read(*argv, **environ)


def test_a_sister_programs_variables_are_not_ours() -> None:
    assert read(CHATGLM_WEBUI_PORT="1", PATH="/bin") == Settings()


@pytest.mark.parametrize(("text", "bytes_"), [("512", 512), ("1k", 1024), ("3MiB", 3 * 2**20), ("2G", 2**31)])
def test_sizes(text: str, bytes_: int) -> None:
    assert memory(text) == bytes_


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "2T", "G"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        memory(text)
