"""Which URL belongs to which shard of a buffer, and how a batch is divided over them. Pure; knows no Redis."""

from __future__ import annotations

from collections.abc import Sequence

from vagen.common.errors import ConfigError

__all__ = ["divide", "divide_ready", "split_urls"]


def split_urls(redis_url: str, num_shards: int) -> list[str]:
    """The URL of each shard: all of them separated by commas, or one that all share, as that of a cluster.

    Raises `ConfigError` when there are as many as neither.
    """
    urls = redis_url.split(",")
    if len(urls) == 1:
        return urls * num_shards
    if len(urls) != num_shards:
        raise ConfigError(f"--redis: expected 1 URL or one for each of the {num_shards} shards, got {len(urls)}")
    return urls


def divide(total: int, weights: Sequence[int], unit: int) -> list[int]:
    """`total` trajectories in proportion to `weights`, in multiples of `unit`, the size of a group.

    The shares add up to `total` and are at least a unit each, as far as there are units; what the rounding leaves goes
    to the largest remainders, the first ones first. `total` is a multiple of `unit`.
    """
    assert total % unit == 0 and any(weights), f"{total} over {list(weights)} in units of {unit}"
    num_units = total // unit
    least = 1 if num_units >= len(weights) else 0
    free = num_units - least * len(weights)
    exact = [free * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: free - sum(shares)]:
        shares[i] += 1
    return [unit * (least + share) for share in shares]


def divide_ready(total: int, ready: Sequence[int], unit: int) -> list[int] | None:
    """What each shard gives to a batch of `total`: in proportion to what it has, and never more.

    None while there is too little. In multiples of `unit` where that works out; where it does not, because groups are
    of odd sizes, in single trajectories, and a shard then gives a whole group more.
    """
    for step in dict.fromkeys((unit, 1)):
        units = [count // step for count in ready]
        wanted = total // step
        if total % step or sum(units) < wanted:
            continue
        # Largest remainders never exceed what a shard has, since its exact share is at most that.
        exact = [wanted * count / sum(units) for count in units]
        shares = [int(share) for share in exact]
        by_remainder = sorted(range(len(units)), key=lambda i: (shares[i] - exact[i], i))
        for i in by_remainder[: wanted - sum(shares)]:
            shares[i] += 1
        return [step * share for share in shares]
    return None
