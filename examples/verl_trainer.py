"""verl 0.9.1's own trainer on Ray, two steps on CPUs with the loss of verl_losses.py:

    pip install verl==0.9.1 TransferQueue==0.1.11 cachetools fastapi uvicorn
    python examples/verl_trainer.py MODEL [actor_rollout_ref.actor.policy_loss.loss_mode=vanilla ...]

It rewards characters of ASCII, and writes its prompts to verl_prompts.parquet.
"""

import os
import runpy
import sys
from pathlib import Path

OPTIONS = """
algorithm.adv_estimator=grpo
data.train_batch_size=4 data.shuffle=False data.max_prompt_length=64 data.max_response_length=16
data.dataloader_num_workers=0
actor_rollout_ref.model.external_lib=verl_losses actor_rollout_ref.model.use_fused_kernels=True
actor_rollout_ref.model.use_remove_padding=False actor_rollout_ref.model.custom_chat_template='{{messages[0].content}}'
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.policy_loss.loss_mode=grpo_kernels actor_rollout_ref.actor.strategy=fsdp2
+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32}
actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.ppo_epochs=2 actor_rollout_ref.actor.optim.lr=3e-3
actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.agent.num_workers=1
reward.num_workers=1 reward.custom_reward_function.name=share_of_ascii
transfer_queue.backend.SimpleStorage.num_data_storage_units=1
trainer.device=cpu trainer.n_gpus_per_node=1 trainer.total_training_steps=2 trainer.val_before_train=False
trainer.logger=console
ray_kwargs.ray_init.num_cpus=8 +ray_kwargs.ray_init.num_gpus=${trainer.n_gpus_per_node}
+ray_kwargs.ray_init.include_dashboard=False
"""


def share_of_ascii(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isascii() for c in solution_str) / max(len(solution_str), 1)


if __name__ == "__main__":
    import pandas

    here, prompts, model = Path(__file__).resolve(), Path("verl_prompts.parquet").resolve(), Path(sys.argv[1]).resolve()
    question = [[{"role": "user", "content": f"{i} + 1 ="}] for i in range(8)]
    data = {"prompt": question, "data_source": "sums", "reward_model": [{"ground_truth": ""}] * 8}
    pandas.DataFrame(data).to_parquet(prompts)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_ENGINE_DEVICE": "cuda"}  # it has no engine for "cpu"
    sys.argv[1:] = [
        *OPTIONS.split(), f"data.train_files={prompts}", f"data.val_files={prompts}",
        f"actor_rollout_ref.model.path={model}", f"reward.custom_reward_function.path={here}", *sys.argv[2:],
    ]  # fmt: skip
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
