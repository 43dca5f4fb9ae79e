"""The buffer between actors and learner: ingest, layout in Redis, admission, claim, accounting.

Imports without torch. The learner reaches the buffer through `vagen.buffer.learner_store`, never through ZeroMQ.
"""
