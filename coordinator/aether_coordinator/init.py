"""`aether-coordinator init`: commented settings files to start from."""

from pathlib import Path

from aether_common.errors import ConfigError
from aether_common.files import make_directory, write_durably

SERVER = """\
# The coordinator of one run: aether-coordinator run server.toml
run = "my-run"                 # lower-case letters, digits, hyphens
run_root = "my-run"            # state, batches, checkpoints and logs, relative to this file
steps = 100                    # training steps
seed = 0                       # order of tasks, seeds of jobs

model = "org/model"            # hub repository or directory; its tokenizer is read here
max_model_len = 4096           # longest prompt plus completion, in tokens

# Replace this table by what this prints: aether-coordinator identity MODEL --revision SHA --renderer NAME
[base_model]
repository = "org/model"
revision = ""                  # the full 40-hex commit, or sha256:… of a directory
weights = ""
config = ""
tokenizer = ""
chat_template = ""
vocab_size = 0
dtype = "bfloat16"
renderer = ""

# What is trained on: installed verifiers v1 tasksets. Repeat the table for more; weights share the groups.
[[train]]
name = "train"
taskset = "aether_last_word"
taskset_args = { split = "train" }
# harness = "chat"             # the conversation runs in the coordinator; or a verifiers harness id
# runtime = { type = "docker" }
# weight = 1.0
[train.sampling]
temperature = 1.0
max_tokens = 512

# What is measured: at the first and the last policy, and every so many.
[[eval]]
name = "held_out"
taskset = "aether_last_word"
taskset_args = { split = "held_out" }
episodes_per_task = 1
# every = 10
[eval.sampling]
temperature = 1.0
max_tokens = 512

[batch]
groups = 8                     # tasks in a batch
group_size = 8                 # episodes of each
max_policy_lag = 1             # 0: synchronous

[trainer]
config = "trainer.toml"

# A nats-server is started and supervised for you. Without this table only this machine reaches it.
# [nats]
# websocket_host = "0.0.0.0"               # workers elsewhere: needs TLS, one of
# self_signed = ["train.example.org"]      #   a private authority and certificate, made for you
# certificate = "fullchain.pem"            #   your own certificate,
# private_key = "privkey.pem"
# public_url = "wss://train.example.org"   #   or a proxy on this machine (leave websocket_host out)
# directory = "nats"                       # instead: a server of your own, from `aether-coordinator nats init`
"""

TRAINER = """\
# The trainer, started by the coordinator.
seed = 0

[model]
path = "org/model"             # hub repository or directory, the same as in server.toml
revision = ""                  # the full commit of a hub repository; remove the line for a directory
dtype = "bfloat16"             # of the frozen base model; float32 on a CPU

[lora]
rank = 8
alpha = 16.0
serving_dtype = "bfloat16"     # dtype of [base_model] in server.toml

[optimizer]
learning_rate = 1e-5

[compute]
device = "auto"
"""

WORKER = """\
# A worker: aether-worker run worker.toml
# These lines come from: aether-coordinator worker add w1 --config server.toml
name = "w1"
run = "my-run"
url = "wss://coordinator.example.org"   # ws:// only to 127.0.0.1
key_file = "w1.nk"
# tls.ca_file = "ca.pem"                # for a private certificate authority

model = "org/model"                     # hub repository or directory, the same as in server.toml
revision = ""                           # the full commit of a hub repository; remove the line for a directory
dtype = "bfloat16"                      # dtype of [base_model] in server.toml
max_model_len = 4096

engine = "vllm"                         # or transformers (runs on a CPU)
slots = 64                              # jobs that generate at the same time
prefetch = 16                           # jobs waiting here for a free slot
state_dir = "w1-state"                  # adapter cache and logs
"""


def write_templates(directory: Path) -> list[Path]:
    """Write the three files. Raises `ConfigError` when one is there already, `RunDirectoryError` for a bad disk."""
    make_directory(directory)
    files = {"server.toml": SERVER, "trainer.toml": TRAINER, "worker.toml": WORKER}
    for name in files:
        if (directory / name).exists():
            raise ConfigError(f"{directory / name} exists: choose another directory, or remove it")
    for name, text in files.items():
        write_durably(directory / name, text.encode())
    return [directory / name for name in files]
