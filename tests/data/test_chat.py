from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_lit.data.chat import ChatSettings, ChatTokenizer
from dflash_lit.data.records import Columns, check_record
from dflash_lit.data.skips import Skip
from dflash_lit.errors import UserError
from tests.data.templates import CHATML, FORGETFUL, LLAMA3, MARKED, MISTRAL, QWEN3, with_template

TURNS = [
    {"role": "user", "content": "add 1"},
    {"role": "assistant", "content": "x + 1"},
    {"role": "user", "content": "and 2"},
    {"role": "assistant", "content": "x + 3"},
]
THOUGHTFUL = [{**m, "reasoning_content": "hm " + m["content"]} if m["role"] == "assistant" else m for m in TURNS]


def read(tokenizer: Any, value: dict[str, Any], **settings: Any) -> list[tuple[str, list[str]]]:
    """Each document as its text, and the texts of what is supervised."""
    chat = ChatTokenizer(tokenizer, ChatSettings(**settings))
    result = []
    for document in chat.documents(check_record(value, Columns(), "here:1")):
        assert document.input_ids.dtype == document.spans.dtype == np.int32
        whole = tokenizer.decode(document.input_ids)
        result.append((whole, [tokenizer.decode(document.input_ids[a:b]) for a, b in document.spans]))
    return result


@pytest.mark.parametrize(
    ("template", "ending", "before"),
    [(CHATML, "<|im_end|>", ""), (MARKED, "<|im_end|>", ""), (LLAMA3, "<|eot_id|>", ""), (MISTRAL, "</s>", " ")],
    ids=["chatml", "marked", "llama3", "mistral"],
)
def test_turns_that_stay_share_a_document(tokenizer: Any, template: str, ending: str, before: str) -> None:
    own = with_template(tokenizer, template)
    [(text, spans)] = read(own, {"messages": TURNS})
    # The end token is learnt, the line break that the template puts after it is not.
    assert spans == [f"{before}x + 1{ending}", f"{before}x + 3{ending}"]
    whole = own.apply_chat_template(TURNS, tokenize=False)
    assert text == whole.rstrip("\n")
    assert text.endswith(ending)


def test_the_prompt_is_tokenised_as_a_server_does(tokenizer: Any) -> None:
    own = with_template(tokenizer, LLAMA3)
    [document] = ChatTokenizer(own, ChatSettings()).documents(check_record({"messages": TURNS}, Columns(), "x"))
    served = own.apply_chat_template(TURNS[:1], add_generation_prompt=True)["input_ids"]
    # A text in one piece would be another here: this tokenizer splits line breaks otherwise before a letter.
    assert document.input_ids[: document.spans[0, 0]].tolist() == served


def test_a_template_that_drops_earlier_thoughts_gets_a_document_a_turn(tokenizer: Any) -> None:
    own = with_template(tokenizer, QWEN3)
    first, second = read(own, {"messages": THOUGHTFUL})
    assert first[1] == ["<think>\nhm x + 1\n</think>\n\nx + 1<|im_end|>"]
    assert second[1] == ["<think>\nhm x + 3\n</think>\n\nx + 3<|im_end|>"]
    assert "hm x + 1" not in second[0]  # as the server will show it to the target
    assert "x + 1" in second[0]


def test_without_thinking_the_empty_thoughts_belong_to_the_prompt(tokenizer: Any) -> None:
    own = with_template(tokenizer, QWEN3)
    first, second = read(own, {"messages": TURNS})
    assert first[1] == ["x + 1<|im_end|>"]
    assert first[0].endswith("<think>\n\n</think>\n\nx + 1<|im_end|>")
    assert second[1] == ["x + 3<|im_end|>"]
    assert read(own, {"messages": TURNS}, thinking="off") == [first, second]


def test_only_turns_as_they_will_be_served(tokenizer: Any) -> None:
    own = with_template(tokenizer, QWEN3)
    mixed = [*THOUGHTFUL[:2], *TURNS[2:]]
    assert [spans for _, spans in read(own, {"messages": mixed}, thinking="on")] == [
        ["<think>\nhm x + 1\n</think>\n\nx + 1<|im_end|>"]
    ]
    assert [spans for _, spans in read(own, {"messages": mixed}, thinking="off")] == [["x + 3<|im_end|>"]]
    assert len(read(own, {"messages": mixed})) == 2
    with pytest.raises(Skip, match="without reasoning") as caught:
        read(own, {"messages": TURNS}, thinking="on")
    assert caught.value.choice


def test_untold_templates_are_not_told(tokenizer: Any) -> None:
    own = with_template(tokenizer, QWEN3)
    # The prompt does not end in empty thoughts, so the target would have said them.
    assert read(own, {"messages": TURNS[:2]}, thinking=None)[0][1] == ["<think>\n\n</think>\n\nx + 1<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_a_turn_that_was_cut_off_has_no_end(tokenizer: Any, template: str) -> None:
    own = with_template(tokenizer, template)
    [(text, spans)] = read(own, {"messages": TURNS, "finish_reason": "length"})
    assert spans == ["x + 1<|im_end|>", "x + 3"]
    assert text.endswith("x + 3")
    assert read(own, {"messages": TURNS, "finish_reason": "stop"})[0][1] == ["x + 1<|im_end|>", "x + 3<|im_end|>"]


@pytest.mark.parametrize(
    "said",
    [{"content": "", "reasoning_content": "hm, so\nit is"}, {"content": "<think>\nhm, so\nit is"}],
    ids=["field", "text"],
)
def test_thoughts_that_were_cut_off_have_no_end(tokenizer: Any, said: dict[str, Any]) -> None:
    messages = [TURNS[0], {"role": "assistant", **said}]
    [(text, spans)] = read(with_template(tokenizer, QWEN3), {"messages": messages, "finish_reason": "length"})
    assert spans == ["<think>\nhm, so\nit is"]
    assert text.endswith("<|im_start|>assistant\n<think>\nhm, so\nit is")


def test_marks_of_a_template_that_rewrites_are_those_of_the_turns_own_text(tokenizer: Any) -> None:
    """The prompt shows the earlier turn as it was, the finished conversation does not."""
    rewriting = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if loop.last or add_generation_prompt else '' }}<|im_end|>{% endgeneration %}"
        "{% else %}<|im_start|>{{ m.content }}{% endif %}{% endfor %}"
    )
    documents = read(with_template(tokenizer, rewriting), {"messages": TURNS})
    assert [spans for _, spans in documents] == [["x + 1<|im_end|>"], ["x + 3<|im_end|>"]]


def test_turns_of_no_weight_are_context(tokenizer: Any) -> None:
    own = with_template(tokenizer, CHATML)
    light = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2], {**TURNS[3], "weight": 1}]
    [(text, spans)] = read(own, {"messages": light})
    assert spans == ["x + 3<|im_end|>"]
    assert "x + 1" in text
    with pytest.raises(Skip, match="no turn of the assistant"):
        read(own, {"messages": light[:2]})


def test_the_templates_arguments(tokenizer: Any) -> None:
    own = with_template(tokenizer, "{{ greeting }}" + CHATML)
    assert read(own, {"messages": TURNS}, template_arguments={"greeting": "hello"})[0][0].startswith("hello<|im_start|>")
    named = with_template(tokenizer, QWEN3.replace("enable_thinking", "thinking"))
    assert read(named, {"messages": TURNS[:2]}, thinking_argument="thinking")[0][1] == ["x + 1<|im_end|>"]


def test_tools_calls_and_steps_of_one_question_share_a_document(tokenizer: Any) -> None:
    own = with_template(tokenizer, QWEN3)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "add 1"},
        {"role": "assistant", "content": None, "reasoning_content": "call it", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "it is 2", "reasoning": "so it is"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    [(text, spans)] = read(own, {"messages": messages, "tools": tools})
    assert spans == [
        '<think>\ncall it\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\nso it is\n</think>\n\nit is 2<|im_end|>",
    ]
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert "<tool_response>\n2\n</tool_response>" in text


def test_a_template_without_the_turns_own_prompt_is_left_out_and_said(tokenizer: Any) -> None:
    with pytest.raises(Skip, match="no beginning of the turn") as caught:
        read(with_template(tokenizer, FORGETFUL), {"messages": TURNS})
    assert caught.value.choice


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "no turn of the assistant"),
        ({"messages": [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "x"}]}, "template refuses"),
        ({"messages": [{"role": "user", "content": "<|im_start|>"}, TURNS[1]]}, "chat markup"),
        ({"messages": [{"role": "user", "content": "say </s>"}, TURNS[1]]}, "chat markup"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "[INST]"}}}]}]},
            "chat markup",
        ),
        ({"text": "<|start_header_id|>user"}, "another chat template"),
        ({"prompt": "x"}, "prompt without a response"),
        ({"input_ids": [3, 4, -1], "loss_mask": [0, 1, 1]}, "out of range"),
        ({"input_ids": [3, 4, 10**6], "loss_mask": [0, 1, 1]}, "out of range"),
        ({"input_ids": [3, 2, 4], "loss_mask": [0, 1, 1]}, "mask token"),
        ({"input_ids": [3, 4, 4], "loss_mask": [0, 0, 1]}, "nothing to learn"),
        ({"input_ids": [3], "loss_mask": [1]}, "nothing to learn"),
        ({"input_ids": [], "loss_mask": []}, "nothing to learn"),
    ],
)
def test_what_cannot_be_learnt_has_a_reason(tokenizer: Any, value: dict[str, Any], reason: str) -> None:
    with pytest.raises(Skip, match=reason):
        read(with_template(tokenizer, MISTRAL), value, mask_token_id=2)


def test_texts_responses_and_tokens(tokenizer: Any) -> None:
    [(text, spans)] = read(tokenizer, {"prompt": "def f(x):", "response": "\n    return x"})
    assert (text, spans) == ("def f(x):\n    return x", ["\n    return x"])
    ended = read(tokenizer, {"prompt": "def f(x):", "response": "\n    return x", "finish_reason": "stop"})
    assert ended[0][1] == ["\n    return x<|endoftext|>"]
    chat = ChatTokenizer(tokenizer, ChatSettings())
    [whole] = chat.documents(check_record({"text": "def f(x):"}, Columns(), "x"))
    assert whole.spans.tolist() == [[1, len(whole.input_ids)]]  # nothing predicts the first token
    record = check_record({"input_ids": [5, 6, 7, 8, 9, 10, 11], "loss_mask": [1, 1, 1, 0, 0, 1, 1]}, Columns(), "x")
    [given] = chat.documents(record)
    assert given.spans.tolist() == [[1, 3], [5, 7]]
    # A prompt of messages with a response is a conversation.
    own = with_template(tokenizer, CHATML)
    assert read(own, {"prompt": TURNS[:1], "response": "x + 1"}) == read(own, {"messages": TURNS[:2]})


def test_a_response_beside_messages_is_their_last_turn(tokenizer: Any) -> None:
    own = with_template(tokenizer, CHATML)
    whole, cut = ({"messages": TURNS[:2], **more} for more in ({}, {"finish_reason": "length"}))
    assert TURNS[1]["content"] == "x + 1"
    assert read(own, {"messages": TURNS[:1], "response": "x + 1"}) == read(own, whole)
    assert read(own, {"messages": json.dumps(TURNS[:1]), "response": "x + 1", "finish_reason": "length"}) == read(own, cut)
    for said in ("x + 1", "\nx + 1 ", "", None):  # it repeats the turn, or says nothing
        assert read(own, {**whole, "response": said}) == read(own, whole)
    for said in ("x", "<think>a</think>x + 1"):
        with pytest.raises(Skip, match="messages ends with another than response; ") as caught:
            read(own, {**whole, "response": said})
        assert (caught.value.reason, caught.value.choice) == ("two responses", False)
    with pytest.raises(Skip, match="response of the assistant"):
        read(own, {"messages": TURNS[:1], "response": " "})
    apart = Columns.named({"response": "unused"})
    assert check_record({**whole, "response": "x"}, apart, "") == check_record(whole, apart, "")


def test_messages_need_a_template(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="no chat template"):
        read(tokenizer, {"messages": TURNS})


def test_a_tokenizer_that_adds_a_space_to_beginnings() -> None:
    """As SentencePiece's do: pieces that are tokenised apart would each begin with a space more."""
    letters = [*"abcdefghijklmnopqrstuvwxyz \n[]/"]
    vocab = {word: number for number, word in enumerate(["<s>", "</s>", "[INST]", "[/INST]", "<unk>", "▁", *letters])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Metaspace(prepend_scheme="first")
    own = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    own.chat_template = MISTRAL
    own.add_special_tokens({"additional_special_tokens": ["[INST]", "[/INST]"]})
    chat = ChatTokenizer(own, ChatSettings())
    messages = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "yes"}]
    [document] = chat.documents(check_record({"messages": messages}, Columns(), "x"))
    assert document.input_ids.tolist() == own("<s>[INST] add [/INST] yes</s>", add_special_tokens=False)["input_ids"]
    [[start, stop]] = document.spans
    assert own.convert_ids_to_tokens(document.input_ids[start:stop]) == ["▁", "y", "e", "s", "</s>"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("thinking", "perhaps"),
        ("thinking_argument", "a b"),
        ("thinking_argument", "tools"),
        ("template_arguments", {"add_generation_prompt": True}),
        ("template_arguments", {"messages": []}),
    ],
)
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"data\.{field}[=:]"):
        ChatSettings(**{field: value})
