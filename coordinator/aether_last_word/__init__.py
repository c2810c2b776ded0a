"""A verifiers v1 taskset: copy the last word of a list.

Small enough for a 135M-parameter model to learn on a CPU in minutes, and still a real test: held-out
lists are made only of words that no training list and no example contains.
"""

from aether_last_word.taskset import LastWordConfig, LastWordData, LastWordTask, LastWordTaskset

__all__ = ["LastWordConfig", "LastWordData", "LastWordTask", "LastWordTaskset"]
