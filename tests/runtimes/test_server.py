"""The server answers OpenAI's own client with what a stream alone writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from click.testing import CliRunner
from serving import WORDS, Serving, alone, serving, until
from tiny_bundle import add_chat

import edgelin
from edgelin.cli import main
from edgelin.errors import EdgelinError
from edgelin.runtimes import chat
from edgelin.runtimes.server import process
from edgelin.runtimes.server.limits import Limits
from edgelin.runtimes.server.process import serve
from edgelin.runtimes.session import Bundle
from edgelin.state import StateSpec

TEMPLATE = """{%- for m in messages %}
    {{- '<|end|>' + m.role + '\n' + m.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|end|>assistant\n' }}{% endif %}"""
SETTINGS = {"max_tokens": 12, "temperature": 1.5}
LIMITS = {"slots": 3, "queue": 9, "prompt_tokens": 200, "max_tokens": 100_000, "sessions": 2}


@pytest.fixture(scope="module")
def bundle(build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    build(folder)
    add_chat(folder, TEMPLATE, top_p=0.9)
    return edgelin.load(folder, threads=1)


@pytest.fixture(scope="module")
def served(bundle: Bundle) -> Iterator[Serving]:
    with serving(bundle, **LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def _alone(bundle: Bundle, prompt: Any, **sampling: Any) -> str:
    return alone(bundle, prompt, **{"top_p": 0.9, **SETTINGS, **sampling})


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 1},
        {"seed": 2**64 - 1, "temperature": 0.0},
        {"seed": 3, "top_p": 0.5, "max_tokens": 1},
        {"seed": 4, "max_tokens": 80},
        {"seed": 5, "max_tokens": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_completion_is_what_a_stream_writes(
    bundle: Bundle, client: openai.OpenAI, settings: dict[str, Any], streamed: bool
) -> None:
    given = {**SETTINGS, **settings}
    wanted = _alone(bundle, WORDS, **settings)
    asked = {"model": "tiny", "prompt": WORDS, **given}
    if streamed:
        *parts, last = client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        assert "".join(part.choices[0].text for part in parts) == wanted
        assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        reason, usage = parts[-1].choices[0].finish_reason, last.usage
    else:
        whole = client.completions.create(**asked)
        assert whole.choices[0].text == wanted and whole.model == "tiny"
        reason, usage = whole.choices[0].finish_reason, whole.usage
    assert reason in ("length", "stop")
    assert usage is not None and usage.prompt_tokens == len(bundle.text.encode(WORDS))
    assert (reason == "length") == (usage.completion_tokens == given["max_tokens"])


def test_prompts_of_every_kind_and_several_choices(bundle: Bundle, client: openai.OpenAI) -> None:
    ids = bundle.text.encode("old mill")
    kinds: list[tuple[Any, list[Any]]] = [
        ("old mill", ["old mill"]),
        (ids, [ids]),
        (["Köln", "x", "🙂"], ["Köln", "x", "🙂"]),
        ([ids, ids[:1]], [ids, ids[:1]]),
    ]
    for given, prompts in kinds:
        answer = client.completions.create(model="tiny", prompt=given, seed=7, n=2, **SETTINGS)
        found = [choice.text for choice in answer.choices]
        wanted = [_alone(bundle, p, seed=seed) for p in prompts for seed in (7, 8)]
        assert found == wanted and [c.index for c in answer.choices] == list(range(len(wanted)))
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(
            len(bundle.text.encode(p) if isinstance(p, str) else p) for p in prompts
        )


def test_stop_strings_end_a_text_and_are_not_in_it(bundle: Bundle, client: openai.OpenAI) -> None:
    free = _alone(bundle, WORDS, seed=11, max_tokens=60)
    stop = [free[30:33], "never that"]
    wanted = _alone(bundle, WORDS, seed=11, max_tokens=60, stop=stop)
    assert wanted == free[: free.index(stop[0])]
    answer = client.completions.create(
        model="tiny", prompt=WORDS, seed=11, max_tokens=60, temperature=1.5, stop=stop
    )
    assert answer.choices[0].text == wanted and answer.choices[0].finish_reason == "stop"


def test_a_chat_is_what_a_stream_says(bundle: Bundle, client: openai.OpenAI) -> None:
    asked: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("Grüße, ", "you!")]},
    ]
    stream = bundle.stream()
    wanted = "".join(stream.chat("Grüße, you!", system="Be brief.", seed=2, **SETTINGS))
    wanted += stream.flush()
    answer = client.chat.completions.create(model="tiny", messages=asked, seed=2, **SETTINGS)
    assert answer.choices[0].message.content == wanted
    asked += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    plain = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, you!"},
        {"role": "assistant", "content": wanted}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    wanted = _alone(bundle, chat.dialogue(bundle, plain), seed=5)
    parts = list(
        client.chat.completions.create(
            model="tiny", messages=asked, seed=5, stream=True, max_completion_tokens=12,
            temperature=1.5,
        )
    )  # fmt: skip
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted
    assert parts[-1].choices[0].finish_reason in ("length", "stop")


def test_a_session_goes_on_where_it_stood(bundle: Bundle, client: openai.OpenAI) -> None:
    stream = bundle.stream()
    settings = {**SETTINGS, "seed": 9}
    positions = [0]
    for prompt in ("The old", " mill. ", ""):
        answer: Any = client.completions.create(
            model="tiny", prompt=prompt, **settings, extra_headers={"X-Session-Id": "walk"},
            extra_body={"session_position": positions[-1]},
        )  # fmt: skip
        written = "".join(stream.generate(prompt or None, top_p=0.9, **settings))
        assert answer.choices[0].text == written + stream.flush()
        assert answer.session_id == "walk" and answer.session_position == stream.position
        assert answer.usage.prompt_tokens_details.cached_tokens == positions[-1]
        positions.append(stream.position)
    talk = bundle.stream()
    for said in ("Hi", "And the <|end|> river?"):
        reply = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": said}], **settings,
            extra_body={"session_id": "talk"},
        )  # fmt: skip
        wanted = "".join(talk.chat(said, **settings)) + talk.flush()
        assert reply.choices[0].message.content == wanted


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_sessions_rest_in_fewer_bytes(bundle: Bundle, tmp_path: Path, dtype: str) -> None:
    stream, settings = bundle.stream(), {"seed": 9, "temperature": 0.0, "max_tokens": 6}
    with serving(bundle, **LIMITS, state_dtype=dtype) as served, served.client() as client:
        for prompt in ("The old", " mill. ", ""):
            answer = client.completions.create(
                model="tiny", prompt=prompt, **settings, extra_body={"session_id": "walk"}
            )
            written = "".join(stream.generate(prompt or None, **settings))
            assert answer.choices[0].text == written + stream.flush()
            stream.save(tmp_path / "s.state", dtype=dtype)
            stream.load(tmp_path / "s.state")
        kept = served.api.sessions._kept["walk"]
        assert f"edgelin_session_bytes {kept.nbytes}.0" in served.api.metrics.text().decode()
        assert kept.nbytes < sum(array.nbytes for array in kept.wake().tensors.values())


def test_sessions_are_never_mixed_up(served: Serving, client: openai.OpenAI) -> None:
    def call(name: str, **extra: Any) -> Any:
        body = {"session_id": name, **extra}
        return client.completions.create(
            model="tiny", prompt="a", max_tokens=2, temperature=0, extra_body=body
        )

    with served.paused(), served.asking(prompt="a", session_id="one"):
        until(lambda: "one" in served.api.sessions._used)
        with pytest.raises(openai.ConflictError, match="in use by another call"):
            call("one")
    until(served.idle)
    call("one", session_position=0)  # the call that was cut has left nothing
    with pytest.raises(openai.ConflictError, match="stands at position 3, not 0"):
        call("one", session_position=0)
    call("two"), call("three")  # of two that are kept, "one" is unused for longest
    with pytest.raises(openai.NotFoundError, match="was dropped"):
        call("one")
    call("one", session_position=0)
    call("a/b?c#%")
    for name in ("one", "a%2Fb%3Fc%23%25"):
        url = f"{served.address}/v1/sessions/{name}"
        assert httpx2.delete(url).json()["deleted"] and httpx2.delete(url).status_code == 404
    assert call("one").session_position == 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 1}, "logprobs is not supported"),
    ({"logprobs": 0}, "logprobs is not supported"),
    ({"echo": True}, "echo is not supported"),
    ({"best_of": 2}, "best_of is not supported"),
    ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
    ({"typical_p": 0.5}, "typical_p is not known"),
    ({"messages": []}, "messages is for /v1/chat/completions"),
    ({"temperature": -1}, "temperature is -1; allowed: 0 or more"),
    ({"temperature": "1"}, "temperature is '1'; allowed: a number"),
    ({"seed": -1}, "seed is -1"),
    ({"n": 0}, "n is 0"),
    ({"n": 13}, "asks for 13 texts; at most 12"),
    ({"n": 10**12}, "asks for 1000000000000 texts; at most 12"),  # at once
    ({"n": 2, "prompt": ["a"] * 7}, "asks for 14 texts; at most 12"),
    ({"n": 2, "session_id": "s"}, "n must be 1"),
    ({"session_id": "a b"}, "session_id is 'a b'"),
    ({"session_position": 3}, "needs session_id"),
    ({"stream": 1}, "stream is 1; allowed: true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options is for streams"),
    ({"stop": ["x"] * 17}, "stop has at most 16"),
    ({"stop": [""]}, "stop is ''"),
    ({"max_tokens": 100_001}, "max_tokens is 100001; this server allows 100000"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": []}, "prompt is neither"),
    ({"prompt": [5, "a"]}, "prompt is neither"),
    ({"prompt": [True]}, "prompt is neither"),
    ({"prompt": [10**6]}, "token id 1000000 is out of range"),
    ({"prompt": [10**30]}, "token ids"),
    ({"prompt": [1] * 201}, "the prompt has 201 tokens; this server reads at most 200"),
    ({"prompt": "\ud800"}, "unpaired surrogate"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_not_computed_is_refused(
    served: Serving, fields: dict[str, Any], message: str
) -> None:
    answer = _post(served, {"prompt": "a", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["type"] == "invalid_request_error"
    assert error["param"] in fields
    assert served.idle()


def test_what_changes_nothing_is_ignored(bundle: Bundle, served: Serving) -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "logprobs": None, "echo": False, "logit_bias": {}, "stop": None, "n": 1, "tools": [],
        "stream_options": None, "response_format": {"type": "text"}, "best_of": 1, "suffix": None,
    }  # fmt: skip
    answer = _post(served, {"prompt": "a", "seed": 1, **SETTINGS, **harmless})
    assert answer.json()["choices"][0]["text"] == _alone(bundle, "a", seed=1)


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages is no list"),
    (["a"], r"messages[0] is no object"),
    ([{"role": "tool", "content": "a"}], "messages[0].role is 'tool'"),
    ([{"role": ["user"], "content": "a"}], "messages[0].role is ['user']"),
    ([{"role": "user", "content": 3}], "messages[0].content is no text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part that is no"),
    ([{"role": "user", "content": "a", "name": "b"}], "messages[0].name is not supported"),
    ([{"role": "user", "content": " "}], "must be a user's, and say something"),
    ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "must be a user's"),
]


@pytest.mark.parametrize(("messages", "message"), MESSAGES, ids=lambda x: str(x)[:40])
def test_messages_that_cannot_be_read_are_refused(
    served: Serving, messages: Any, message: str
) -> None:
    answer = _post(served, {"messages": messages}, "/v1/chat/completions")
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_errors_have_openais_form(served: Serving, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert client.models.retrieve("tiny").id == next(iter(client.models.list())).id
    url = f"{served.address}/v1/completions"
    kind = {"Content-Type": "application/json"}
    for status, answer in [
        (400, httpx2.post(url, content=b"{", headers=kind)),
        (400, httpx2.post(url, content=b"[" * 60_000, headers=kind)),
        (400, httpx2.post(url, content=b"[]", headers=kind)),
        (400, httpx2.post(url, content=b"\xff", headers=kind)),
        (403, httpx2.get(f"{served.address}/v1/models", headers={"Host": "evil.example"})),
        (404, httpx2.get(f"{served.address}/v2")),
        (404, httpx2.get(f"{served.address}/v1/models/x")),
        (405, httpx2.get(url)),
        (413, httpx2.post(url, content=b" " * 80_000, headers=kind)),
        (413, httpx2.post(url, content=itertools.repeat(b" " * 999, 99), headers=kind)),
        (415, httpx2.post(url, content=b"{}", headers={"Content-Type": "text/plain"})),
    ]:
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def _post(served: Serving, body: Any, path: str = "/v1/completions") -> Any:
    """A request as it is written."""
    headers = {"Content-Type": "application/json"}
    return httpx2.post(served.address + path, content=json.dumps(body), headers=headers)


def test_a_key_is_asked_for(bundle: Bundle) -> None:
    with serving(bundle, key="sécret", **LIMITS) as served:
        for path in ("/v1/models", "/metrics"):
            for headers in ({}, {"Authorization": "Bearer secret"}):
                assert httpx2.get(served.address + path, headers=headers).status_code == 401
        for scheme in ("Bearer", "bearer"):  # RFC 9110: in any case
            good = {"Authorization": f"{scheme} sécret".encode()}
            assert httpx2.get(f"{served.address}/v1/models", headers=good).status_code == 200
        assert httpx2.get(f"{served.address}/health").json()["status"] == "ok"


@pytest.mark.parametrize("key", ["", " ", "secret\n"])
def test_a_key_that_nobody_can_show_is_refused(bundle: Bundle, key: str) -> None:
    with pytest.raises(EdgelinError, match="API key is empty or has blanks"):
        serve(
            bundle, Limits(), host="127.0.0.1", port=0, api_key=key,
            ready=lambda address, server: server.stop(0),
        )  # fmt: skip


def test_an_empty_variable_does_not_open_the_server(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(*_: Any) -> None:
        raise EdgelinError("it listened")

    monkeypatch.setattr(process, "_listen", listen)
    command = ["serve", str(bundle.path), "--port", "0"]
    for key, told in (("", "API key is empty"), ("sesame", "it listened"), (None, "it listened")):
        result = CliRunner().invoke(main, command, env={"EDGELIN_API_KEY": key})
        assert result.exit_code == 1 and told in result.output


def test_metrics_count(bundle: Bundle) -> None:
    with serving(bundle, **LIMITS) as served:
        with served.client() as client:
            answer = client.completions.create(model="tiny", prompt=WORDS, max_tokens=5)
        text = httpx2.get(f"{served.address}/metrics").text
        assert 'edgelin_requests_total{path="/v1/completions",status="200"} 1.0' in text
        assert answer.usage is not None
        assert f'edgelin_tokens_total{{kind="prompt"}} {answer.usage.prompt_tokens}.0' in text
        count = float(answer.usage.completion_tokens)
        assert f'edgelin_tokens_total{{kind="generated"}} {count}' in text
        for line in ("active_streams 0.0", "queue 0.0", "slots 3.0", "slots_free 3.0"):
            assert f"edgelin_{line}" in text
        assert "edgelin_step_seconds_count" in text


def test_streams_begin_in_the_default_capsule(build: Any, tmp_path: Path) -> None:
    build(tmp_path / "b")
    add_chat(tmp_path / "b", TEMPLATE)
    bundle = edgelin.load(tmp_path / "b", threads=1)
    stream = bundle.stream()
    stream.feed(chat.opening(bundle, "Be brief."))
    bundle.add_capsule("brief", stream, default=True)
    with serving(bundle) as served, served.client() as client:
        text = client.completions.create(model="b", prompt="x", seed=1, **SETTINGS).choices[0].text
        assert text == alone(bundle, "x", seed=1, **SETTINGS)
        user: Any = {"role": "user", "content": "Hi"}
        reply = client.chat.completions.create(model="b", messages=[user], seed=1, **SETTINGS)
        stream = bundle.stream(capsule="none")
        wanted = "".join(stream.chat("Hi", system="Be brief.", seed=1, **SETTINGS))
        assert reply.choices[0].message.content == wanted + stream.flush()
        with pytest.raises(openai.BadRequestError, match="has begun already"):
            told: Any = [{"role": "system", "content": "x"}, user]
            client.chat.completions.create(model="b", messages=told)


def test_a_state_that_grows_is_refused(bundle: Bundle) -> None:
    grown = StateSpec("key", 1, (2, "past", 4), "batch heads token channels")
    bundle.manifest.states.append(grown)
    try:
        message = r"key\.1 of .* grows .*--attention window=N"
        with pytest.raises(EdgelinError, match=message), serving(bundle):
            pass
    finally:
        bundle.manifest.states.remove(grown)
