"""The study of docs/recurrent_state.md: one thing broken at a time, and the share of answers that stay right.

    OMP_NUM_THREADS=1 python tests/support/guard_study.py [--count 128] [--blind]

Prints the rows of the table as they come; ``--blind`` those of what the guard model does not see.
"""

from __future__ import annotations

import argparse
import logging

import guard_faults as faults
import guard_rig as rigs
import structlog

PAGES = 13


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--blind", action="store_true")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    ledgers = rigs.Ledgers.draw(options.count)
    if options.blind:
        rows = (
            faults.PAGES_REVERSED,
            faults.WINDOW_SCALES_LEFT,
            faults.last_page_lost(PAGES),
            *(faults.state_lost(name) for name in ("conv_k", "conv_v", "conv_attn", "conv_mlp")),
        )
    else:
        for backend in ("host_tensor", "host_pool"):
            with rigs.Rig(backend=backend) as rig:
                outcome = rig.run(ledgers)
            print(f"| nothing, `{backend}` | {outcome.exact():.2f}, {outcome.retractions} retractions |", flush=True)
        rows = faults.FAULTS
        print(f"| nothing, each retracted once | | {one(None, 'retraction', ledgers):.2f} |", flush=True)
    for fault in rows:
        shares = [one(fault, way, ledgers) for way in ("transfer", "retraction")]
        print(f"| {fault.name} | " + " | ".join(f"{share:.2f}" for share in shares) + " |", flush=True)


def one(fault: faults.Fault | None, way: faults.Way, ledgers: rigs.Ledgers) -> float:
    """Share of right answers with a fault on one way; on the way to the backup every request goes once."""
    after = rigs.AFTER_A_KEY if way == "retraction" else None
    with rigs.Rig(poisoned=False) as rig:
        ways = [way] if fault else []
        with faults.broken(fault or faults.STATE_LOST, ways, sending=rig.sending, decoding=rig.decoding):
            outcome = rig.run(ledgers, retract_after=after)
    assert after is None or outcome.retracted == outcome.asked
    return outcome.exact()


if __name__ == "__main__":
    main()
