"""One MoE layer that executes visits: router, dispatch, experts, combine; and the reference it equals."""
