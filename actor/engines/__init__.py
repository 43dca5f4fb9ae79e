"""The actor's side of its engines: a pool that routes, retries and bounds requests, and what it is made of.

config    section `actor.engines`          pool      members, slots, probes, admission
roster    which engines there are          routing   which of them takes a request
member    one engine of the pool           episode   the client of one episode
http      calls and identity               exchange  a request for tokens and the checks of its answer
load      what an engine says of itself    limit     how many requests it gets
openai    evaluation with other servers
"""
