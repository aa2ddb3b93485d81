"""What a cache serves and connects with, held to what the configuration says before memory is allocated (no torch)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from kvcore.config import Config, TransferConfig
from kvcore.contract import Arena, Transport
from kvcore.errors import ConfigError, PluginError
from kvcore.layout import Layout
from kvcore.plugins import Registry
from kvcore.transfer.wire.endpoint import CurveKeys

_TCP = re.compile(r"tcp://(?P<host>.+):(?P<port>\*|[0-9]+)")
_REMEDY = "write tcp://ADDRESS:PORT with an address of this host; * as the port takes a free one"


def open_transport(config: Config, registry: Registry, layouts: Mapping[str, Layout]) -> Transport:
    """Return a new transport of the configuration, which serves pools of these layouts.

    Raises:
        ConfigError: unknown transport or wrong options.
        PluginError: its plugin is broken or not enabled.
        UnsupportedError: it cannot serve the device or a layout.
    """
    transport = registry.transport(config.transfer.transport, **config.transfer.options)
    try:
        for layout in layouts.values():
            transport.supports(config.cache.device, layout).require(
                "transport cannot serve this pool", transport=transport.name, device=config.cache.device
            )
    except BaseException:
        transport.close()
        raise
    return transport


@dataclass(frozen=True)
class Registered:
    """The one transport of a cache, that all its sides share, and what its peers are told to reach it by."""

    transport: Transport
    record: bytes


def register(transport: Transport, arenas: Mapping[str, Arena]) -> Registered:
    """Make arenas known to a transport, and close it where that fails.

    Raises:
        PluginError: its endpoint record is no bytes: the peer would fail over a manifest that nobody can decode.
    """
    try:
        record = transport.register(arenas)
        if not isinstance(record, bytes):
            raise PluginError(
                "a transport's register() returns an endpoint record as bytes",
                transport=transport.name,
                expected="bytes",
                got=type(record).__name__,
            )
    except BaseException:
        transport.close()
        raise
    return Registered(transport, record)


def check_transfer(config: Config, registry: Registry, layouts: Mapping[str, Layout]) -> None:
    """Refuse what could not serve: errors of :func:`open_transport`, :func:`check_bind` and :func:`keys_of`."""
    check_bind(config.transfer.bind)
    keys_of(config.transfer)
    open_transport(config, registry, layouts).close()


def check_bind(address: str) -> None:
    """Refuse an address that a sender could not listen on. A port that is taken now may be free by then.

    Raises:
        ConfigError: neither ``tcp://`` with an address or interface of this host and a port, nor ``ipc://`` with a path in
            a folder there is.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        folder = Path(rest).parent
        if not rest.startswith(("@", "*")) and not folder.is_dir():
            raise ConfigError("no such folder", key="transfer.bind", got=address, folder=str(folder))
        return
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError("not an address to listen on", key="transfer.bind", got=address, remedy=_REMEDY)
    host, port = match["host"], match["port"]
    if port != "*" and int(port) > 65535:  # ZeroMQ would take the rest of a division
        raise ConfigError("no such port", key="transfer.bind", got=address, port=port, remedy="0 to 65535, or *")
    if host == "*" or _is_loopback(host):
        return
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        probe.linger = 0
        try:
            probe.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            cause = error.strerror
            raise ConfigError(
                "not an address of this host", key="transfer.bind", got=address, host=host, cause=cause, remedy=_REMEDY
            ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def keys_of(config: TransferConfig) -> CurveKeys | None:
    """The CURVE keys of the configuration, None without. ConfigError for a certificate that cannot be read."""
    if not config.curve_certificate:
        return None
    try:
        public, secret = zmq.auth.load_certificate(config.curve_certificate)
        peer, _ = zmq.auth.load_certificate(config.curve_peer)
    except (OSError, ValueError) as error:
        raise ConfigError("cannot read a CURVE certificate", cause=str(error)) from error
    if secret is None:
        raise ConfigError("the certificate has no secret key", key="transfer.curve_certificate")
    return CurveKeys(public, secret, peer)
