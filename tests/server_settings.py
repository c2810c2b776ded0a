"""The shortest `server.toml` that is accepted, for tests of what the settings of a run decide."""

SERVER = """
run = "test"
run_root = "run"
steps = 1
model = "."
max_model_len = 64
train = [{name = "t", taskset = "t", sampling = {max_tokens = 8}}]
trainer = {config = "trainer.toml"}
[base_model]
repository = "r"
revision = "sha256:0000000000000000000000000000000000000000000000000000000000000000"
weights = "w"
config = "c"
tokenizer = "t"
chat_template = ""
vocab_size = 8
dtype = "float32"
renderer = "default"
"""
