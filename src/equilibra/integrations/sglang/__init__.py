"""SGLang: its routing as sequences, and the engine over HTTP. SGLang itself is never imported."""

from equilibra.integrations.sglang.routing import sequence_of_result, sequences_of_response

__all__ = ["sequence_of_result", "sequences_of_response"]
