"""Many clients at once, slow ones, lost ones and full queues: nobody notices, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
import pytest
from serving import WORDS, Serving, alone, serving, until

import edgelin
from edgelin.runtimes.pool import LostError
from edgelin.runtimes.server import process
from edgelin.runtimes.session import Bundle

ROOT = Path(__file__).parents[2]
LIMITS = {"slots": 5, "queue": 64, "max_tokens": 1_000_000, "sessions": 3}
ENDLESS: dict[str, Any] = {"prompt": "a", "max_tokens": 1_000_000}


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


class Client:
    """One of many: what it asks, and what a stream alone would write."""

    def __init__(self, bundle: Bundle, number: int) -> None:
        self.kind = ("whole", "stream", "slow", "leaves")[number % 4]
        self.asked = {
            "prompt": WORDS[number : number + 3 + 2 * number],
            "seed": number,
            "temperature": 0.5 + number / 20,
            "max_tokens": 3 + number,
        }
        self.wanted = alone(bundle, **self.asked)
        if self.kind == "leaves":
            self.asked["max_tokens"] = 1_000_000

    async def run(self, client: openai.AsyncOpenAI, turn: int) -> None:
        """Ask, and check every character."""
        if self.kind == "whole":
            answer = await client.completions.create(
                model="tiny", **self.asked,
                extra_body={"session_id": f"{self.asked['seed']}-{turn}", "session_position": 0},
            )  # fmt: skip
            assert answer.choices[0].text == self.wanted
            return
        text = ""
        async with await client.completions.create(
            model="tiny", stream=True, **self.asked
        ) as stream:
            async for part in stream:
                text += part.choices[0].text
                if self.kind == "slow":
                    await asyncio.sleep(0.01)
                if self.kind == "leaves" and len(text) > 2:
                    length = min(len(text), len(self.wanted) - 1)  # the last may be half a letter
                    assert text[:length] == self.wanted[:length]
                    return
        assert text == self.wanted


def _left() -> Counter[str]:
    """Objects of requests that are still there."""
    gc.collect()
    names = {"Job", "_Row", "Mailbox", "Reply", "Answer", "Lease", "SavedStream", "End"}
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(
        kind.__name__ for kind in kinds
        if kind.__name__ in names and kind.__module__.startswith("edgelin")
    )  # fmt: skip


def test_many_clients_are_answered_as_if_alone_and_leave_nothing(bundle: Bundle) -> None:
    clients = [Client(bundle, number) for number in range(32)]
    before = _left()
    memory = []

    async def rounds(served: Serving) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{served.address}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            for number in range(4):
                await asyncio.gather(*(each.run(client, number) for each in clients))
                await asyncio.to_thread(until, served.idle)
                memory.append(psutil.Process().memory_info().rss)

    def serve() -> None:
        with serving(bundle, **LIMITS) as served:
            asyncio.run(rounds(served))
            until(lambda: not served.server.server_state.tasks)
            assert len(served.api.sessions) == 3
            assert _left() - before == Counter({"SavedStream": 3})  # the sessions
            until(lambda: not served.server.server_state.connections)

    serve()
    assert memory[-1] - memory[1] < 4 * 2**20, memory
    assert _left() == before


def test_who_leaves_frees_the_slot_and_who_waits_leaves_the_queue(bundle: Bundle) -> None:
    with serving(bundle, slots=2, queue=2, max_tokens=1_000_000, endless=True) as served:
        with (
            served.asking(**ENDLESS), served.asking(**ENDLESS),
            served.asking(**ENDLESS), served.client() as client,
        ):  # fmt: skip
            until(lambda: served.engine._unfinished == 3 and served.engine._pool.free == 0)
            assert served.engine.queued == 1
            with pytest.raises(openai.RateLimitError, match="3 texts are being written") as full:
                client.completions.create(model="tiny", prompt="b", n=2)
            assert full.value.response.headers["retry-after"] == "1"
        until(served.idle)
        with served.client() as client:
            answer = client.completions.create(model="tiny", prompt=WORDS, seed=1, max_tokens=9)
        assert answer.choices[0].text == alone(bundle, WORDS, seed=1, max_tokens=9)


def test_a_client_that_does_not_read_is_cut_and_stalls_nobody(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(host: str, port: int, stall: int) -> socket.socket:
        listening = original(host, port, stall)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    original = process._listen
    monkeypatch.setattr(process, "_listen", listen)
    with (
        serving(bundle, slots=2, stall=1, max_tokens=1_000_000, endless=True) as served,
        served.client() as client,
        served.asking(**ENDLESS),
    ):
        until(lambda: served.engine._pool.free == 1)
        answer = client.completions.create(model="tiny", prompt=WORDS, seed=1, max_tokens=50)
        assert answer.choices[0].text == alone(bundle, WORDS, seed=1, max_tokens=50)
        until(served.idle)  # though the client is still there
        until(lambda: not served.server.server_state.connections)  # idle ones end too


def test_a_lost_stream_fails_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(bundle, **LIMITS) as served, served.client() as client:
        pool = served.engine._pool
        original, turns = pool.feed, iter(range(1000))

        def feed(inputs: Any) -> Any:
            outputs = original(inputs)
            if next(turns) == 4:
                victim = min(inputs)
                del outputs[victim]
                raise LostError("the state is lost", [victim], outputs)
            return outputs

        monkeypatch.setattr(pool, "feed", feed)
        settings = {"seed": 3, "max_tokens": 20}
        with ThreadPoolExecutor(2) as threads:
            with served.paused():
                answers = []
                for number, prompt in enumerate("ab"):
                    ask = partial(client.completions.create, prompt=prompt, **settings)
                    answers.append(threads.submit(ask, model="tiny"))
                    until(lambda count=number + 1: served.engine._unfinished == count)
            with pytest.raises(openai.InternalServerError, match="the state is lost"):
                answers[0].result()
            assert answers[1].result().choices[0].text == alone(bundle, "b", **settings)


def test_a_state_that_cannot_be_kept_fails_its_own_call(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinite state need not show in an answer at once."""
    with serving(bundle, **LIMITS) as served, served.client() as client:
        original = served.engine._pool.snapshot

        def snapshot(slot: int) -> Any:
            saved = original(slot)
            saved.tensors[next(iter(saved.tensors))][...] = np.inf
            return saved

        ask = partial(client.completions.create, model="tiny", prompt="a", max_tokens=200, seed=1)
        with ThreadPoolExecutor(1) as threads:
            with served.paused():
                other = threads.submit(ask)
                until(lambda: served.engine._unfinished == 1)
                monkeypatch.setattr(served.engine._pool, "snapshot", snapshot)
            with pytest.raises(openai.InternalServerError, match="is not finite"):
                ask(max_tokens=2, extra_body={"session_id": "one"})
            assert other.result().choices[0].text == alone(bundle, "a", seed=1, max_tokens=200)
        assert len(served.api.sessions) == 0


def test_a_long_prompt_holds_nobody_up(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the texts that are being written, a turn reads at most a chunk of all prompts."""
    with serving(bundle, endless=True, **LIMITS) as served, served.client() as client:
        pool, turns = served.engine._pool, []
        original = pool.feed

        def feed(inputs: Any) -> Any:
            turns.append(sorted(map(len, inputs.values())))
            return original(inputs)

        with served.asking(**ENDLESS):
            until(lambda: served.api.metrics.written._value.get() > 3)
            monkeypatch.setattr(pool, "feed", feed)
            prompts = [[5] * 30, [6] * 8, [7] * 3]
            answer = client.completions.create(
                model="tiny", prompt=prompts, seed=1, max_tokens=1, temperature=0
            )
            monkeypatch.undo()
        reads = [turn for turn in turns if turn != [1]]
        assert reads == [[1, 8], [1, 8], [1, 3, 5], [1, 8], [1, 8], [1, 1]]
        texts = [choice.text for choice in answer.choices]
        assert texts == [alone(bundle, p, max_tokens=1, temperature=0) for p in prompts]


def test_a_bug_is_told_and_the_server_goes_on(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(bundle, **LIMITS) as served, served.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "_steps", lambda: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="see its log"):
                client.completions.create(
                    model="tiny", prompt=["a"] * 9, n=3, extra_body={"temperature": 0}
                )
            with pytest.raises(openai.InternalServerError, match="see its log"):
                client.completions.create(model="tiny", prompt="a", extra_body={"session_id": "s"})
        until(served.idle)
        answer = client.completions.create(
            model="tiny", prompt="b", seed=3, max_tokens=20, extra_body={"session_id": "s"}
        )
        assert answer.choices[0].text == alone(bundle, "b", seed=3, max_tokens=20)


def test_an_end_refuses_what_is_new_and_cuts_what_does_not_end(bundle: Bundle) -> None:
    with serving(bundle, slots=2, max_tokens=1_000_000, endless=True) as served:
        with served.client() as client, httpx2.Client() as other:
            assert other.get(f"{served.address}/health").status_code == 200
            running = client.completions.create(model="tiny", stream=True, **ENDLESS)
            next(running)
            served.engine.drain(1)
            assert other.get(f"{served.address}/health").status_code == 503
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                client.completions.create(model="tiny", prompt="a")
            served.server.should_exit = True
            with pytest.raises(openai.APIError, match="shutting down"):
                list(running)
        served.thread.join(30)
        assert not served.thread.is_alive()


def _serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from edgelin.cli import main; main()", "serve", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "EDGELIN_API_KEY": "sesame"},
    )  # fmt: skip


def test_the_command_ends_what_runs_and_exits_with_0(tiny: Any, bundle: Bundle) -> None:
    running = _serve(str(tiny.path), "--port", "0", "--threads", "1", "--grace", "60")
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("tiny at http://127.0.0.1:"), line
        address = line.split()[2]
        with openai.OpenAI(base_url=address.rstrip(","), api_key="sesame") as client:
            parts = client.completions.create(
                model="tiny", prompt=WORDS, seed=1, max_tokens=600, stream=True
            )
            text = next(parts).choices[0].text
            running.send_signal(signal.SIGTERM)
            text += "".join(part.choices[0].text for part in parts)
        assert text == alone(bundle, WORDS, seed=1, max_tokens=600)
        assert running.wait(30) == 0
        assert running.stderr is not None and running.stderr.read() == ""
    finally:
        running.kill()
        running.communicate()


def test_an_address_in_use_is_told(tiny: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        running = _serve(str(tiny.path), "--port", str(taken.getsockname()[1]))
        _, error = running.communicate(timeout=60)
    assert running.returncode == 1
    assert error.startswith("Error: cannot listen at 127.0.0.1 port ") and "--port" in error
    assert len(error.splitlines()) == 1
