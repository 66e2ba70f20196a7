"""Text: from words to tokens and back. A model folder brings a tokenizer; without one, one is trained on the task.

In a trained tokenizer words that many prompts repeat are tokens, whole or not at all, and everything else is letters
and digits: spelling stays spelling, arithmetic stays arithmetic. (Pairs joined by frequency, as in BPE, tear words
apart where they share letters with a frequent one, and a small model learns far less from those.) It depends on the
texts alone, so every rank trains the same one. It is saved as tokenizer.json, which transformers loads.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from equilibra.core.errors import InputError
from equilibra.integrations.hf.folder import ModelFolder

__all__ = ["Text", "text_of", "train_tokenizer"]

END = "<|end|>"
START = "<|start|>"
PAD = "<|pad|>"


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A tokenizer and what a conversation looks like."""

    tokenizer: PreTrainedTokenizerBase
    """transformers'"""
    end: int
    """token that ends an answer"""
    pad: int
    """token that fills up; never looked at"""

    @property
    def size(self) -> int:
        """Tokens there are."""
        return len(self.tokenizer)

    def prompt(self, text: str) -> NDArray[np.int64]:
        """Tokens of a question, up to where the answer begins: by the chat template where there is one."""
        if self.tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
            return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
        return np.array(self.tokenizer.encode(text), np.int64)

    def answer(self, text: str) -> NDArray[np.int64]:
        """Tokens of an answer, with the one that ends it."""
        return np.array([*self.tokenizer.encode(text, add_special_tokens=False), self.end], np.int64)

    def read(self, tokens: NDArray[np.int64]) -> str:
        """An answer's text, without the token that ends it."""
        return str(self.tokenizer.decode(tokens[tokens != self.end].tolist(), skip_special_tokens=True))

    def files(self) -> dict[str, bytes]:
        """What transformers loads it from."""
        with TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def digest(self) -> str:
        """Of all tokens: recordings say which tokenizer they were made with."""
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def text_of(folder: ModelFolder, texts: Iterable[str]) -> Text:
    """The folder's tokenizer, or one trained on these texts with as many tokens as the model has."""
    if not folder.has_tokenizer:
        return _text(train_tokenizer(list(texts), size=folder.config.vocab_size))
    try:
        loaded = AutoTokenizer.from_pretrained(folder.path, trust_remote_code=False)
    except Exception as error:  # whatever transformers raises on strange files
        raise InputError(
            f"cannot read the tokenizer in {folder.path}: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if len(loaded) > folder.config.vocab_size:
        raise InputError(
            f"the tokenizer in {folder.path} has {len(loaded)} tokens, the model {folder.config.vocab_size}: they do "
            "not fit"
        )
    return _text(loaded)


def _text(tokenizer: PreTrainedTokenizerBase) -> Text:
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the tokenizer has no eos_token: there must be a token that ends an answer")
    pad = tokenizer.pad_token_id
    return Text(tokenizer=tokenizer, end=int(end), pad=int(end if pad is None else pad))


def train_tokenizer(texts: Sequence[str], *, size: int) -> PreTrainedTokenizerBase:
    """Bytes, and words that at least a quarter of the texts hold, the most frequent first: at most `size` tokens."""
    cut = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ])  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [PAD, START, END]
    if size < len(alphabet) + len(special):
        raise InputError(
            f"a vocabulary of {size} is too small: {len(alphabet) + len(special)} tokens are needed for all bytes"
        )
    words = _frequent(texts, cut)[: size - len(alphabet) - len(special)]
    number_of = {token: number for number, token in enumerate([*special, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=number_of, merges=[], ignore_merges=True))  # whole words, or letters
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    made: Any = PreTrainedTokenizerFast  # transformers has no types for it
    fast: PreTrainedTokenizerBase = made(
        tokenizer_object=tokenizer, eos_token=END, bos_token=START, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    return fast


def _frequent(texts: Sequence[str], cut: pre_tokenizers.PreTokenizer) -> list[str]:
    """Pieces of more than one letter that many texts hold, with the space before them, as bytes are written."""
    held: Counter[str] = Counter()
    for text in texts:
        held.update({piece for piece, _ in cut.pre_tokenize_str(text)})
    often = [piece for piece, count in held.items() if 4 * count >= len(texts) and len(piece) > 1]
    return sorted(often, key=lambda piece: (-held[piece], piece))
