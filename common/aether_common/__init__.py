"""What every Aether RL process shares: names, messages, digests, identity, bus connection, settings.

Nothing here imports the coordinator, the worker or the trainer.
"""

__version__ = "0.1.0"
