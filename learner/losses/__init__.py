"""Losses of policy and critic over packed policy tokens, the weights of stale data, and diagnostics of both.

Owns objectives, behaviour weights, regularisers and loss weighting. Knows nothing of models, ranks or micro-batches:
pure functions of tensors, whose weights are computed once per batch so that the losses of micro-batches add up.
`config` imports without torch.
"""
