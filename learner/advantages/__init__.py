"""Credit assignment: rewards, values and logprobs of packed policy tokens in, advantages and critic targets out.

Owns the estimators, their importance correction, whitening and the registry by which a recipe names one. Knows nothing
of models, processes, rows or micro-batches: everything here is a pure function of tensors, on any device.
`config` and `registry` import without torch; `estimate.estimate_advantages` is the entry point.
"""
