"""A model's folder: config.json, perhaps weights (safetensors) and a tokenizer. No code in it is ever executed.

Without a tokenizer, one is trained on the task's texts: words that many prompts share become single tokens, everything
else is spelled in bytes and single digits. (BPE would split words that share letters with a frequent one, and a small
model learns far less from that.) It depends on the texts alone, so every rank trains the same one. It is saved as
tokenizer.json, which transformers loads.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from equilibra.core.errors import InputError
from equilibra.execute.experts import MoESpec
from equilibra.integrations.hf.families import Family, family_of
from equilibra.integrations.routing_formats import read_config

END = "<|end|>"
START = "<|start|>"
PAD = "<|pad|>"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFolder:
    """A model as its folder describes it."""

    path: Path
    config: Any
    """transformers' configuration"""
    family: Family

    @property
    def spec(self) -> MoESpec:
        return self.family.spec(self.config)

    @property
    def has_weights(self) -> bool:
        return any(self.path.glob("*.safetensors"))

    @property
    def has_tokenizer(self) -> bool:
        return (self.path / "tokenizer.json").is_file() or (self.path / "tokenizer_config.json").is_file()

    def config_file(self, dtype: torch.dtype) -> bytes:
        """The config.json to publish beside weights of that type."""
        config = copy.deepcopy(self.config)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.family.model_type]]
        config.dtype = str(dtype).removeprefix("torch.")
        return (json.dumps(config.to_dict(), indent=2, default=str) + "\n").encode()

    def build(self, dtype: torch.dtype, *, expert_width: int | None = None) -> Any:  # noqa: ANN401 - a class made at run time
        """The transformers model with weights from torch's generator. expert_width: instead of the configuration's."""
        config = copy.deepcopy(self.config)
        if expert_width is not None:
            setattr(config, self.family.expert_width, expert_width)
        try:
            made: Any = transformers.AutoModelForCausalLM  # transformers has no types for it
            model = made.from_config(config, dtype=dtype)
        except Exception as error:  # whatever transformers raises on shapes that do not fit
            raise InputError(f"cannot build the model in {self.path}: {type(error).__name__}: {error}") from error
        norms_in_float64(model, dtype)
        return model


def open_model_folder(path: str | Path) -> ModelFolder:
    """Read config.json and find the model's family, without running code that the folder may contain."""
    path = Path(path)
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"cannot use {path} as a model folder: it has no {file.name}")
    config = read_config(file)
    if not isinstance(config.get("model_type"), str):
        raise InputError(f"cannot read {file}: it must have a model_type, such as qwen3_moe")
    family = family_of(config["model_type"])
    if config.get("quantization_config") is not None:
        raise InputError(f"cannot train {path}: its weights are quantized; convert them to bfloat16 first")
    try:
        folder = ModelFolder(
            path=path, config=transformers.AutoConfig.from_pretrained(path, trust_remote_code=False), family=family
        )  # fmt: skip
        _ = folder.spec
    except InputError as error:
        raise InputError(f"cannot use {file}: {error}") from error
    except Exception as error:  # whatever transformers raises on strange values
        raise InputError(f"cannot use {file}: {type(error).__name__}: {str(error)[:300]}") from error
    return folder


def norms_in_float64(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the RMS norms of a float64 model compute in float64; does nothing for other types.

    transformers computes them in float32. That magnifies differences in the last float64 digit between planners to
    float32 roundoff, and after some steps runs that should be identical diverge.
    """
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
                object.__setattr__(module, "forward", partial(_norm, module))


def _norm(module: Any, hidden: Tensor) -> Tensor:  # noqa: ANN401 - every family has its own class
    scaled: Tensor = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * scaled  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """A tokenizer and the format of a conversation."""

    tokenizer: transformers.PreTrainedTokenizerBase
    end: int
    """token that ends an answer"""
    pad: int

    def prompt(self, text: str) -> NDArray[np.int64]:
        """Tokens of a question up to where the answer begins, by the chat template if there is one."""
        if self.tokenizer.chat_template:
            message = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
            return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
        return np.array(self.tokenizer.encode(text), np.int64)

    def answer(self, text: str) -> NDArray[np.int64]:
        return np.array([*self.tokenizer.encode(text, add_special_tokens=False), self.end], np.int64)

    def read(self, tokens: NDArray[np.int64]) -> str:
        return str(self.tokenizer.decode(tokens[tokens != self.end].tolist(), skip_special_tokens=True))

    def files(self) -> dict[str, bytes]:
        """The files from which transformers loads the tokenizer, by name."""
        with TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def digest(self) -> str:
        """Hash of the vocabulary; recordings carry it to identify their tokenizer."""
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def text_of(folder: ModelFolder, texts: Iterable[str]) -> Text:
    """The folder's tokenizer, or one trained on these texts with at most as many tokens as the model's vocabulary."""
    size = folder.config.vocab_size
    tokenizer: transformers.PreTrainedTokenizerBase
    if folder.has_tokenizer:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path, trust_remote_code=False)
        except Exception as error:  # whatever transformers raises on strange files
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            raise InputError(f"cannot read the tokenizer in {folder.path}: {reason}") from error
        if len(tokenizer) > size:
            raise InputError(
                f"the tokenizer in {folder.path} has {len(tokenizer)} tokens, but the model's vocabulary only {size}: "
                "use the tokenizer that belongs to the model"
            )
    else:
        tokenizer = _train_tokenizer(list(texts), size=size)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if end is None:
        raise InputError("the tokenizer has no eos_token: one token must end an answer")
    return Text(tokenizer=tokenizer, end=int(end), pad=int(end if pad is None else pad))


def _train_tokenizer(texts: Sequence[str], *, size: int) -> transformers.PreTrainedTokenizerBase:
    """A tokenizer of all bytes and the most frequent words that a quarter of the texts hold, at most `size` tokens."""
    cut = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    ])  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [PAD, START, END]
    least = len(alphabet) + len(special)
    if size < least:
        raise InputError(f"a vocabulary of {size} is too small: all bytes take {least} tokens")
    words = _frequent(texts, cut)[: size - least]
    number_of_token = {token: number for number, token in enumerate([*special, *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=number_of_token, merges=[], ignore_merges=True))  # whole words, or bytes
    tokenizer.pre_tokenizer, tokenizer.decoder = cut, decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    made: Any = transformers.PreTrainedTokenizerFast  # transformers has no types for it
    fast: transformers.PreTrainedTokenizerBase = made(
        tokenizer_object=tokenizer, eos_token=END, bos_token=START, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    return fast


def _frequent(texts: Sequence[str], cut: pre_tokenizers.PreTokenizer) -> list[str]:
    """Words in at least a quarter of the texts, most frequent first, each with the space before it."""
    num_texts_of_piece: Counter[str] = Counter()
    for text in texts:
        num_texts_of_piece.update({piece for piece, _ in cut.pre_tokenize_str(text)})
    often = [piece for piece, count in num_texts_of_piece.items() if 4 * count >= len(texts) and len(piece) > 1]
    return sorted(often, key=lambda piece: (-num_texts_of_piece[piece], piece))


def dense_weights(model: Any, folder: ModelFolder, blocks: Mapping[int, Any]) -> dict[str, Tensor]:  # noqa: ANN401
    """Views of everything but experts. blocks: the MoE block of every layer that has one, by layer number."""
    inside = tuple(f"model.layers.{n}.mlp." for n in blocks)
    found: dict[str, Tensor] = {
        name: value for name, value in model.state_dict().items() if not name.startswith(inside)
    }
    if folder.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    naming = folder.family.naming_for(list(blocks))
    for layer, block in enumerate(blocks.values()):
        router = getattr(block, folder.family.router)
        found[naming.name(naming.router, layer, "a router")] = router.weight
        if getattr(router, "bias", None) is not None:
            found[naming.name(naming.router_bias, layer, "a bias")] = router.bias
        if hasattr(router, "e_score_correction_bias"):
            found[naming.name(naming.selection_bias, layer, "a bias")] = router.e_score_correction_bias
        if hasattr(block, "shared_experts"):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                name = naming.name(naming.shared, layer, "a shared expert", matrix=matrix)
                found[name] = getattr(block.shared_experts, matrix).weight
    return found
