"""One executor of visits for frameworks that have layers of their own (Megatron-Core, transformers). Needs torch.

A framework numbers slots: homes, then copies. Here are the load of its routing, its process groups, the visits of a
layer in their order, the exchange of copies, and a balancer that plans and arms; what is left to a framework's package
is where its layers call them.
"""
