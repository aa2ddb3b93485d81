"""What a cache would serve and connect with is refused before a byte of a pool is allocated."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from kvcore import KVCache, LayerGroup, ModelSpec, TensorSpec, load_config, load_plugins
from kvcore.builtin.commands.keys import write_pair
from kvcore.config import TransferConfig
from kvcore.contract import Transport, unsupported
from kvcore.engine.links import check_bind, keys_of, keys_to
from kvcore.errors import ConfigError, KVCoreError, UnsupportedError
from kvcore.memory.store import Store
from kvcore.plugins import Registry
from kvcore.transfer.shm.transport import ShmTransport

MODEL = ModelSpec("m", (LayerGroup("full", (0,), (TensorSpec("k", 1, 8), TensorSpec("v", 1, 8)), 1),), "fp32")


@pytest.fixture
def no_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocates(*args: Any, **options: Any) -> None:
        raise AssertionError("memory is allocated")

    monkeypatch.setattr(Store, "__init__", allocates)


def refused(kind: type[KVCoreError], registry: Registry | None = None, **transfer: Any) -> KVCoreError:
    config = load_config(
        None, {"cache.memory": "64KiB", **{f"transfer.{key}": value for key, value in transfer.items()}}
    )
    with pytest.raises(kind) as caught:
        KVCache.create(MODEL, config, registry or load_plugins())
    return caught.value


@pytest.mark.usefixtures("no_pools")
def test_transports_and_their_options_are_refused_before_pools() -> None:
    error = refused(ConfigError, transport="smh")
    assert (error.fields["transport"], error.remedy) == ("smh", "did you mean 'shm'?")
    assert refused(ConfigError, options={"copier": "inline"}).fields["option"] == "copier"
    assert refused(ConfigError, options={"stage_bytes": 0}).fields["key"] == "transfer.options.stage_bytes"


@pytest.mark.usefixtures("no_pools")
@pytest.mark.parametrize(
    "address",
    [
        "", "127.0.0.1:5", "tcp://127.0.0.1", "tcp://:5", "tcp://127.0.0.1:x", "tcp://127.0.0.1:-1",
        "tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:*\n", "tcp://256.1.1.1:*", "tcp://nowhere:*",
        "tcp://203.0.113.7:*", "udp://127.0.0.1:*", "inproc://x", "ipc://", "ipc:///no/such/folder/x",
    ],
)  # fmt: skip
def test_addresses_are_refused_before_pools(address: str) -> None:
    assert refused(ConfigError, bind=address).fields["key"] == "transfer.bind"


@pytest.mark.parametrize("address", ["tcp://*:*", "tcp://0.0.0.0:0", "tcp://127.0.0.1:65535", "ipc://@x", "ipc://*"])
def test_addresses_that_can_be_listened_on_are_taken(address: str) -> None:
    check_bind(address)


@pytest.mark.usefixtures("no_pools")
@pytest.mark.parametrize("address", ["tcp://*:*", "tcp://0.0.0.0:*"])
def test_other_hosts_reach_a_sender_only_with_keys_or_where_anyone_may(tmp_path: Path, address: str) -> None:
    error = refused(ConfigError, bind=address)
    assert (error.fields["key"], error.fields["got"]) == ("transfer.bind", address)
    assert "kvcore keys new" in error.remedy
    public, secret = (str(path) for path in write_pair("a", tmp_path))
    for allowed in ({"allow": "anyone"}, {"curve_certificate": secret, "curve_peers": [public]}):
        with pytest.raises(AssertionError, match="memory is allocated"):
            refused(ConfigError, bind=address, **allowed)


@pytest.mark.parametrize(("address", "local"), [("tcp://lo:*", True), ("tcp://127.1.2.3:*", True), ("ipc://*", True)])
def test_addresses_of_this_host_only(address: str, local: bool) -> None:
    assert check_bind(address) is local


def test_a_port_in_use_is_left_to_whoever_serves(tmp_path: Path) -> None:
    check_bind(f"ipc://{tmp_path}/x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check_bind(f"tcp://127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.usefixtures("no_pools")
def test_certificates_are_read_before_pools(tmp_path: Path) -> None:
    public, secret = (str(path) for path in write_pair("a", tmp_path))
    assert "cannot read" in refused(ConfigError, curve_certificate="/none", curve_peers=[public]).message
    assert "no secret key" in refused(ConfigError, curve_certificate=public, curve_peers=[public]).message
    assert "cannot read" in refused(ConfigError, curve_certificate=secret, curve_peers=[public, "/none"]).message


@pytest.mark.usefixtures("no_pools")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    public, secret = write_pair("a", tmp_path)
    secret.chmod(mode)
    error = refused(ConfigError, curve_certificate=str(secret), curve_peers=[str(public)])
    assert error.fields["key"] == "transfer.curve_certificate"
    assert f"chmod 600 {secret}" in error.remedy


def test_which_key_a_sender_has_is_said_where_there_are_several(tmp_path: Path) -> None:
    pairs = {name: [str(path) for path in write_pair(name, tmp_path)] for name in "abc"}
    publics = [pairs[name][0] for name in "bc"]
    config = TransferConfig(curve_certificate=pairs["a"][1], curve_peers=tuple(publics))
    every = keys_of(config)
    assert every is not None
    assert len(set(every.peers)) == 2
    for number, public in enumerate(publics):
        one = keys_to(config, public)
        assert one is not None
        assert one.peers == (every.peers[number],)
    for wrong in (None, "d.key"):
        with pytest.raises(ConfigError) as caught:
            keys_to(config, wrong)
        assert caught.value.fields["choices"] == publics
    alone = TransferConfig(curve_certificate=pairs["a"][1], curve_peers=(publics[0],))
    assert keys_to(alone, None) == keys_to(config, publics[0])
    assert keys_to(TransferConfig(), None) is None
    with pytest.raises(ConfigError):
        keys_to(TransferConfig(), publics[0])


@pytest.mark.usefixtures("no_pools")
def test_a_transport_that_cannot_serve_the_pool_is_closed_and_refused() -> None:
    made: list[Any] = []

    class Picky(ShmTransport):
        name = "picky"
        closed = False

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def supports(self, device: str, layout: Any) -> Any:
            return unsupported("no such wire")

        def close(self) -> None:
            super().close()
            self.closed = True

    registry = load_plugins()
    registry._items["transports"]["picky"] = ("fake", Picky)
    error = refused(UnsupportedError, registry, transport="picky")
    assert (error.fields["reason"], [item.closed for item in made]) == ("no such wire", [True])
    assert issubclass(Picky, Transport)


@pytest.mark.usefixtures("no_pools")
@pytest.mark.parametrize("memory", ["999TiB", "9999999TiB"])
def test_more_memory_than_the_machine_has_is_refused_before_units_are_counted(memory: str) -> None:
    config = load_config(None, {"cache.memory": memory})
    with pytest.raises(ConfigError, match="less memory than the cache asks for") as caught:
        KVCache.create(MODEL, config, load_plugins())
    assert caught.value.fields["key"] == "cache.memory"
    assert caught.value.fields["total_bytes"] < 2**50
    pool = {"retraction.backend": "host_pool", "retraction.options": {"size": "100TiB"}}
    with pytest.raises(ConfigError, match="less memory than the pool asks for"):
        KVCache.create(MODEL, load_config(None, {"cache.memory": "64KiB", **pool}), load_plugins())
