"""A verifiers v1 harness: the chat loop, run in the coordinator's own process.

The built-in harnesses start a Python process per episode (2 s of CPU each); this one makes the model
calls of a chat directly. It is for tasksets that need no sandbox and no tools.
"""

from aether_chat.harness import ChatHarness, ChatHarnessConfig

__all__ = ["ChatHarness", "ChatHarnessConfig"]
