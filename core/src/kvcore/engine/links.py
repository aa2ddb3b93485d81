"""What a cache serves and connects with, held to what the configuration says before memory is allocated (no torch)."""

from __future__ import annotations

import ipaddress
import re
import stat
from collections.abc import Mapping, Sequence
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
    """Refuse what could not serve: errors of :func:`open_transport`, :func:`check_bind` and :func:`keys_of`.

    Raises:
        ConfigError: an address that other hosts reach, with no keys and not for anyone.
    """
    _check_exposure(config.transfer, local=check_bind(config.transfer.bind))
    keys_of(config.transfer)
    open_transport(config, registry, layouts).close()


def _check_exposure(config: TransferConfig, *, local: bool) -> None:
    if local or config.curve_certificate or config.allow == "anyone":
        return
    raise ConfigError(
        "without keys a sender is for this host only",
        key="transfer.bind",
        got=config.bind,
        remedy="make keys (kvcore keys new) and configure them, or set transfer.allow to anyone",
    )


def check_bind(address: str) -> bool:
    """Whether only this host reaches an address, which is refused where a sender could not listen on it.

    A port that is taken now may be free by then.

    Raises:
        ConfigError: neither ``tcp://`` with an address or interface of this host and a port, nor ``ipc://`` with a path in
            a folder there is.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        folder = Path(rest).parent
        if not rest.startswith(("@", "*")) and not folder.is_dir():
            raise ConfigError("no such folder", key="transfer.bind", got=address, folder=str(folder))
        return True
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError("not an address to listen on", key="transfer.bind", got=address, remedy=_REMEDY)
    host, port = match["host"], match["port"]
    if port != "*" and int(port) > 65535:  # ZeroMQ would take the rest of a division
        raise ConfigError("no such port", key="transfer.bind", got=address, port=port, remedy="0 to 65535, or *")
    if host == "*" or _is_loopback(host):
        return host != "*"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        probe.linger = 0
        try:
            probe.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            cause = error.strerror
            raise ConfigError(
                "not an address of this host", key="transfer.bind", got=address, host=host, cause=cause, remedy=_REMEDY
            ) from error
        bound = _TCP.fullmatch(probe.getsockopt_string(zmq.LAST_ENDPOINT))
        return bound is not None and _is_loopback(bound["host"])  # an interface by its name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def keys_of(config: TransferConfig, peers: Sequence[str] | None = None) -> CurveKeys | None:
    """The CURVE keys of the configuration, None without; ``peers`` are some of its peers instead of all.

    Raises:
        ConfigError: a certificate that cannot be read, or a secret one that others than its owner may use.
    """
    if not config.curve_certificate:
        return None
    public, secret = _certificate(config.curve_certificate)
    if secret is None:
        raise ConfigError("the certificate has no secret key", key="transfer.curve_certificate")
    mode = stat.S_IMODE(Path(config.curve_certificate).stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            "a secret key that others than its owner may use",
            key="transfer.curve_certificate",
            path=config.curve_certificate,
            mode=f"{mode:04o}",
            remedy=f"chmod 600 {config.curve_certificate}, and make a new pair where others may have read it",
        )
    listed = config.curve_peers if peers is None else peers
    return CurveKeys(public, secret, tuple(_certificate(path)[0] for path in listed))


def _certificate(path: str) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError("cannot read a CURVE certificate", path=path, cause=str(error)) from error


def keys_to(config: TransferConfig, peer: str | None) -> CurveKeys | None:
    """The CURVE keys to connect to one of the peers with; it need not be named where there is one.

    Raises:
        ConfigError: as :func:`keys_of`; ``peer`` is none of ``transfer.curve_peers``, or not said and they are several.
    """
    choices = config.curve_peers
    if peer is None and len(choices) <= 1:
        return keys_of(config)
    if peer not in choices:
        raise ConfigError(
            "the sender's key is one of the configured peers'",
            key="transfer.curve_peers",
            got=peer,
            choices=list(choices),
            remedy="name one of the choices: connect(addresses, peer=...)" if choices else "configure CURVE keys",
        )
    return keys_of(config, [peer])
