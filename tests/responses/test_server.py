from __future__ import annotations

import asyncio
import email.utils
import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_lit.data.documents import Document
from dflash_lit.errors import UserError
from dflash_lit.responses.ask_server import ask_server
from dflash_lit.responses.raw_prompts import RawPrompt, read_raw_prompts
from dflash_lit.responses.record_file import RecordFile, dropped_path
from dflash_lit.responses.server import Sampling, Server
from tests.responses.wayward_server import END, Body, Handler, Misdeed, WaywardServer, answer_to, prompt_of, slow


def prompts(folder: Path, *entries: Any) -> list[RawPrompt]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return read_raw_prompts(file).prompts


def texts(folder: Path, count: int) -> list[RawPrompt]:
    return prompts(folder, *({"prompt": f"prompt {number}", "id": f"p{number}"} for number in range(count)))


def ask(
    server: WaywardServer | str,
    asked: list[RawPrompt],
    out: Path,
    *,
    sampling: Sampling | None = None,
    in_flight: int = 8,
    max_failures: int = 100,
    all_turns: bool = False,
    **options: Any,
) -> tuple[list[str], Server]:
    async def run() -> tuple[list[str], Server]:
        url = server if isinstance(server, str) else server.url
        chosen = {"retries": 3, "backoff": 0.01, "timeout": 10.0, **options}
        async with Server(url, "m", sampling or Sampling(), in_flight=in_flight, **chosen) as client:
            with RecordFile(out, {}) as records:
                pending = list(records.pending(asked))
                return await ask_server(
                    client, pending, records, in_flight=in_flight, max_failures=max_failures, all_turns=all_turns
                ), client

    return asyncio.run(run())


def records_of(out: Path) -> dict[str, Body]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


def fails_first(times: int, how: Misdeed) -> Misdeed:
    """The first ``times`` requests for each prompt go wrong."""
    return lambda handler, body, before: before < times and how(handler, body, before)


@pytest.mark.parametrize("token_ids", ["auto", "sglang", "off"])
@pytest.mark.parametrize("chat", [False, True])
def test_answers_are_kept_with_ids_where_the_server_gives_them(tmp_path: Path, token_ids: str, chat: bool):
    def answer(handler: Handler, body: Body, before: int) -> bool:
        ids = "vllm" if body.get("return_token_ids") else "sglang" if body.get("return_meta_info") else None
        return handler.send(answer_to(body, ids=ids))

    entry = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    with WaywardServer(answer) as server:
        failures, client = ask(server, prompts(tmp_path, entry), tmp_path / "o.jsonl", token_ids=token_ids)
        assert server.pages == ["/v1/chat/completions" if chat else "/v1/completions"]
    assert not failures
    assert client.gives_ids == (token_ids != "off")
    (record,) = records_of(tmp_path / "o.jsonl").values()
    if token_ids != "off":
        assert record["input_ids"] == [*map(ord, "hi<hi>!"), END]
        assert record["loss_mask"] == [0, 0, 1, 1, 1, 1, 1, 1]
    elif chat:
        assert record["messages"][1] == {"role": "assistant", "content": "<hi>!"}
    else:
        assert (record["prompt"], record["response"]) == ("hi", "<hi>!")
    assert (record["finish_reason"], record["flags"], record["tokens"]) == ("stop", [], 6)


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_the_fields_for_ids_is_asked_without_them(tmp_path: Path, status: int):
    def refuse(handler: Handler, body: Body, before: int) -> bool:
        unknown = "return_token_ids" in body
        return unknown and handler.send({"detail": "Unexpected fields in the request: {'return_token_ids'}"}, status)

    with WaywardServer(refuse) as server:
        failures, client = ask(server, texts(tmp_path, 20), tmp_path / "o.jsonl", in_flight=1)
        # Found out once, and not a repetition.
        assert sum("return_token_ids" in body for body in server.bodies) == 1
    assert not failures
    assert (client.repeated, client.gives_ids) == (0, False)
    assert len(records_of(tmp_path / "o.jsonl")) == 20


@pytest.mark.parametrize(
    "ids",
    [{"token_ids": [1, 2]}, {"token_ids": "abc"}, {"token_ids": [1.5] * 6}, {"token_ids": None}, {"prompt_token_ids": [-1]}],
)
def test_ids_that_cannot_be_those_of_the_response_are_not_kept(tmp_path: Path, ids: Body):
    def answer(handler: Handler, body: Body, before: int) -> bool:
        content = answer_to(body, ids="vllm")
        content["choices"][0].update(ids)
        return handler.send(content)

    with WaywardServer(answer) as server:
        assert not ask(server, prompts(tmp_path, {"prompt": "hi"}), tmp_path / "o.jsonl")[0]
    (record,) = records_of(tmp_path / "o.jsonl").values()
    assert record["response"] == "<hi>!"


def test_requests_say_how_to_sample(tmp_path: Path):
    extra = {"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}}
    sampling = Sampling(0.6, 0.9, 77, 5, extra)
    asked = prompts(
        tmp_path, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, {"prompt": "b"}
    )
    with WaywardServer() as server:
        ask(server, asked, tmp_path / "o.jsonl", sampling=sampling, in_flight=1, api_key="secret")
        first, second = server.bodies
        assert server.keys == ["Bearer secret"] * 2
    shared = {"model": "m", "temperature": 0.6, "top_p": 0.9, "max_tokens": 77, "return_token_ids": True, **extra}
    seeds = [sampling.seed_of(prompt) for prompt in asked]
    assert first == {
        **shared,
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function"}],
        "seed": seeds[0],
    }
    assert second == {**shared, "prompt": "b", "seed": seeds[1]}
    assert seeds[0] != seeds[1]
    assert seeds == [Sampling(seed=5).seed_of(prompt) for prompt in asked]
    assert seeds != [Sampling(seed=6).seed_of(prompt) for prompt in asked]
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir())


MISDEEDS: dict[str, Misdeed] = {
    "internal error": lambda handler, body, before: handler.send(b"boom", 500),
    "bad gateway": lambda handler, body, before: handler.send({"error": {"message": "loading"}}, 503),
    "too many requests": lambda handler, body, before: handler.send({}, 429, Retry_After="0"),
    "cut in the middle": lambda handler, body, before: handler.cut(),
    "no JSON": lambda handler, body, before: handler.send(b'{"choices": [{"te'),
    "deep JSON": lambda handler, body, before: handler.send(b"[" * 100_000),
    "not UTF-8": lambda handler, body, before: handler.send(b'{"choices": [{"text": "\xff"}]}'),
    "a list": lambda handler, body, before: handler.send([]),
    "no choices": lambda handler, body, before: handler.send({"error": "x"}),
    "empty choices": lambda handler, body, before: handler.send({"choices": []}),
    "no text": lambda handler, body, before: handler.send({"choices": [{"finish_reason": "stop"}]}),
    "text of another type": lambda handler, body, before: handler.send({"choices": [{"text": 3}]}),
    "broken off": lambda handler, body, before: handler.send(answer_to(body, reason="abort")),
    "nothing at all": lambda handler, body, before: bool(handler.connection.shutdown(socket.SHUT_RDWR)) or True,
}


@pytest.mark.parametrize("name", MISDEEDS)
def test_what_may_go_well_the_next_time_is_repeated(tmp_path: Path, name: str):
    with WaywardServer(fails_first(2, MISDEEDS[name])) as server:
        failures, client = ask(server, texts(tmp_path, 10), tmp_path / "o.jsonl")
        assert set(server.asked.values()) == {3}
    assert not failures
    assert client.repeated == 20
    records = records_of(tmp_path / "o.jsonl")
    assert {name: record["response"] for name, record in records.items()} == {f"p{n}": f"<prompt {n}>!" for n in range(10)}


def test_an_answer_may_leave_out_what_is_not_needed(tmp_path: Path):
    with WaywardServer(lambda handler, body, before: handler.send({"choices": [{"text": "fine"}]})) as server:
        assert not ask(server, texts(tmp_path, 1), tmp_path / "o.jsonl")[0]
    (record,) = records_of(tmp_path / "o.jsonl").values()
    assert (record["response"], record["finish_reason"], record["tokens"]) == ("fine", None, None)


def test_an_answer_that_takes_too_long_is_given_up_and_repeated(tmp_path: Path):
    with WaywardServer(fails_first(1, slow(0.6))) as server:
        failures, client = ask(server, texts(tmp_path, 4), tmp_path / "o.jsonl", timeout=0.3)
    assert not failures
    assert client.repeated == 4


def test_a_trickle_does_not_pass_for_an_answer(tmp_path: Path):
    def trickle(handler: Handler, body: Body, before: int) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(30):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
        return True

    with WaywardServer(fails_first(1, trickle)) as server:
        failures, client = ask(server, texts(tmp_path, 1), tmp_path / "o.jsonl", timeout=0.3)
    assert not failures
    assert client.repeated == 1


@pytest.mark.parametrize("date", [False, True])
def test_a_server_says_when_to_come_again(tmp_path: Path, date: bool):
    times: list[float] = []

    def later(handler: Handler, body: Body, before: int) -> bool:
        times.append(time.time())
        when = email.utils.formatdate(time.time() + 1.9, usegmt=True) if date else "0.4"
        return before == 0 and handler.send({}, 429, Retry_After=when)

    with WaywardServer(later) as server:
        assert not ask(server, texts(tmp_path, 1), tmp_path / "o.jsonl")[0]
    # A date has whole seconds only.
    assert times[1] - times[0] >= (0.8 if date else 0.4)


@pytest.mark.parametrize("header", ["soon", "-5", "nan", "inf", "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_a_header_without_sense_is_no_reason_to_wait(tmp_path: Path, header: str):
    with WaywardServer(fails_first(1, lambda handler, body, before: handler.send({}, 503, Retry_After=header))) as server:
        began = time.monotonic()
        assert not ask(server, texts(tmp_path, 1), tmp_path / "o.jsonl")[0]
    assert time.monotonic() - began < 2


def test_a_server_that_is_not_there_yet_is_waited_for(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    failures, client = ask(url, texts(tmp_path, 2), tmp_path / "o.jsonl")
    assert client.repeated == 6
    assert len(failures) == 2
    assert "ConnectError" in failures[0]
    assert not records_of(tmp_path / "o.jsonl")


def test_prompts_that_the_server_refuses_do_not_stop_the_others(tmp_path: Path):
    def refuse(handler: Handler, body: Body, before: int) -> bool:
        return body["prompt"] == "prompt 3" and handler.send({"error": {"message": "too long"}}, 400)

    out = tmp_path / "o.jsonl"
    with WaywardServer(refuse) as server:
        failures, client = ask(server, texts(tmp_path, 6), out)
        assert client.repeated == 0
        assert len(failures) == 1
        assert "prompts.jsonl:4: HTTP 400" in failures[0]
        assert "too long" in failures[0]
        assert records_of(out).keys() == {"p0", "p1", "p2", "p4", "p5"}
        # The next run asks again for that one alone.
        server.misdeed = lambda handler, body, before: False
        server.asked.clear()
        ask(server, texts(tmp_path, 6), out)
        assert server.asked == {"prompt 3": 1}
    assert len(records_of(out)) == 6


def test_too_many_failures_end_the_run(tmp_path: Path):
    with WaywardServer(lambda handler, body, before: handler.send({}, 400)) as server:
        failures, _ = ask(server, texts(tmp_path, 200), tmp_path / "o.jsonl", in_flight=4, max_failures=10)
    assert 10 < len(failures) <= 14


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "wants another API key"),
        (403, "refuses access"),
        (404, "no such page or model"),
        (307, "has moved .http://else/v1"),
    ],
)
def test_what_no_prompt_can_change_ends_at_once(tmp_path: Path, status: int, message: str):
    def refuse(handler: Handler, body: Body, before: int) -> bool:
        return handler.send({"error": "no"}, status, **({"Location": "http://else/v1"} if status == 307 else {}))

    with WaywardServer(refuse) as server, pytest.raises(UserError, match=message):
        ask(server, texts(tmp_path, 50), tmp_path / "o.jsonl")
    assert sum(server.asked.values()) <= 8


def test_as_many_requests_at_a_time_as_asked_for_and_no_more(tmp_path: Path):
    with WaywardServer(slow(0.05)) as server:
        began = time.monotonic()
        ask(server, texts(tmp_path, 64), tmp_path / "o.jsonl", in_flight=16)
        took = time.monotonic() - began
    assert 8 < server.most_at_once <= 16
    assert took < 64 * 0.05  # what it takes one after the other


def test_every_turn_is_asked_with_the_targets_own_turns_before_it(tmp_path: Path):
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "someone else's"},
        {"role": "user", "content": "b"},
    ]
    with WaywardServer() as server:
        ask(server, prompts(tmp_path, {"messages": talk}), tmp_path / "all.jsonl", all_turns=True)
        assert [prompt_of(body) for body in server.bodies] == ["s|a", "s|a|<s|a>!|b"]
        ask(server, prompts(tmp_path, {"messages": talk}), tmp_path / "last.jsonl")
        assert prompt_of(server.bodies[-1]) == "s|a|someone else's|b"
    (record,) = records_of(tmp_path / "all.jsonl").values()
    assert record["messages"][2] == {"role": "assistant", "content": "<s|a>!"}
    assert record["messages"][4] == {"role": "assistant", "content": "<s|a|<s|a>!|b>!"}
    assert record["tokens"] == 7 + 16
    (record,) = records_of(tmp_path / "last.jsonl").values()
    assert record["messages"][2] == {**talk[2], "weight": 0}


def test_responses_that_are_not_to_be_learnt_go_to_a_file_of_their_own(tmp_path: Path):
    said = {
        "prompt 0": {"text": " "},
        "prompt 1": {"text": "and so on " * 30, "reason": "length"},
        "prompt 2": {"text": "cut", "reason": "content_filter"},
        "prompt 3": {"text": "I'm sorry, but I can't."},
        "prompt 4": {"text": "a long one", "reason": "length"},
    }
    out = tmp_path / "o.jsonl"
    with WaywardServer(lambda handler, body, before: handler.send(answer_to(body, **said[body["prompt"]]))) as server:
        assert not ask(server, texts(tmp_path, 5), out)[0]
        server.asked.clear()
        ask(server, texts(tmp_path, 5), out)
        assert not server.asked
    assert {name: record["flags"] for name, record in records_of(out).items()} == {"p3": ["refusal"], "p4": ["truncated"]}
    assert {name: record["flags"] for name, record in records_of(dropped_path(out)).items()} == {
        "p0": ["empty"],
        "p1": ["repetitive", "truncated"],
        "p2": ["filtered"],
    }


def test_a_refusal_without_a_text_is_one(tmp_path: Path):
    message = {"role": "assistant", "content": None, "refusal": "No."}
    with WaywardServer(lambda handler, body, before: handler.send({"choices": [{"message": message}]})) as server:
        ask(server, prompts(tmp_path, {"messages": [{"role": "user", "content": "a"}]}), tmp_path / "o.jsonl")
    (record,) = records_of(tmp_path / "o.jsonl").values()
    assert (record["flags"], record["messages"][1]["content"]) == (["refusal"], "No.")


def test_the_only_model_needs_no_name():
    async def name(server: WaywardServer) -> str:
        async with Server(server.url, None, Sampling(), retries=0) as client:
            return await client.model_name()

    with WaywardServer(models=("one",)) as server:
        assert asyncio.run(name(server)) == "one"
    with WaywardServer(models=("one", "two")) as server, pytest.raises(UserError, match=r"has 2 models \(one, two\)"):
        asyncio.run(name(server))


def test_settings_that_cannot_be():
    for url in ("127.0.0.1:8000", "ftp://host/v1", "http:///v1", "http://host:99999/v1", "http://host:x/v1"):
        with pytest.raises(UserError, match="is no address"):
            Server(url, None, Sampling())
    with pytest.raises(UserError, match="API key"):
        Server("http://host/v1", None, Sampling(), api_key="a\nb")
    with pytest.raises(UserError, match="--top-p 0"):
        Sampling(top_p=0.0)
    with pytest.raises(UserError, match="'stream' is set by this command"):
        Sampling(extra_body={"stream": True})


def test_half_a_character_of_an_earlier_turn_fails_that_prompt_alone(tmp_path: Path):
    user = {"role": "user", "content": "a"}
    broken = {"messages": [user, {"role": "assistant", "content": "x"}, user]}
    content = b'{"choices": [{"message": {"content": "\\ud800"}}]}'
    with WaywardServer(lambda handler, body, before: handler.send(content)) as server:
        asked = prompts(tmp_path, broken, {"messages": [user]})
        (failure,) = ask(server, asked, tmp_path / "o.jsonl", all_turns=True)[0]
    assert "cannot be written" in failure
    assert len(records_of(tmp_path / "o.jsonl")) == 1


@pytest.mark.parametrize("count", [10**400, -1, True, "3"])
def test_a_count_of_tokens_that_is_none_is_not_taken(tmp_path: Path, count: Any):
    answer = {"choices": [{"text": "b", "finish_reason": "stop"}], "usage": {"completion_tokens": count}}
    asked = prompts(tmp_path, {"prompt": "a"})
    with WaywardServer(lambda handler, body, before: handler.send(answer)) as server:
        assert not ask(server, asked, tmp_path / "o.jsonl")[0]
    [record] = records_of(tmp_path / "o.jsonl").values()
    assert record["tokens"] is None


SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats() | st.text(max_size=4) | st.sampled_from(["stop", "abort"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "choices message text content finish_reason token_ids prompt_token_ids meta_info output_token_logprobs usage "
                "completion_tokens tool_calls reasoning refusal".split()
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(
    scraps=st.lists(st.dictionaries(st.sampled_from(["message", "text", "token_ids", "usage"]), SCRAPS), max_size=2) | SCRAPS
)
def test_no_answer_whatsoever_ends_the_run_or_spoils_the_file(tmp_path: Path, scraps: Any):
    out = tmp_path / "o.jsonl"
    for path in (out, dropped_path(out)):
        path.unlink(missing_ok=True)
    asked = prompts(tmp_path, {"prompt": "a", "id": "a"}, {"messages": [{"role": "user", "content": "b"}], "id": "b"})
    with WaywardServer(lambda handler, body, before: handler.send({"choices": scraps, "prompt_token_ids": [1]})) as server:
        failures, _ = ask(server, asked, out, retries=0)
    kept, dropped = records_of(out), records_of(dropped_path(out))
    assert len(failures) + len(kept) + len(dropped) == 2
    with RecordFile(out, {}) as again:
        assert (again.responses, again.torn) == (len(kept) + len(dropped), 0)
    for record in kept.values():
        if "input_ids" in record:
            Document(np.array(record["input_ids"]), np.array(record["loss_mask"], dtype=np.bool_), "")
