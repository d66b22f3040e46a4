"""Stores and process groups listen on one address, which on one machine is the loopback device's."""

import os
from datetime import timedelta

import psutil
import pytest

from verl_fn.backends.agreement import open_store, use_loopback

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_store_listens_on_its_address_alone(address):
    store = open_store(address, 1, timedelta(seconds=10))
    listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == store.port]
    assert set(listening) == {address}


@pytest.mark.parametrize(("address", "device"), [("127.0.0.1", "lo"), ("::1", "lo"), ("192.0.2.2", None)])
def test_ranks_of_one_machine_use_the_loopback_device(monkeypatch, address, device):
    for name in NAMES:
        # Set first, so that it is removed again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_loopback(address)
    assert [os.environ.get(name) for name in NAMES] == [device, device]


def test_a_device_of_the_users_choice_stays(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "eth1")
    use_loopback("127.0.0.1")
    assert [os.environ[name] for name in NAMES] == ["eth1", "eth1"]
