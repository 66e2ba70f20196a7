"""Executes visits inside frameworks with MoE layers of their own: Megatron-Core and transformers. Needs torch.

`balancer` counts routing, builds process groups and plans; `visits` hands each layer its visits and exchanges copies.
The framework's own package only connects its layers to them.
"""
