"""The ``kvcore`` command: what is caught around everything else, the imports of this package included.

Exit codes: 0 done, 1 failed, 2 wrong usage, configuration or plugin, 130 interrupted, 141 nobody reads the output.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
UNREAD = 141
"""As of a process that SIGPIPE ended."""

_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvcore`` and return its exit code."""
    try:
        from kvcore.cli.app import run  # here: an interrupt while this is imported is an interrupt of the command

        code = run(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:  # it is where the shell closed it
            sys.stdout.flush()
    except KeyboardInterrupt:
        say("kvcore: interrupted")
        return INTERRUPTED
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # click and rich end the process for one
            raise
        return _unread()
    except BrokenPipeError:
        return _unread()
    except OSError as error:
        # The name of a file stands in errors of opening one; what is written to is open already.
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _drop_output()
        say(f"kvcore: the output cannot be written ({error.strerror})")
        return 1
    return code


def _unread() -> int:
    _drop_output()
    return UNREAD


def _drop_output() -> None:
    """Send what is still in the buffer nowhere: Python would complain about it once more at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
        os.close(nowhere)
    except (OSError, ValueError):
        return


def say(text: str) -> None:
    """Write a line to stderr, if there is one that takes it."""
    if sys.stderr is None:  # print would take stdout instead
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody to say it to: the exit code remains
        return


if __name__ == "__main__":
    sys.exit(main())
