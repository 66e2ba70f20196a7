"""Plans and visits for frameworks with MoE layers of their own: Megatron-Core and transformers. Needs torch.

`balancer` counts routing, builds process groups and plans; `visits` hands each layer its visits; `live` and `history`
plan where no routing is recorded. The framework's own package connects its layers to them, and to the copies.
"""
