from __future__ import annotations

from typing import Any

import pytest

from dflash_lit.data.repetition import is_repetitive_text
from dflash_lit.responses.raw_prompts import RawPrompt
from dflash_lit.responses.reply import Reply, document_of, flags_of

USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "hello"}


def reply(text: str = "fine", finish_reason: str | None = "stop", **fields: Any) -> Reply:
    return Reply(text, finish_reason, **fields)


def chat(*messages: dict[str, Any], **fields: Any) -> RawPrompt:
    return RawPrompt("id", "key", None, messages, fields.get("tools"), "p:1")


def test_loops_in_text():
    assert is_repetitive_text("Well. " + "It is what it is. " * 20)
    assert is_repetitive_text("好" * 100)
    assert is_repetitive_text("\ud800" * 100)  # half a character, which JSON may hold
    assert not is_repetitive_text("It is what it is. " * 2)
    assert not is_repetitive_text("A text of some length in which no two sentences say the same thing. " + "-" * 20)
    assert not is_repetitive_text("")


@pytest.mark.parametrize(
    ("said", "flags"),
    [
        (reply(), []),
        (reply(" \n"), ["empty"]),
        (reply("", reasoning="hm"), []),
        (reply("", tool_calls=[{"id": "1"}]), []),
        (reply("", "length", reasoning="hm " * 60), ["repetitive", "truncated"]),
        (reply("what", "content_filter"), ["filtered"]),
        (reply("I'm sorry, but I can't help with that."), ["refusal"]),
        (reply("I\u2019m really sorry, but no."), ["refusal"]),
        (reply("**I cannot assist** with it"), ["refusal"]),
        (reply("The programme says: I'm sorry."), []),
        (reply("I can't help but smile."), ["refusal"]),  # what such a test costs; it only counts
        (reply("No.", refused=True), ["refusal"]),
        # Ids decide where they are known: an end token alone is nothing, white space is something.
        (reply("", prompt_ids=[1], output_ids=[2]), ["empty"]),
        (reply("  ", prompt_ids=[1], output_ids=[5, 2]), []),
        (reply("abc", "length", prompt_ids=[1], output_ids=[5, 6] * 20), ["repetitive", "truncated"]),
    ],
)
def test_flags(said: Reply, flags: list[str]):
    assert flags_of(said) == flags


def test_ids_are_kept_with_what_was_generated_marked():
    said = reply(prompt_ids=[5, 6, 7], output_ids=[8, 2])
    assert document_of(chat(USER), [(1, said)]) == {"input_ids": [5, 6, 7, 8, 2], "loss_mask": [0, 0, 0, 1, 1]}


def test_turns_are_one_document_if_each_was_read_as_it_was_written():
    prompt = chat(USER, SAID, USER)
    first, last = reply("a", prompt_ids=[5], output_ids=[8, 2]), reply("b", prompt_ids=[5, 8, 2, 6], output_ids=[9])
    assert document_of(prompt, [(1, first), (3, last)]) == {
        "input_ids": [5, 8, 2, 6, 9],
        "loss_mask": [0, 1, 1, 0, 1],
    }
    # The template left something of the first turn out.
    shortened = reply("b", prompt_ids=[5, 2, 6], output_ids=[9])
    assert document_of(prompt, [(1, first), (3, shortened)]) == {
        "messages": [USER, {"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "b"}]
    }


def test_without_ids_messages_say_which_turns_are_not_the_targets():
    tools = [{"type": "function"}]
    said = reply("b", reasoning="hm", tool_calls=[{"id": "1"}])
    assert document_of(chat(USER, SAID, USER, tools=tools), [(3, said)]) == {
        "messages": [
            USER,
            {**SAID, "weight": 0},
            USER,
            {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [{"id": "1"}]},
        ],
        "tools": tools,
    }


def test_an_earlier_turn_that_was_cut_off_is_not_learnt_with_an_end_that_nobody_wrote():
    replies = [(1, reply("a", "length")), (3, reply("b", "length"))]
    assert document_of(chat(USER, SAID, USER), replies)["messages"] == [
        USER,
        {"role": "assistant", "content": "a", "weight": 0},
        USER,
        {"role": "assistant", "content": "b"},
    ]


def test_without_ids_a_text_keeps_its_continuation():
    assert document_of(RawPrompt("i", "k", "a", None, None, ""), [(0, reply("b"))]) == {"prompt": "a", "response": "b"}
