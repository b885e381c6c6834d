"""List bad inputs, one per row: what a user types or leaves in a file, and a part of the line that says what is wrong.

HERE in a line is the folder that the command runs in, with the files that test_bad_inputs.py makes there.
"""

from __future__ import annotations

LONG = "1" + "0" * 30

# Words of the command line.
WORDS = [
    ("quickstart", "quickstart: must be GROUP=CHOICE or KEY=VALUE; did you mean +experiment=quickstart?"),
    ("lr_sensitivity_small", "did you mean +sweep=lr_sensitivity_small?"),
    ("+experiment=quickstart mxfp8", "mxfp8: must be GROUP=CHOICE or KEY=VALUE; did you mean precision=mxfp8?"),
    ("+experiment=quickstart nonsense", "nonsense: must be GROUP=CHOICE or KEY=VALUE"),
    ("+experiment=quickstart =3", "=3: must be GROUP=CHOICE or KEY=VALUE"),
    ("+experiment=quickstart seed=1 seed=2", "seed=1 and seed=2: one key is given twice; leave one of them out"),
    ("+experiment=quickstart +experiment=loss", "+experiment=quickstart and +experiment=loss: one key is given twice"),
    ("+experiment=quickstart norm=rmsnorm norm=none", "norm=rmsnorm and norm=none: one key is given twice"),
    ("+experiment=quickstart ~norm", "~norm: a key cannot be removed from a config; set it: KEY=VALUE"),
    ("+experiment=quickstart ~train.steps=3", "~train.steps=3: a key cannot be removed from a config"),
    ("+experiment=quickstart --nope", "--nope: no such option; did you mean"),
    ("+experiment=quickstart --run", "--run: no such option; did you mean"),
    ("+experiment=quickstart --config-name=x", "--config-name: no such option; did you mean '--config-dir'?"),
    ("+experiment=quickstart train.steps=[1", "train.steps=[1: cannot be read (no viable alternative at input"),
    ("+experiment=quickstart runs_dir=\u00fc", "in quotes: 'runs_dir=\"...\"'"),
    ("+experiment=quickstart seed=range(0,3,0)", "seed=range(0,3,0): cannot be read (range() arg 3 must not be zero)"),
    ("+experiment=quickstart seed=choice()", "seed=choice(): cannot be read (ValueError while evaluating 'choice()'"),
    ("+experiment=quickstart seed=nofunc(1)", "seed=nofunc(1): cannot be read"),
    (f"+experiment=quickstart train.steps={'1' * 5000}", "cannot be read (Exceeds the limit (4300 digits)"),
    ("+experiment=quickstart norm=null", "norm=null: no such choice; choose from"),
    ("+experiment=quickstart train=3", "train=3: no such choice; choose from default, stack"),
    ("+experiment=nope", "experiment=nope: no such choice; choose from"),
    ("+sweep=quickstart,moe", "+sweep=quickstart,moe: a command has one sweep; give each a command of its own"),
    ("+experiment=[quickstart,moe]", "+experiment=[quickstart,moe]: a command has one experiment"),
    ("+experiment=quickstart hydra.run.dir=/tmp/x", "hydra.run.dir=/tmp/x: nothing reads it; runs_dir=FOLDER says"),
    ("experiment=quickstart", "experiment: write +experiment=NAME, with a plus"),
    ("+launch=status +launch=cancel", "+launch=status and +launch=cancel: one key is given twice"),
    ("+launch", "+launch: must be GROUP=CHOICE or KEY=VALUE"),
    ("+launch=", "launch=: no such choice; choose from status, cancel, retry"),
    ("+launch=statsu", "launch=statsu: no such choice; did you mean 'status'?"),
    (
        "+launch=status quickstart",
        "quickstart: must be GROUP=CHOICE or KEY=VALUE; did you mean +experiment=quickstart?",
    ),
    ("+launch=status runs_dir=a runs_dir=b", "runs_dir=a and runs_dir=b: one key is given twice"),
    ("+launch=status runs_dir=nope", "runs_dir: there are no runs in nope/"),
    ("+launch=status runs_dir=", "runs_dir: must name a folder, not ''"),
    ("+launch=retry runs_dir=''", "runs_dir: must name a folder, not ''"),
    ('+launch=status runs_dir="\u00fc/nope"', "runs_dir: there are no runs in \u00fc/nope/"),
    ("+launch=status ~norm", "~norm: a key cannot be removed from a config"),
]

# Values of +experiment=quickstart +debug=tiny.
VALUES = [
    ("seed=-1", "seed: must lie in 0 .. 2**64 - 1, not -1"),
    (f"seed={2**64}", f"seed: must lie in 0 .. 2**64 - 1, not {2**64}"),
    ("data_seed=-1", "data_seed: must lie in 0 .. 2**64 - 1, not -1"),
    (f"data_seed={2**64}", "data_seed: must lie in 0 .. 2**64 - 1"),
    ("optimizer.lr=inf", "optimizer.lr: must be a finite number, not inf"),
    ("optimizer.lr=nan", "optimizer.lr: must be a finite number, not nan"),
    (f"optimizer.lr=1{'0' * 400}", "optimizer.lr: must be a finite number, not inf"),
    ("optimizer.lr=0", "optimizer.lr: must be positive and finite, not 0.0"),
    ("optimizer.lr=fast", "optimizer.lr: 'fast' is not a number"),
    ("optimizer.eps=inf", "optimizer.eps: must be a finite number, not inf"),
    ("optimizer.weight_decay=inf", "optimizer.weight_decay: must be a finite number, not inf"),
    ("optimizer.betas=[nan,0.9]", "optimizer.betas[0]: must be a finite number, not nan"),
    ("optimizer.betas=[0.9]", "optimizer.betas: needs 2 values, not 1"),
    ("optimizer.max_grad_norm=nan", "optimizer.max_grad_norm: must be a finite number, not nan"),
    ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm: must be positive (inf: none), not 0.0"),
    ("schedule.warmup_fraction=2", "schedule.warmup_fraction: must lie in 0..1, not 2.0"),
    (f"train.steps={LONG}", "train.steps: must be at most 1,000,000,000, not 1,000,"),
    ("train.steps=", "train.steps: '' is not an integer"),
    ("train.steps=[1]", "train.steps: [1] is not an integer"),
    ("seed=0..3", "seed: '0..3' is not an integer; for several runs write seed=0,1,2"),
    ("train.steps={a: 1}", "train.steps: {'a': 1} is not an integer"),
    ("train.steps=1.5", "train.steps: 1.5 is not an integer"),
    ("train.steps=true", "train.steps: True is not an integer"),
    ("train.steps=${nope:3}", "train.steps: Unsupported interpolation type nope"),
    ("train.steps=${nope}", "train.steps: Interpolation key 'nope' not found"),
    ("train.steps=${oc.env:NOPE_X}", "train.steps: KeyError raised while resolving interpolation"),
    ("train.steps=${train.steps}", "train.steps: Recursive interpolation detected"),
    (
        "precision=nvfp4 precision.recipes.nvfp4.dgrad_dh=null",
        "precision.recipes.nvfp4.wgrad_dh.rounding: copies dgrad_dh.rounding, which is null now; write",
    ),
    ("train.batch_size=1000000000000", "train.batch_size: 1,000,000,000,000 sequences are"),
    ("train.sequence_length=1000000000000", "must be at most 2,147,483,648"),
    ("train.micro_batch_size=3", "train.micro_batch_size: batch_size 4 does not divide into micro-batches of 3"),
    ("model.hidden_size=1000000000000", "model.hidden_size: must lie in 1 .. 16,777,216, not 1000000000000"),
    ("model.vocab_size=1000000000000", "model.vocab_size: must lie in 1 .. 16,777,216"),
    ("model.num_layers=1000000000", "model.num_layers: must lie in 1 .. 4,096, not 1000000000"),
    (f"model.head_dim={LONG}", "model.head_dim: must be at most 16,777,216, not 1000"),
    ("norm.kind=[1]", "norm.kind: [1] is not a choice; choose from"),
    ("tracking.experiment=''", "tracking.experiment: must be a name of 1 to 500 characters in one line"),
    ("tracking.experiment=a/../../b", "without '..', not 'a/../../b'"),
    (f"tracking.experiment={'x' * 501}", "tracking.experiment: must be a name of 1 to 500 characters"),
    ("model.num_layers=0", "model.num_layers: must lie in 1 .. 4,096, not 0"),
    ("model.rope_theta=inf", "model.rope_theta: must be a finite number, not inf"),
    ("model.init_std=inf", "model.init_std: must be a finite number, not inf"),
    ("norm.eps=inf", "norm.eps: must be a finite number, not inf"),
    ("probe.spikes.threshold=nan", "probe.spikes.threshold: must be a finite number, not nan"),
    ("checkpoint.keep_last=0", "checkpoint.keep_last: must be at least 1, not 0"),
    ("validation.sequences=0", "validation.sequences: must be at least 1, not 0"),
    ("+baseline.norm=nope", "baseline.norm: no such choice; did you mean 'none'?"),
    ("+baseline.nrom=rmsnorm", "baseline.nrom: no such group; did you mean 'norm'?"),
    ("baseline=3", "baseline: 3 is not a mapping"),
    ("replicates=[nope]", "replicates: 'nope' is not a key of this run"),
    ("+nope=1", "nope: no such key; choose from"),
    ("++train.nope=1", "train.nope: no such key; choose from"),
    ("tracking.uri=''", "tracking.uri: '' would be a file store"),
    ("evaluation.tasks=[nope] evaluation.every_steps=2", "evaluation.tasks: 'nope' is not a task; choose from"),
    ("evaluation.tasks=[] evaluation.every_steps=2", "evaluation.tasks: names no task; name at least one"),
    ("runs_dir=''", "runs_dir: must name a folder, not ''"),
    ("runs_dir=null", "runs_dir: None is not a string"),
    ('runs_dir="a\nb"', "runs_dir: must name a folder, not 'a\\nb'"),
    ("runs_dir=a_file", "runs_dir: HERE/a_file is a file; give a folder"),
    ("runs_dir=a_file/runs", "runs_dir: HERE/a_file is a file; give a folder"),
    ("runs_dir=/proc/x", "runs_dir: no folder can be made in /proc (No such file or directory); give one that this"),
    ("runs_dir=/dev/null", "runs_dir: /dev/null is a file; give a folder"),
    (f"runs_dir={'x' * 300}", "runs_dir: File name too long: HERE/xxx"),
    (f"runs_dir={'x/' * 3000}", "runs_dir: File name too long: HERE/x/x"),
    ("cache_dir=''", "cache_dir: must name a folder, not ''"),
    ("cache_dir=/proc/x", "cache_dir: no folder can be made in /proc (No such file or directory); give one that"),
    ("cache_dir=a_file", "cache_dir: HERE/a_file is a file; give a folder"),
    (f"cache_dir={'x' * 300}", "cache_dir: File name too long: HERE/xxx"),
]

# Files of a user's own choice, as group/mine.yaml; each line begins with the file.
YAML = "cannot be read (line {}; write YAML: each KEY: VALUE once, indented by spaces)"
MAPPING = "cannot be read ({}; write KEY: VALUE, and as defaults a list of - GROUP: CHOICE)"
CHOICES = [
    ("experiment", b"seed: [1\n", YAML.format("2, column 1: expected ',' or ']', but got '<stream end>'")),
    ("experiment", b"seed: 1\nseed: 1\n", YAML.format("2, column 1: found duplicate key seed")),
    ("experiment", b"a:\n\tb: 1\n", YAML.format("2, column 1: found character '\\t' that cannot start any token")),
    ("experiment", b"\xff\xfe", "can't decode byte 0xff in position 0: invalid start byte; save it as UTF-8)"),
    ("experiment", b"defaults: 3\n", "defaults must be a list (got int); write KEY: VALUE, and as defaults a list"),
    (
        "experiment",
        b"defaults: [{nope_group: 3}]\n",
        MAPPING.format("Unsupported item value in defaults : int. Supported: string or list"),
    ),
    ("experiment", b"", MAPPING.format("it is empty")),
    ("experiment", b"- 1\n", MAPPING.format("it holds a list, not a mapping")),
    ("experiment", b"3\n", MAPPING.format("Invalid loaded object type: int")),
    ("precision", b"a: [1\n", YAML.format("2, column 1: expected ',' or ']', but got '<stream end>'")),
    ("sweep", b"defaults: 3\n", "defaults must be a list (got int); write KEY: VALUE, and as defaults a list"),
    ("sweep", b"seed: 1: 2\n", YAML.format("1, column 8: mapping values are not allowed here")),
]

# Files of a corpus or tokenizer, and questions, for a small run on them.
FILES = [
    ("tokenizer=bpe_2k tokenizer.vocab_size=10", "tokenizer.vocab_size: a byte-level BPE has 257 ids at least"),
    ("tokenizer=bpe_2k tokenizer.vocab_size=1000000000000", "tokenizer.vocab_size: a byte-level BPE has 257 ids"),
    ("tokenizer=bpe_2k model.vocab_size=300", "model.vocab_size: 300 is smaller than the tokenizer's 2048"),
    ("tokenizer=pretrained tokenizer.name=''", "tokenizer.name: must name a file, a folder or a tokenizer on the hub"),
    ("tokenizer=pretrained tokenizer.name=a_pipe", "tokenizer.name: a_pipe is no file; give a tokenizer.json"),
    ("tokenizer=pretrained tokenizer.name=/dev/null", "tokenizer.name: /dev/null is no file"),
    ("tokenizer=pretrained tokenizer.name=empty.txt", "tokenizer.name: 'empty.txt' is not a tokenizer.json"),
    (
        "tokenizer=pretrained tokenizer.name=tokenizer.json model.vocab_size=100",
        "model.vocab_size: 100 is smaller than the tokenizer's 257",
    ),
    ("data=text data.paths=[]", "data.paths: must name one file at least, not []"),
    ("data=text", "data.paths: missing; it has no default"),
    ("data=text data.paths=['']", "data.paths: '' names no file; leave it out"),
    ("data=text data.paths=nope.txt", "data.paths: 'nope.txt' is not a list"),
    ("data=text data.paths=[nope.txt]", "data.paths: 'nope.txt' does not exist, and matches no file"),
    ("data=text data.paths=[a_folder]", "data.paths: 'a_folder' is a folder; name its files: a_folder/*"),
    ("data=text data.paths=[a_pipe]", "data.paths: 'a_pipe' is a pipe or a device; copy its text to a file"),
    ("data=text data.paths=[/dev/zero]", "data.paths: '/dev/zero' is a pipe or a device"),
    ("data=text data.paths=[binary]", "data: binary is not UTF-8"),
    (
        "data=text data.paths=[rows.jsonl,rows.jsonl,empty.txt] train.sequence_length=1302 tokenizer=bytes",
        "data.paths: these files have at most 1,302 tokens, fewer than the 1,302 + 1 of train.sequence_length",
    ),
    ("data=jsonl data.paths=[rows.jsonl] data.text_field=nope", "data.text_field: rows.jsonl, line 1 has no column"),
    ("data=jsonl data.paths=[rows.jsonl] data.text_field=n", "data.text_field: rows.jsonl, line 1: 'n' is 1, not a"),
    ("data=jsonl data.paths=[rows.jsonl] data.text_field=''", "line 1 has no column ''; choose from text, n"),
    ("data=jsonl data.paths=[binary]", "data: binary, line 1: not valid JSON"),
    ("data=jsonl data.paths=[half.json]", "data: half.json, line 1: not valid JSON"),
    ("data=jsonl data.paths=[deep.json]", "data: deep.json, line 1: not valid JSON"),
    ("data=parquet data.paths=[half.json]", "data: half.json cannot be read as Parquet"),
    ("data=hugging_face data.name=''", "data.name: must name a data set or a folder, not ''"),
    ("data=hugging_face data.name=a_set data.split=nope", "data.split: 'a_set' has no 'nope'; choose from train"),
    ("data=hugging_face data.name=a_set data.text_field=nope", "a_set/train.jsonl, line 1 has no column 'nope'"),
    ("data=hugging_face data.name=a_set data.subset=nope", "data.name: cannot load 'a_set' in that folder"),
    ("data=hugging_face data.name=a_folder", "data.name: cannot load 'a_folder' in that folder"),
    ("evaluation.data_dir=nope", "evaluation.data_dir: nope is not a folder"),
    ("evaluation.data_dir=a_folder", "evaluation.data_dir: a_folder has no arc_easy"),
    ("evaluation.data_dir=null_question", "row 1: not a question of arc_easy: its 'question' is None; must be text"),
    ("evaluation.data_dir=number_question", "row 1: not a question of arc_easy: its 'question' is 3; must be text"),
    ("evaluation.data_dir=empty_option", "row 1: not a question of arc_easy: one of its options is empty"),
    ("evaluation.data_dir=no_answer", "row 1: not a question of arc_easy"),
]
QUESTIONS = {
    "null_question": {"question": None},
    "number_question": {"question": 3},
    "empty_option": {"choices": {"text": ["", "b"], "label": ["1", "2"]}},
    "no_answer": {"answerKey": "9"},
}

# Values that a starter's variables must not have.
TWO = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "2"}
VARIABLES = [
    ({"RANK": "a"}, "RANK: must lie in 0 .. 1, not 'a'; torchrun, srun and submitit set it"),
    ({"RANK": "2"}, "RANK: must lie in 0 .. 1, not '2'"),
    ({"RANK": "-1"}, "RANK: must lie in 0 .. 1, not '-1'"),
    ({"WORLD_SIZE": "a"}, "WORLD_SIZE: must lie in 1 .. 1048575, not 'a'"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE: must lie in 1 .. 1048575, not '0'"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE: must lie in 1 .. 1048575, not ''"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK: must lie in 0 .. 1, not 'x'"),
    ({"MASTER_PORT": "a"}, "MASTER_PORT: must lie in 1 .. 65535, not 'a'"),
    ({"MASTER_PORT": "99999"}, "MASTER_PORT: must lie in 1 .. 65535, not '99999'"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR, MASTER_PORT: not set"),
]

# Changes to the config.json of a Hugging Face Llama.
FOREIGN = [
    ({"rope_scaling": [1]}, "rope_parameters or rope_scaling is [1], not a mapping"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rotary embedding 'yarn'; only default and llama3 can be read"),
    ({"architectures": "Bert"}, "is Bert; only LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM can be read"),
    (
        {"architectures": [["LlamaForCausalLM"]]},
        "only LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM can be read",
    ),
    ({"eos_token_id": -1}, "eos_token_id -1 is no id of its tokenizer.json"),
    ({"eos_token_id": 10**12}, "eos_token_id 1000000000000 is no id of its tokenizer.json"),
    ({"eos_token_id": [300]}, "eos_token_id 300 is no id of its tokenizer.json"),
    ({"eos_token_id": "</s>"}, "eos_token_id '</s>' is no id of its tokenizer.json"),
    ({"hidden_size": "64"}, "config.json: hidden_size: '64' is not an integer"),
    ({"num_attention_heads": 0}, "config.json: num_heads: must lie in 1 .. 4,096, not 0"),
    ({"rms_norm_eps": float("inf")}, "config.json: eps: must be a finite number, not inf"),
    ({"max_position_embeddings": None}, "max_position_embeddings: None is not an integer"),
]
WHOLE_FILES = [
    ("", "config.json: cannot be read (it is empty); download it again"),
    ('{"a": 1, "b"', "config.json: cannot be read (Expecting ':' delimiter"),
    ("[" * 100_000, "config.json: cannot be read ("),
    ("[]", "config.json: cannot be read (it holds [], and must hold a mapping)"),
]

# Files of a run's folder, and what is left in them.
REMEDIES = {
    "config.yaml": "move the folder away to train this run again",
    "provenance.json": "move the folder away to train this run again",
    "status.json": "move the folder away to train this run again",
    "memberships.json": "delete it; the commands that asked for the run",
    "job.json": "delete it if its job is gone",
}
LEFT = {"empty": b"", "half": b'{"a": 1, "b"', "list": b"[]", "null": b"null", "binary": b"\xff\xfe\x00"}
