"""Pauses of the event loop by Python's garbage collection, kept short.

A full collection walks every object there is; what verifiers, transformers and torch leave on the heap
by being imported makes that 200 ms, every few thousand turns, in which no turn and no heartbeat moves.
"""

import gc


def freeze_heap() -> None:
    """What exists now, mostly modules, stays for the life of the process: never look at it again."""
    gc.collect()
    gc.freeze()
