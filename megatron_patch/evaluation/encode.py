"""Rows and documents of a suite -> token ids, exactly as training made them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_patch.data.chat import ChatEncoder, RowRejected
from megatron_patch.data.tokenizer import encode_plain
from megatron_patch.errors import UserError
from megatron_patch.evaluation.suite import HeldOut, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """Token ids of which those from `start` on (1 <= start < len(ids)) are predicted from those before them."""

    ids: list[int]
    start: int


def encode_rows(tokenizer: "PreTrainedTokenizerBase", rows: list[Row]) -> list[Example]:
    """Each row's conversation and answer by the chat template; predicted are the answer's tokens and the end token.

    Raises:
        UserError: a row that the template cannot write, or whose answer does not begin right after the generation prompt,
            so that no decoder could give it.
    """
    encoder = ChatEncoder(tokenizer)
    return [_encode_row(encoder, row) for row in rows]


def _encode_row(encoder: ChatEncoder, row: Row) -> Example:
    tokenizer = encoder.tokenizer
    try:
        chat = encoder.encode([*row.messages, {"role": "assistant", "content": row.answer}], row.where)
    except RowRejected as reason:
        raise UserError(f"{row.where}: the row cannot be scored: {reason}; mend the row") from None
    ids, end = chat.input_ids, len(chat.loss_mask)
    while end and not chat.loss_mask[end - 1]:  # what a template writes behind the end token, such as a newline
        end -= 1
    start = end
    while start and chat.loss_mask[start - 1]:
        start -= 1
    text = tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if prompt[:1] != [tokenizer.bos_token_id]:
        prompt = [tokenizer.bos_token_id, *prompt]
    if ids[:start] != prompt:
        raise UserError(
            f"{row.where}: the answer must begin where the chat template's generation prompt ends, on a token's edge: "
            f"the prompt is {len(prompt)} tokens, the answer begins at token {start}; use a template whose generation "
            "prompt is what stands before an answer, and answers that do not merge with it"
        )
    if ids[end - 1] != tokenizer.eos_token_id:
        raise UserError(
            f"{row.where}: an answer must end with EOS ({tokenizer.eos_token!r}), at which decoding stops: the chat "
            f"template ends it with token {ids[end - 1]}; use a template that writes {{{{ eos_token }}}} there"
        )
    return Example(ids[:end], start)


def encode_documents(tokenizer: "PreTrainedTokenizerBase", held_out: HeldOut) -> list[Example]:
    """BOS and the document's tokens, at most `max_length` in all; every token but BOS is predicted.

    Raises:
        UserError: a document without a token.
    """
    examples = []
    for number, ids in enumerate(encode_plain(tokenizer, held_out.documents), 1):
        if not ids:
            raise UserError(f"held-out documents must have a token: document {number} has none; remove it")
        examples.append(Example([tokenizer.bos_token_id, *ids][: held_out.max_length], 1))
    return examples
