"""The 43 words. Each is one token of SmolLM2, alone and after a space."""

# fmt: off
TRAIN_WORDS = (
    "red", "dog", "moon", "hat", "box", "sun", "pen", "cup", "cat", "tree", "fish", "bird", "book", "car", "house",
    "door", "road", "river", "stone", "cloud", "rain", "snow", "wind", "fire", "ship", "bus", "key", "ring", "coin",
    "bell", "song", "star",
)
HELD_OUT_WORDS = ("leaf", "milk", "salt", "chair", "wolf", "hand", "gold", "lake", "map", "clock", "flag")
"""Never in a training list nor in an example turn."""
# fmt: on
