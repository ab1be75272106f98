"""The daemon as a black box: a process on a socket, given a checkpoint, answers what the original answered.

"own": checkpoints made of the trimmed data, so that a fresh clone proves all families. "stand-in": the whole golden
checkpoints, where the optional golden data are.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncClient, Client
from service.protocol import Accepted, Delta, Done, Event, Started
from tests.models.chatglm import FAMILIES
from tests.models.golden import Asked, asked, golden
from tests.models.taught import EDITED, EDITED_PROMPT, teach
from tests.processes import daemon_command, running, wait_ready

# Three slots are the default: five users are more than that.
FLAGS = {"own": (), "stand-in": ("--max-batch-size", "3")}
EXACT = ("--quantization", "none", "--dtype", "float32", "--threads", "1")
NUM_ROUNDS = 5  # the answers are so short that one alone may be over before the last user has asked
GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1}


@dataclass(frozen=True)
class Served:
    """A daemon that was started, and what its model answers."""

    folder: Path
    process: subprocess.Popen[bytes]
    cases: dict[str, Asked]

    def ready(self) -> str:
        """The socket's path, once it answers."""
        wait_ready(self.folder / "s", log=self.folder / "log", process=self.process)
        return str(self.folder / "s")


@pytest.fixture(scope="module", params=["own", "stand-in"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """A daemon a family, all starting at once."""
    with contextlib.ExitStack() as stack:
        served = {}
        for name in FAMILIES:
            folder = tmp_path_factory.mktemp(name)
            if request.param == "own":
                checkpoint = folder / name
                cases = teach(name, checkpoint)
            else:
                found = golden(name, "stand-in", folder)
                checkpoint, cases = found.checkpoint, {case.name: case for case in asked(name, found.data)}
            command = daemon_command(folder / "s", "--model", str(checkpoint), *EXACT, *FLAGS[request.param])
            process = stack.enter_context(running(command, log=folder / "log"))
            served[name] = Served(folder, process, cases)
        yield served


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def ask(client: Client, case: Asked) -> list[Event]:
    return list(client.chat(case.messages, **GREEDY, max_new_tokens=case.max_new_tokens))


def cached(events: Sequence[Event]) -> int:
    """What `started` and `done` report, and they agree."""
    (started,) = [event for event in events if isinstance(event, Started)]
    done = events[-1]
    assert isinstance(done, Done) and done.usage.cached_tokens == started.cached_tokens
    assert done.usage.prompt_tokens == started.prompt_tokens
    return started.cached_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_one_user_gets_the_originals_text(name: str, fleet: dict[str, Served]) -> None:
    cases = fleet[name].cases
    with Client(fleet[name].ready()) as client:
        report = client.health()
        assert (report.family, report.quantization, report.slots) == (FAMILIES[name], "none", 3)
        given = {key: text_of(ask(client, case)) for key, case in cases.items()}
    assert given == {key: case.text for key, case in cases.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_five_users_at_once_get_each_their_own_text(name: str, fleet: dict[str, Served]) -> None:
    served = fleet[name]
    cases = (list(served.cases.values()) * 5)[:5]
    answers = asyncio.run(ask_at_once(served.ready(), cases))
    assert [list(map(text_of, of_one)) for of_one in answers] == [[case.text] * NUM_ROUNDS for case in cases]
    events = [event for of_one in answers for answer in of_one for event in answer]
    assert any(isinstance(event, Accepted) and event.queue_position for event in events)  # there was a queue


async def ask_at_once(path: str, cases: Sequence[Asked]) -> list[list[list[Event]]]:
    """Each user's answers, from a connection of its own; all of these are there before the first one asks."""

    async def ask_again_and_again(client: AsyncClient, case: Asked) -> list[list[Event]]:
        return [
            [event async for event in client.chat(case.messages, **GREEDY, max_new_tokens=case.max_new_tokens)]
            for _ in range(NUM_ROUNDS)
        ]

    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(await AsyncClient.connect(path)) for _ in cases]
        return list(await asyncio.gather(*map(ask_again_and_again, clients, cases)))


@pytest.mark.parametrize("fleet", ["own"], indirect=True)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_edited_prefix_lm_prompt_is_recomputed_and_an_identical_one_is_not(
    name: str, fleet: dict[str, Served]
) -> None:
    served = fleet[name]
    with Client(served.ready()) as client:
        first = client.chat(served.cases["two_turn_zh"].messages, **GREEDY, max_new_tokens=40)
        assert text_of(list(first)) == served.cases["two_turn_zh"].text
        edited = list(first.edit(EDITED_PROMPT))
        assert text_of(edited) == served.cases[EDITED].text
        again = ask(client, served.cases[EDITED])
        assert text_of(again) == served.cases[EDITED].text
        started = next(event for event in again if isinstance(event, Started))
        assert cached(again) == started.prompt_tokens - 1
        if name == "chatglm-6b":
            assert cached(edited) == 0  # most of the ids are the same, but each of them sees those that are not
        else:
            assert cached(edited) > started.prompt_tokens // 2
