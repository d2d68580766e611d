"""Rows and documents of a suite -> what lm-eval gets, and the token ids that it makes of it: those that training made.

lm-eval takes strings and tokenises them itself. Each string is therefore read here as lm-eval will read it, and refused
where other tokens come out: a BOS that stands twice, a boundary inside a token, a control token in plain text.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_patch.data.chat import ChatEncoder, RowRejected
from megatron_patch.data.tokenizer import encode_plain
from megatron_patch.errors import UserError
from megatron_patch.evaluation.suite import HeldOut, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT_TRIES = 32  # tokens given up, at most, to cut a document where its text reads the same


@dataclass(frozen=True)
class Example:
    """Token ids of which those from `start` on (1 <= start < len(ids)) are predicted from those before them.

    `context` and `continuation` are the same as text, for lm-eval; the context begins with BOS.
    """

    ids: list[int]
    start: int
    context: str
    continuation: str


def encode_rows(tokenizer: "PreTrainedTokenizerBase", rows: list[Row]) -> list[Example]:
    """Each row's conversation and answer by the chat template; predicted are the answer's tokens and the end token.

    Raises:
        UserError: a row that the template cannot write, or whose answer does not begin right after the generation prompt,
            so that no decoder could give it, or that lm-eval would read otherwise.
    """
    encoder = ChatEncoder(tokenizer)
    return [_encode_row(encoder, row) for row in rows]


def _encode_row(encoder: ChatEncoder, row: Row) -> Example:
    tokenizer = encoder.tokenizer
    messages = [*row.messages, {"role": "assistant", "content": row.answer}]
    try:
        chat = encoder.encode(messages, row.where)
    except RowRejected as reason:
        raise UserError(f"{row.where}: the row cannot be scored: {reason}; mend the row") from None
    ids, end = chat.input_ids, len(chat.loss_mask)
    while end and not chat.loss_mask[end - 1]:  # what a template writes behind the end token, such as a newline
        end -= 1
    start = end
    while start and chat.loss_mask[start - 1]:
        start -= 1
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    text = tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True)
    context = text if text.startswith(tokenizer.bos_token) else tokenizer.bos_token + text
    prompt = _tokens(tokenizer, context)
    if ids[:start] != prompt or not whole.startswith(text):
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
    answer, end_token, _ = whole[len(text) :].partition(tokenizer.eos_token)  # an answer cannot name a special token
    example = Example(ids[:end], start, context, answer + end_token)
    if _as_lm_eval_reads(tokenizer, example) != (example.ids, start):
        raise UserError(
            f"{row.where}: lm-eval must read a row as training did, but finds other tokens: it counts whitespace at the "
            f"end of a prompt ({context[-12:]!r}) to the answer; use a template whose generation prompt ends with text"
        )
    return example


def encode_documents(tokenizer: "PreTrainedTokenizerBase", held_out: HeldOut) -> list[Example]:
    """BOS and the document's tokens, at most `max_length` in all; every token but BOS is predicted.

    A document is cut where the text that is left reads as the same tokens, at most `CUT_TRIES` tokens earlier.

    Raises:
        UserError: a document without a token, or one that lm-eval would read as other tokens.
    """
    for number, text in enumerate(held_out.documents, 1):
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UserError(
                f"held-out documents must be valid Unicode: document {number} has a lone surrogate; mend it"
            )
    encoded = encode_plain(tokenizer, held_out.documents)
    return [
        _document(tokenizer, text, ids, held_out.max_length - 1, number)
        for number, (text, ids) in enumerate(zip(held_out.documents, encoded, strict=True), 1)
    ]


def _document(tokenizer: "PreTrainedTokenizerBase", text: str, ids: list[int], room: int, number: int) -> Example:
    if not ids:
        raise UserError(f"held-out documents must have a token: document {number} has none; remove it")
    bos, longest = tokenizer.bos_token, min(len(ids), room)
    for length in range(longest, max(0, longest - CUT_TRIES), -1):
        part = text if length == len(ids) else tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False)
        example = Example([tokenizer.bos_token_id, *ids[:length]], 1, bos, part)
        if _as_lm_eval_reads(tokenizer, example) == (example.ids, 1):
            return example
        if length == len(ids):
            break  # a document that fits stays whole
    raise UserError(
        f"lm-eval must read a held-out document as training does: document {number} ({text[:30]!r}...) becomes other "
        "tokens, as text does that names a special token; remove that from it"
    )


def _as_lm_eval_reads(tokenizer: "PreTrainedTokenizerBase", example: Example) -> tuple[list[int], int]:
    """Ids and start as `lm_eval.api.model.TemplateLM._encode_pair` finds them (lm-eval 0.4.13)."""
    kept = example.context.rstrip()
    ids = _tokens(tokenizer, example.context + example.continuation)
    return ids, len(_tokens(tokenizer, kept))


def _tokens(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of text in which special tokens are control tokens, and to which none is added."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)
