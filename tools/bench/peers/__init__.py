"""Other systems that carry trajectories from producers to a consumer, for `vagen bench buffer`.

A module here runs in a Python of its own, `.peers/<name>`, made by `make bench-peers` from the requirements beside it.
"""
