"""verl 0.9.1 without GPUs: what its package lacks for a run on CPUs, which verl_trainer.py starts.

Each process of verl imports it: a platform whose device is the CPU, its process group, and the rollout "hf", which
samples with transformers, one response at a time, by temperature alone.
"""

import os
from collections import Counter
from types import SimpleNamespace

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class CPU(PlatformCUDA):
    device_name = "cpu"
    device_module = SimpleNamespace(
        **vars(torch.cuda) | vars(torch.cpu) | {"get_device_name": lambda: "CPU", "mem_get_info": lambda: (0, 0)}
    )

    def current_device(self):
        return torch.device("cpu")

    def set_allocator_settings(self, settings):
        pass


set_platform(CPU())  # before the modules that ask for it
from verl.workers.rollout import base, replica  # noqa: E402

if "RANK" in os.environ:  # a worker; verl's own backend, "cpu:gloo,cpu:...", is an error of torch's
    torch.distributed.init_process_group("cpu:gloo", init_method=os.environ.get("DIST_INIT_METHOD"))


@ray.remote
class Server:
    def __init__(self, path, response_length):
        self.model, self.length, self.counts = AutoModelForCausalLM.from_pretrained(path), response_length, Counter()

    def load(self, state, step):
        self.model.load_state_dict(state)
        self.step = step

    def generate(self, request_id, prompt_ids, sampling_params, **_):
        self.counts.update([prompt := tuple(prompt_ids)])
        torch.manual_seed(self.counts[prompt])  # the same responses in whatever order requests come
        out = self.model.generate(
            torch.tensor([prompt_ids]), do_sample=True, temperature=sampling_params["temperature"], top_k=0,
            max_new_tokens=self.length, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        ids = out.sequences[0, len(prompt_ids) :]
        logps = torch.cat(out.scores).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        step = {"global_steps": self.step}
        return replica.TokenOutput(token_ids=ids.tolist(), log_probs=logps.tolist(), extra_fields=step)

    def sleep(self):
        pass


class Replica(replica.RolloutReplica):
    async def launch_servers(self):
        self._server_address = f"hf_{self.replica_rank}"
        server = Server.options(name=self._server_address)
        self.servers = [server.remote(self.model_config.path, self.config.response_length)]
        (self._server_handle,) = self.servers


class Rollout(base.BaseRollout):
    async def update_weights(self, weights, wire_format="named_tensors", *, global_steps=None, **_):
        server = ray.get_actor(f"hf_{torch.distributed.get_rank()}")
        await server.load.remote({name: x.detach().clone() for name, x in weights}, global_steps)

    async def resume(self, tags=()):
        pass

    release = resume


base._ROLLOUT_REGISTRY["hf", "async"] = "verl_cpu.Rollout"
replica.RolloutReplicaRegistry.register("hf", lambda: Replica)
