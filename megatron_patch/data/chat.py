"""A conversation -> token ids and loss mask, by the model's own chat template.

Supervised are the assistant's tokens and the token that ends its turn, and nothing else. Where a template does not say
which tokens are the assistant's, they are found by rendering the conversation turn by turn; that is only right when
each shorter rendering is a prefix of the longer one, so it is checked, as text and as tokens, for every conversation.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_patch.data.conversations import Message
from megatron_patch.data.tokenizer import chat_template
from megatron_patch.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKERS_REMEDY = "mark the assistant's text in the chat template with {% generation %} ... {% endgeneration %}"
NO_ASSISTANT = "no assistant turn"
NO_QUESTION = "an assistant turn with nothing before it"
EMPTY_ASSISTANT = "an empty assistant turn"
SPECIAL_IN_TEXT = "a special token written in the text of a message"
TURN_INSIDE_TOKEN = "a turn begins or ends inside a token"
BAD_UNICODE = "text that is not valid Unicode"


class RowRejected(Exception):
    """This conversation cannot be a sample; the message is the reason under which it is counted."""


@dataclass(frozen=True)
class EncodedChat:
    """One conversation: `loss_mask[i] == 1` says that token i is a supervised target (of the position before "
    "it)."""

    input_ids: list[int]
    loss_mask: list[int]


class ChatEncoder:
    """Renders and tokenises conversations with one tokenizer and its template.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.template = chat_template(tokenizer)
        self.has_markers = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)))
        # The unknown token may stand for a character of a message, and BOS opens: neither ends a turn.
        inner = {tokenizer.bos_token_id, tokenizer.unk_token_id}
        self._ends = set(tokenizer.convert_tokens_to_ids(special)) - inner

    @property
    def method(self) -> str:
        """How assistant tokens are found: "generation markers" or "prefix differences"."""
        return "generation markers" if self.has_markers else "prefix differences"

    def encode(self, messages: list[Message], where: str = "conversation") -> EncodedChat:
        """Token ids and loss mask of a conversation; BOS stands once, at the front.

        Args:
            messages: roles system, user, assistant.
            where: the row's name for messages.

        Raises:
            RowRejected: this conversation must be left out.
            UserError: the template cannot be used for training as it is.
        """
        self._check(messages)
        text = self._render(messages, where)
        places = self._places(messages, text, where)
        if self.has_markers:
            ids, mask = self._by_markers(messages, text, places, where)
        else:
            ids, mask = self._by_prefixes(messages, text, where)
        return self._with_one_bos(ids, mask, where)

    def _check(self, messages: list[Message]) -> None:
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            raise RowRejected(NO_ASSISTANT)
        if roles[0] == "assistant":
            raise RowRejected(NO_QUESTION)
        for message in messages:
            if message["role"] == "assistant" and not message["content"].strip():
                raise RowRejected(EMPTY_ASSISTANT)
            if self._special.search(message["content"]):
                raise RowRejected(SPECIAL_IN_TEXT)  # it would become a real control token, an EOS in mid-sentence
            if any("\ud800" <= letter <= "\udfff" for letter in message["content"]):
                raise RowRejected(BAD_UNICODE)

    def _render(self, messages: list[Message], where: str, *, prompt: bool = False) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}; mend chat_template.jinja"
            ) from error
        except TemplateError as error:  # templates refuse by raise_exception, e.g. roles that do not alternate
            raise UserError(
                f"{where}: the chat template refuses this conversation: {error}; mend or remove the row"
            ) from error

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]

    def _places(self, messages: list[Message], text: str, where: str) -> list[tuple[int, int]]:
        """Where each message stands in the rendered text (characters, half-open); all must be there, in order."""
        places, position = [], 0
        for number, message in enumerate(messages, 1):
            content = message["content"].strip()
            found = text.find(content, position)
            if found < 0:
                raise UserError(
                    f"{where}: the chat template leaves out or changes message {number} ({message['role']}); use a "
                    "template that writes every message as it is, or mend the row"
                )
            position = found + len(content)
            places.append((found, position))
        return places

    def _by_markers(
        self, messages: list[Message], text: str, places: list[tuple[int, int]], where: str
    ) -> tuple[list[int], list[int]]:
        encoded = self.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, marked = list(encoded["input_ids"]), list(encoded["assistant_masks"])
        mask, runs = [0] * len(ids), _runs(marked)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if all(marked) or len(runs) != len(turns):
            what = "every token" if all(marked) else f"{len(runs)} spans"
            raise UserError(
                f"{where}: the chat template marks {what} for {len(turns)} assistant turns; put {{% generation %}} "
                "... {% endgeneration %} around the assistant's text in every turn, and around nothing else"
            )
        for (start, stop), turn in zip(runs, turns, strict=True):
            first, last = encoded.token_to_chars(start).start, encoded.token_to_chars(stop - 1).end
            prompt = self._render(messages[:turn], where, prompt=True)
            given = len(prompt) if text.startswith(prompt) else places[turn - 1][1]
            place = text.find(messages[turn]["content"].strip(), first, last)
            if first < given or place < 0:
                raise UserError(
                    f"{where}: the chat template marks {text[first:last][:40]!r}..., which is not the text of "
                    f"message {turn + 1}; put {{% generation %}} ... {{% endgeneration %}} around the assistant's "
                    "text only"
                )
            finish = encoded.char_to_token(place + len(messages[turn]["content"].strip()) - 1)
            behind = self._end_places(ids, finish, min(stop + 1, len(ids)))  # it may follow the marked text
            end = self._end_token(ids, behind, where)
            mask[start : end + 1] = [1] * (end + 1 - start)
        return ids, mask

    def _by_prefixes(self, messages: list[Message], text: str, where: str) -> tuple[list[int], list[int]]:
        ids = self._tokens(text)
        mask = [0] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:i], where, prompt=True)
            after = self._render(messages[: i + 1], where)
            content = message["content"].strip()
            self._check_prefixes(text, before, after, content, f"{where}: message {i + 1}")
            head = self._tokens(before)
            if ids[: len(head)] != head:
                raise RowRejected(TURN_INSIDE_TOKEN)
            # Behind the prompt stand the text, which names no special token, and this turn's special tokens. Those never
            # join with other characters, so what follows cannot change the tokens up to there: `after` is compared as
            # text only.
            tail = text[text.find(content, len(before)) + len(content) : len(after)]
            closing = sum(self.tokenizer.convert_tokens_to_ids(t) in self._ends for t in self._special.findall(tail))
            end = self._end_token(ids, self._end_places(ids, len(head), len(ids))[:closing], where)
            mask[len(head) : end + 1] = [1] * (end + 1 - len(head))
        return ids, mask

    def _check_prefixes(self, text: str, before: str, after: str, content: str, where: str) -> None:
        for shorter, what in (
            (before, "the turns before it with the generation prompt"),
            (after, "the turns up to it"),
        ):
            if not text.startswith(shorter):
                at = next(i for i, (a, b) in enumerate(zip(shorter + "\0", text + "\0", strict=False)) if a != b)
                raise UserError(
                    f"{where}: the chat template is not prefix-stable: {what} render as "
                    f"...{shorter[at : at + 30]!r}, the whole conversation as ...{text[at : at + 30]!r} at character "
                    f"{at}; {MARKERS_REMEDY}, or use another template"
                )
        extra = text[len(before) : text.find(content, len(before))]
        if extra.strip():
            raise UserError(
                f"{where}: the chat template writes {extra!r} before the assistant's text but its generation prompt "
                f"does not, so a header would be learned as an answer; {MARKERS_REMEDY}, or add it under "
                "add_generation_prompt"
            )

    def _end_places(self, ids: list[int], start: int, stop: int) -> list[int]:
        return [i for i in range(start, stop) if ids[i] in self._ends]

    def _end_token(self, ids: list[int], places: list[int], where: str) -> int:
        """Position of the token that ends the turn: of the special tokens behind its text EOS, else the first."""
        if not places:
            raise UserError(
                f"{where}: the chat template puts no end token behind the assistant's text, so the model would never "
                "learn to stop; add {{ eos_token }} there"
            )
        eos = self.tokenizer.eos_token_id
        return next((i for i in places if ids[i] == eos), places[0])

    def _with_one_bos(self, ids: list[int], mask: list[int], where: str) -> EncodedChat:
        bos = self.tokenizer.bos_token_id
        if bos not in ids:
            return EncodedChat([bos, *ids], [0, *mask])
        if ids[0] != bos or ids.count(bos) != 1:
            raise UserError(
                f"{where}: BOS must stand once, at the front: the chat template gives {ids.count(bos)}, the first at "
                f"token {ids.index(bos)}; write {{{{ bos_token }}}} once at the start of the template"
            )
        return EncodedChat(ids, mask)


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    """Half-open ranges of ones."""
    edges = [i for i in range(len(mask) + 1) if (mask[i - 1] if i else 0) != (mask[i] if i < len(mask) else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))
