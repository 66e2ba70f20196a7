"""Routing as other people's engines report it, brought into one form: what vLLM, SGLang, verl, slime and NeMo-RL share.

model      what a model's reports look like: columns, dense layers, experts
decode     base64, .npy, lists and tensors to arrays, with limits; nothing is unpickled
sequence   rows of an engine to tokens of a sequence, with and without routing
save       sequences to a trace, one at a time

numpy alone is needed: no engine has to be installed.
"""

from equilibra.integrations.routing_formats.model import RoutedModel, model_from_config, model_from_folder
from equilibra.integrations.routing_formats.sequence import (
    RoutedSequence,
    Rows,
    align,
    save_sequences,
    trace_of_sequences,
)

__all__ = [
    "RoutedModel",
    "RoutedSequence",
    "Rows",
    "align",
    "model_from_config",
    "model_from_folder",
    "save_sequences",
    "trace_of_sequences",
]
