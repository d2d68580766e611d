"""A small tokenizer: a sentencepiece unigram vocabulary written as `tokenizer.json`, with DeepSeek-V2's chat form."""

import io
import json
from collections.abc import Iterable
from pathlib import Path

VOCABULARY_SIZE = 1024
BOS, EOS, UNK = "<|begin_of_sentence|>", "<|end_of_sentence|>", "<unk>"
# Last, as in DeepSeek-V2's vocabulary, and outside the unigram model: text that spells their names stays text.
BOS_ID, EOS_ID, UNK_ID = VOCABULARY_SIZE - 2, VOCABULARY_SIZE - 1, 0
SPACE = "▁"
# DeepSeek-V2's template, which emits BOS itself. The generation block marks what the assistant says, end token included.
CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant:' }}"
    "{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def train_pieces(texts: Iterable[str], whole: Iterable[str]) -> list[tuple[str, float]]:
    """Train sentencepiece (unigram, byte fallback) and return its pieces with their log probabilities, by id; BOS and EOS
    are not among them.

    Args:
        texts: training documents.
        whole: strings that must stay one piece, such as `"▁lamp"`, `"User:"` or a newline.
    """
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.split("\n")]),
        model_writer=model,
        model_type="unigram",
        vocab_size=VOCABULARY_SIZE - 2,
        user_defined_symbols=list(whole),
        normalization_rule_name="identity",  # what goes in comes out, whitespace included
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        split_digits=True,
        byte_fallback=True,
        bos_id=-1,
        eos_id=-1,
        unk_id=UNK_ID,
        pad_id=-1,
        unk_piece=UNK,
        num_threads=1,  # the sums of several threads differ in the last digits
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


def write_tokenizer(directory: Path, pieces: list[tuple[str, float]], whole: Iterable[str]) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which transformers' `AutoTokenizer` loads.

    A unigram model takes the path of highest probability, so a piece of `whole` is kept whole by a score above 0
    (log probabilities are below); a longer one wins over its parts.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    forced = {piece: 10.0 * len(piece) for piece in whole}
    vocabulary = [(piece, forced.get(piece, score)) for piece, score in pieces]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=UNK_ID, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in (BOS, EOS)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,  # as DeepSeek-V2's
        "unk_token": UNK,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 163840,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
