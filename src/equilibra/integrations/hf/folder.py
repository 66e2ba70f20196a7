"""A model's folder: config.json, perhaps weights (safetensors) and a tokenizer. Nothing in it is ever executed."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from equilibra.core.errors import InputError
from equilibra.execute.moe.spec import MoESpec
from equilibra.integrations.hf.families import Family, family_of

__all__ = ["ModelFolder", "Text", "keep_digits", "open_model_folder", "text_of", "train_tokenizer"]

# Text: from words to tokens and back. A model folder brings a tokenizer; without one, one is trained on the task.
#
# In a trained tokenizer words that many prompts repeat are tokens, whole or not at all, and everything else is letters
# and digits: spelling stays spelling, arithmetic stays arithmetic. (Pairs joined by frequency, as in BPE, tear words
# apart where they share letters with a frequent one, and a small model learns far less from those.) It depends on the
# texts alone, so every rank trains the same one. It is saved as tokenizer.json, which transformers loads.


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


# Norms of a float64 model in float64.
#
# transformers computes RMS norms in float32 whatever the model's type is. In a float64 model that rounds to eight
# digits
# where the sixteenth differs between planners, and a value on the edge falls to either side: after some steps two runs
# that should be the same are not.


def keep_digits(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the norms of a float64 model compute in float64; other types stay as they are."""
    if dtype != torch.float64:
        return
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            object.__setattr__(module, "forward", partial(_norm, module))


def _norm(module: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401 - every family has a class of its own
    scaled: Tensor = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * scaled  # type: ignore[no-any-return]


MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    """What a folder says of a model."""

    path: Path
    """the folder"""
    config: Any
    """transformers' configuration"""
    family: Family
    """of the model"""

    @property
    def spec(self) -> MoESpec:
        """Its MoE layers."""
        return self.family.spec(self.config)

    @property
    def has_weights(self) -> bool:
        """Whether training starts from weights in the folder."""
        return any(self.path.glob("*.safetensors"))

    @property
    def has_tokenizer(self) -> bool:
        """Whether text is cut as the folder says."""
        return (self.path / "tokenizer.json").is_file() or (self.path / "tokenizer_config.json").is_file()

    def config_file(self, dtype: torch.dtype) -> bytes:
        """The config.json to publish beside weights of that type."""
        config = copy.deepcopy(self.config)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.family.model_type]]
        config.dtype = str(dtype).removeprefix("torch.")
        return (json.dumps(config.to_dict(), indent=2, default=str) + "\n").encode()


def open_model_folder(path: str | Path) -> ModelFolder:
    """Read config.json and find the family; the model's own code, if a folder brings some, is not run."""
    path = Path(path)
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"cannot use {path} as a model: there is no {file.name} in it")
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"cannot read {file}: {file.stat().st_size} bytes are too many for a configuration")
        said = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("model_type"), str):
        raise InputError(f"cannot read {file}: it must say a model_type, such as qwen3_moe")
    family = family_of(said["model_type"])
    if said.get("quantization_config") is not None:
        raise InputError(f"cannot train {path}: its weights are quantized; convert them to bfloat16 first")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        folder = ModelFolder(path=path, config=config, family=family)
        _ = folder.spec
    except InputError as error:
        raise InputError(f"cannot use {file}: {error}") from error
    except Exception as error:  # whatever transformers raises on strange values
        raise InputError(f"cannot use {file}: {type(error).__name__}: {str(error)[:300]}") from error
    return folder
