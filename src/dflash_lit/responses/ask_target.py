"""Prompts to a target in this process, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_lit.data.respond import PromptBatch, RespondingTarget, generate_batch
from dflash_lit.errors import UserError
from dflash_lit.responses.raw_prompts import Message, RawPrompt
from dflash_lit.responses.record_file import RecordFile
from dflash_lit.responses.reply import Reply
from dflash_lit.responses.server import Sampling

__all__ = ["ask_target", "prompt_ids"]

# Turns of a conversation that are told apart in what decides the draw.
_MOST_TURNS = 4096


def prompt_ids(tokenizer: Any, prompt: RawPrompt, messages: Sequence[Message], template: dict[str, Any]) -> list[int]:
    """Token ids of what the target reads before it speaks.

    Args:
        tokenizer: the target's.
        prompt: a text is tokenized with the special tokens that the tokenizer adds.
        messages: a conversation so far; the chat template turns it into a text that begins the target's turn.
        template: further variables of the chat template.

    Raises:
        UserError: if there is no chat template, or it does not take the conversation.
    """
    if prompt.messages is None:
        ids = tokenizer(prompt.text)["input_ids"]
    elif not tokenizer.chat_template:
        raise UserError(f'{prompt.place}: the target\'s tokenizer has no chat template for "messages"; write "prompt" texts')
    else:
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tools=prompt.tools, add_generation_prompt=True, tokenize=False, **template
            )
        except Exception as error:  # whatever the template's own code raises
            raise UserError(f"{prompt.place}: the chat template refuses the messages ({error}); correct them") from error
        # The template has written its special tokens itself.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(f"{prompt.place}: the prompt has no tokens; leave it out")
    return [int(i) for i in ids]


def ask_target(
    target: RespondingTarget,
    prompts: Sequence[RawPrompt],
    records: RecordFile,
    sampling: Sampling,
    *,
    batch_size: int,
    all_turns: bool = False,
    report: Callable[[], None] = lambda: None,
) -> list[str]:
    """Let a loaded target respond to prompts; each batch is appended when it is done.

    Which prompts share a batch follows from all prompts, and what is drawn from the batch: a run that goes on draws what an
    unbroken one would have.

    Args:
        target: who responds.
        prompts: all of them, those included that have a response.
        records: entered.
        sampling: with ``top_p`` 1; of ``extra_body`` only ``chat_template_kwargs`` has a meaning here.
        batch_size: prompts at a time.
        all_turns: see :meth:`~dflash_lit.responses.raw_prompts.RawPrompt.turns`.
        report: called after each batch.

    Returns:
        a line for each prompt that is too long for the target.

    Raises:
        UserError: if the settings have no meaning here, or a prompt cannot be tokenized.
    """
    if sampling.top_p != 1.0:
        raise UserError(f"--top-p {sampling.top_p}: the local target draws from its whole distribution; leave it at 1")
    if others := sorted(sampling.extra_body.keys() - {"chat_template_kwargs"}):
        raise UserError(f"--extra-body: {others[0]!r} is for servers; here only chat_template_kwargs has a meaning")
    template = dict(sampling.extra_body.get("chat_template_kwargs") or {})
    todo = {prompt.id for prompt in records.pending(prompts)}
    turns = [prompt.turns(all_turns=all_turns) for prompt in prompts]
    first = [
        prompt_ids(target.tokenizer, prompt, (prompt.messages or ())[: places[0]], template)
        for prompt, places in zip(prompts, turns, strict=True)
    ]
    # Like prompts together: little padding. Longest first, so that running out of memory happens at once.
    order = sorted(range(len(prompts)), key=lambda index: (-len(turns[index]), -len(first[index]), index))
    failures: list[str] = []
    for number, start in enumerate(range(0, len(order), batch_size)):
        chosen = order[start : start + batch_size]
        if todo.isdisjoint(prompts[index].id for index in chosen):
            continue
        talks = [_Talk(prompts[index], turns[index], first[index]) for index in chosen]
        for turn in range(max(len(talk.places) for talk in talks)):
            _one_turn(target, talks, turn, number * _MOST_TURNS + turn, sampling, template)
        for talk in talks:
            if talk.too_long is not None:
                failures.append(f"{talk.prompt.place}: {talk.too_long}")
            elif talk.prompt.id in todo:
                records.add(talk.prompt, talk.replies)
        records.sync()
        report()
    return failures


class _Talk:
    """A conversation under way."""

    def __init__(self, prompt: RawPrompt, places: Sequence[int], ids: list[int]) -> None:
        self.prompt = prompt
        self.places = places
        self.ids = ids
        self.messages: list[Message] = list(prompt.messages or ())
        self.replies: list[tuple[int, Reply]] = []
        self.too_long: str | None = None


def _one_turn(
    target: RespondingTarget,
    talks: Sequence[_Talk],
    turn: int,
    number: int,
    sampling: Sampling,
    template: dict[str, Any],
) -> None:
    """Let the target speak once in each conversation that has so many turns."""
    limit = getattr(target.info.text, "max_position_embeddings", None)
    speaking: list[_Talk] = []
    for talk in talks:
        if turn >= len(talk.places) or talk.too_long is not None:
            continue
        if turn:
            talk.ids = prompt_ids(target.tokenizer, talk.prompt, talk.messages[: talk.places[turn]], template)
        if limit is not None and len(talk.ids) + sampling.max_tokens > limit:
            talk.too_long = f"{len(talk.ids)} tokens and a response of {sampling.max_tokens} are more than the {limit} positions of the target"
            continue
        speaking.append(talk)
    if not speaking:
        return
    tokenizer, end_ids = target.tokenizer, target.eos_ids
    batch = PromptBatch(
        tuple(tuple(talk.ids) for talk in speaking),
        number,
        max_new_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        end_ids=end_ids,
        pad_id=int(next((i for i in (tokenizer.pad_token_id, *end_ids) if i is not None), 0)),
        seed=sampling.seed or 0,
    )
    (responses,) = target.each(generate_batch, [batch])
    for talk, response in zip(speaking, responses, strict=True):
        ids = response.tolist()
        reply = Reply(
            text=tokenizer.decode(ids, skip_special_tokens=True),
            finish_reason="stop" if ids[-1] in end_ids else "length",
            prompt_ids=talk.ids,
            output_ids=ids,
            tokens=len(ids),
        )
        place = talk.places[turn]
        talk.replies.append((place, reply))
        if place < len(talk.messages):
            talk.messages[place] = reply.message()
