"""``kvcore keys``: pairs of CURVE keys for the control connections of a transfer (no torch)."""

from __future__ import annotations

import json as json_module
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
import zmq

from kvcore.builtin.commands.geometry import AsJson
from kvcore.errors import ConfigError

_PLACEHOLDER = "public certificates of the peers"


class Action(StrEnum):
    """What to do with keys."""

    NEW = "new"


def keys(
    action: Annotated[Action, typer.Argument(help="new: make a pair.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Name of the pair's files.", show_default=False)],
    folder: Annotated[Path, typer.Option(help="Where they are written.", file_okay=False)] = Path(),
    json: AsJson = False,
) -> None:
    """Make a pair of CURVE keys: NAME.key to give away, and NAME.key_secret, which only its owner can read."""
    public, secret = write_pair(name, folder.absolute())
    mine = [f"curve_certificate = {_quoted(secret)}", f"curve_peers = [{json_module.dumps(_PLACEHOLDER)}]"]
    theirs = [f"curve_peers = [{_quoted(public)}]"]
    if json:
        made = {"public": str(public), "secret": str(secret), "config": mine, "config_of_peers": theirs}
        print(json_module.dumps({"action": str(action), **made}))
        return
    print(f"public, for the peers: {public}")
    print(f"secret, stays here:    {secret}")
    print("\n".join(["", "# configuration here", "[transfer]", *mine]))
    print("\n".join(["", "# configuration of the peers", "[transfer]", *theirs]))


def write_pair(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a new pair as ``zmq.auth.load_certificate`` reads it; returns the public file and the secret one.

    The secret is never there with more rights than its owner's (0600). Raises ConfigError, with nothing written, for a file
    that exists, a folder that cannot be written to, or a name that is no file's.
    """
    if not name or name != Path(name).name or not name.isprintable():
        raise ConfigError("not a name of a file", got=name, remedy="name the pair, and give the place as --folder")
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    public, secret = folder / f"{name}.key", folder / f"{name}.key_secret"
    lines = ["metadata", "curve", f'    public-key = "{public_key}"']
    _write(secret, [*lines, f'    secret-key = "{secret_key}"'], 0o600)
    try:
        _write(public, lines, 0o644)
    except BaseException:
        secret.unlink()
        raise
    return public, secret


def _write(path: Path, lines: list[str], mode: int) -> None:
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w")
    except FileExistsError as error:
        raise ConfigError("a key is never written over", path=str(path), remedy="choose another name") from error
    except OSError as error:
        raise ConfigError("cannot write a key", path=str(path), cause=str(error.strerror)) from error
    with file:
        file.write("\n".join([*lines, ""]))


def _quoted(path: Path) -> str:
    return json_module.dumps(str(path), ensure_ascii=False)
