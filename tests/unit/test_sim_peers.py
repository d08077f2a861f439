"""Routers to be compared with keep the rules that they are named for."""

from __future__ import annotations

from collections import Counter

import pytest

from serving.core.state import Tier
from workbench.sim.fleet import load_fleet
from workbench.sim.kernel import Kernel
from workbench.sim.peers import BALANCE_ABS_THRESHOLD, PEERS, CacheAware, LeastLoad, Peer, PrefixLoad, RoundRobin
from workbench.sim.serving_fleet import ServingFleet
from workbench.sim.workload import SimRequest, Workload

FLEET = ServingFleet(load_fleet(), Workload("none", (), 512), Kernel())
MODEL = "llama-70b"  # four replicas


def ask(number: int, *blocks: int) -> SimRequest:
    return SimRequest(str(number), 0.0, MODEL, Tier.DEFAULT, 2048, 100, blocks)


def send(peer: Peer, number: int, *blocks: int) -> str:
    request = ask(number, *blocks)
    chosen = peer.choose(request, 0.0)
    assert chosen is not None
    assert FLEET.replicas[chosen].model == MODEL
    peer.on_dispatched(chosen, request, 0.0)
    return chosen


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_serves_its_model_and_counts_what_it_sent(name: str):
    peer = PEERS[name](FLEET, seed=1)
    chosen = [send(peer, number, number % 3, 100 + number) for number in range(40)]
    assert Counter(peer.load) == Counter(peer.load) | Counter(chosen)
    peer.on_finished(chosen[0], ask(0), 0.0)
    assert sum(peer.load.values()) == 39


@pytest.mark.parametrize("peer", [RoundRobin, LeastLoad], ids=["round robin", "least load"])
def test_load_alone_spreads_evenly(peer: type[Peer]):
    router = peer(FLEET, seed=1)
    assert set(Counter(send(router, number) for number in range(40)).values()) == {10}


def test_prefix_and_load_follows_the_prompt_until_the_load_says_otherwise():
    router = PrefixLoad(FLEET, seed=1)
    first = send(router, 0, 1, 2, 3, 4)
    assert send(router, 1, 1, 2, 3, 4) == first
    assert send(router, 2, 9) != first


def test_cache_aware_goes_to_the_smallest_tree_and_to_the_fewest_requests_when_load_is_uneven():
    router = CacheAware(FLEET, seed=1)
    assert len({send(router, number, 100 + number) for number in range(4)}) == 4
    hot = send(router, 4, 7, 8)
    for number in range(BALANCE_ABS_THRESHOLD):
        assert send(router, 10 + number, 7, 8) == hot
    assert send(router, 999, 7, 8) != hot
