"""Routing as vLLM, SGLang, verl, slime and NeMo-RL report it, converted to one form. Needs numpy only, no engine.

model      layers, experts and dense layers of the model that an engine reports about
decode     base64, .npy, lists and tensors to arrays, within limits; nothing is unpickled
sequence   an engine's rows to the tokens of a sequence, and sequences to a trace
"""

from equilibra.integrations.routing_formats.model import RoutedModel, model_from_config, model_from_folder
from equilibra.integrations.routing_formats.sequence import RoutedSequence, Rows, align, save_sequences

__all__ = [
    "RoutedModel", "RoutedSequence", "Rows", "align", "model_from_config", "model_from_folder", "save_sequences",
]  # fmt: skip
