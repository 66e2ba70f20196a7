"""vLLM: its routing as sequences, and the engine inside the training processes. vLLM is imported when it is started."""

from equilibra.integrations.vllm.routing import sequences_of_outputs, sequences_of_response

__all__ = ["sequences_of_outputs", "sequences_of_response"]
