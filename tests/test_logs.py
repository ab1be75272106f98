"""The log: whole lines in order, nobody waits for a reader, the last lines come before the end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from service.logs import LogWriter
from tests.processes import wait_until

START = "import logging, sys, threading, warnings\nfrom service.logs import start_logging\n"
START += "start_logging('info', on_drop=lambda count: None)\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The writing end stays open: a writer's thread may have it still."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def make(fd: int, max_waiting: int = 100) -> tuple[logging.Logger, LogWriter, list[int]]:
    drops: list[int] = []
    writer = LogWriter(fd, on_drop=drops.append, max_waiting=max_waiting)
    logger = logging.Logger("x")
    logger.addHandler(writer)
    return logger, writer, drops


def fill(fd: int) -> None:
    os.set_blocking(fd, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(fd, b"." * 4096)
    os.set_blocking(fd, True)


def read_all(fd: int) -> str:
    """What is there now."""
    data = b""
    os.set_blocking(fd, False)
    try:
        while piece := os.read(fd, 1 << 16):
            data += piece
    except BlockingIOError:
        os.set_blocking(fd, True)
    return data.decode().lstrip(".")


def test_lines_come_whole_and_in_order(pipe: tuple[int, int]) -> None:
    logger, writer, drops = make(pipe[1])
    for number in range(50):
        logger.info("%d 你好 \udcff", number)
    assert writer.flush_within(5) and not drops
    assert read_all(pipe[0]).splitlines() == [f"{number} 你好 \\udcff" for number in range(50)]


def test_nobody_waits_for_a_reader_and_what_was_dropped_is_told_when_one_comes(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    logger, writer, drops = make(pipe[1], max_waiting=10)
    fill(pipe[1])
    started_at = time.monotonic()
    for number in range(1000):
        logger.info("%d", number)
    assert not writer.flush_within(0.05)
    assert time.monotonic() - started_at < 1  # a thousand lines take about 10 ms
    assert 989 <= len(drops) <= 990  # the queue's ten, and the one at which the writer hangs
    said = read_all(pipe[0])
    wait_until(lambda: writer.flush_within(1), within_s=5, what="the rest is written")
    said += read_all(pipe[0])
    numbers = list(map(int, said.splitlines()))
    assert len(numbers) == 1000 - len(drops) and numbers == sorted(numbers) and numbers[0] == 0
    assert caplog.messages == [f"log: {len(drops)} lines were dropped, nobody took them"]


def test_a_reader_that_is_gone_costs_its_lines_and_nothing_else() -> None:
    reading, writing = os.pipe()
    logger, writer, drops = make(writing)
    os.close(reading)
    for _ in range(3):
        logger.info("x")
    assert writer.flush_within(5) and drops == [1, 1, 1]


def test_a_file_that_somebody_made_non_blocking_gets_whole_lines(pipe: tuple[int, int]) -> None:
    logger, writer, _ = make(pipe[1])
    os.set_blocking(pipe[1], False)
    logger.info("y" * 200_000)  # more than the pipe holds
    read = bytearray()
    while len(read) < 200_001:
        read += os.read(pipe[0], 1 << 20)
    assert bytes(read) == b"y" * 200_000 + b"\n" and writer.flush_within(5)


def test_a_line_that_cannot_be_formatted_says_so(pipe: tuple[int, int]) -> None:
    logger, writer, _ = make(pipe[1])
    logger.info("%d", "three")
    assert writer.flush_within(5)
    assert "x: cannot be formatted: '%d' (TypeError" in read_all(pipe[0])


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ("sys.exit(3)", 3, "INFO root: last"),
        ("raise ValueError('odd')", 1, "ValueError: odd"),
        ("t = threading.Thread(target=lambda: 1 / 0, name='worker'); t.start(); t.join()", 0, "thread worker"),
        ("warnings.warn('beware')", 0, "beware"),
    ],
)
def test_the_last_lines_are_written_before_the_process_ends(ending: str, code: int, says: str) -> None:
    script = f"{START}for _ in range(500): logging.info('last')\n{ending}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == code and done.stderr.count("INFO root: last") == 500
    assert says in done.stderr


def test_a_full_pipe_does_not_keep_a_process_that_wants_to_end(pipe: tuple[int, int]) -> None:
    fill(pipe[1])
    script = f"{START}logging.info('never read')\nraise ValueError('odd')"
    done = subprocess.run([sys.executable, "-c", script], stderr=pipe[1], check=False, timeout=10)
    assert done.returncode == 1
