"""Runs of the real vLLM, each in a process of its own: `python -m tests.stacks.vllm_runs NAME FOLDER`, JSON on stdout.

vLLM warns, keeps process groups and ends with leaked objects: nothing of that belongs into pytest's process.
"""

import json
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from equilibra.core.placement import Cluster
from equilibra.execute.group import join_expert_group
from equilibra.integrations.hf import open_model_folder
from equilibra.integrations.routing_formats import model_from_config
from equilibra.integrations.served import Server
from equilibra.integrations.vllm.engine import VLLMEngine, VLLMServerEngine
from equilibra.integrations.vllm.worker import WeightUpdate
from equilibra.rl.engine import Request
from equilibra.train.build import model_folder_of
from equilibra.train.config import RolloutConfig, TrainConfig

END, MAX_TOKENS = 1, 40


def model_folder():
    """The embedded model that `equilibra train rollout.engine=vllm` trains."""
    return model_folder_of(TrainConfig(rollout=RolloutConfig(engine="vllm")))


def reference(folder):
    return folder.build(torch.float32)


def random_weights(model, seed):
    """All tensors of the model drawn anew: weights that are stale anywhere show."""
    random = torch.Generator().manual_seed(seed)
    for value in model.parameters():
        value.data.normal_(std=0.08, generator=random).add_(1.0 if value.ndim == 1 else 0.0)
    names = {}
    for name, value in model.state_dict().items():
        layer = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    names[f"{layer}.{expert}.{part}.weight"] = half.clone()
        elif name.endswith("experts.down_proj"):
            names |= {f"{layer}.{expert}.down_proj.weight": one.clone() for expert, one in enumerate(value)}
        elif name != "lm_head.weight":
            names[name] = value.clone()
    return names


def distance(model, requests, answers):
    """Largest difference of the engine's log-probs from the reference's."""
    found = 0.0
    for request, said in zip(requests, answers, strict=True):
        tokens = torch.from_numpy(np.concatenate([request.tokens, said.tokens]))
        with torch.no_grad():
            logs = model(tokens[None]).logits[0].log_softmax(-1)
        at = torch.arange(request.tokens.size - 1, tokens.numel() - 1)
        apart = logs[at, tokens[request.tokens.size :]].double().numpy() - said.logprobs
        found = max(found, float(np.abs(apart).max()))
        assert (said.experts >= 0).all()
    return found


def requests(vocabulary):
    random = np.random.default_rng(1)
    return [Request(tokens=random.integers(2, vocabulary, 20), noise=random.random(12)) for _ in range(8)]


def hand_over(engine, model, number):
    """Distance and seconds of several hand-overs."""
    asked = requests(engine.vocabulary)
    found = []
    for version in range(number):
        weights = random_weights(model, version)
        start = perf_counter()
        engine.load_weights(iter(weights.items()), version=version)
        seconds = perf_counter() - start
        answers = engine.generate(asked, temperature=1.0)
        assert {one.version for one in answers} == {version}
        found.append({"distance": distance(model, asked, answers), "seconds": seconds})
    return found


def common(folder, files_folder):
    group = join_expert_group(Cluster(num_nodes=1, ranks_per_node=1), timeout_s=60)
    return group, model_from_config(folder.config.to_dict()), {
        "end": END, "vocabulary": folder.config.vocab_size, "folder": files_folder / "weights",
        "files": {"config.json": folder.config_file(torch.float32)},
    }  # fmt: skip


def in_process(where):
    """Our update; then, as controls, vLLM's own reload alone, compared with a fresh start, and believed."""
    found = {"ours": with_engine(where, 20)}
    WeightUpdate.equilibra_load = lambda self, folder: self.reload_weights(weights_path=folder)
    found["compared"] = with_engine(where, 3)
    VLLMEngine._verify = lambda self: setattr(self, "in_place", True)
    found["believed"] = with_engine(where, 3)
    return found


def with_engine(where, number):
    folder = model_folder()
    group, shape, settings = common(folder, where)
    engine = VLLMEngine(group, shape, **settings, max_tokens=MAX_TOKENS, dtype="float32", options={})
    starts, start = [], engine._start
    engine._start = lambda: (starts.append(1), start())
    found = hand_over(engine, reference(folder), number)
    return {"updates": found, "starts": len(starts), "in_place": engine.in_place}


def served(where):
    """Hand-overs to a server whose address is in the folder."""
    folder = open_model_folder(where / "model")
    group, shape, settings = common(folder, where)
    server = Server(url=(where / "address").read_text(), timeout_s=120.0)
    engine = VLLMServerEngine(servers=[server], group=group, model=shape, **settings)
    found = hand_over(engine, reference(folder), 4)
    server.post("/update_weight_version", {"new_version": "of another run"})
    (said,) = engine.generate(requests(engine.vocabulary)[:1], temperature=1.0)
    return {"updates": found, "after_another": said.version}


if __name__ == "__main__":
    run = {one.__name__: one for one in (in_process, served)}[sys.argv[1]]
    result = run(Path(sys.argv[2]))
    sys.stdout.write("\n" + json.dumps(result) + "\n")
