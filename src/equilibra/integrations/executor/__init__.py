"""Plans and visits for frameworks with MoE layers of their own: Megatron-Core and transformers. Needs torch.

`balancer` builds process groups, counts routing, plans, and hands each layer its visits; `live` plans where no routing
is recorded. The framework's own package connects its layers to them, and to the copies.
"""
