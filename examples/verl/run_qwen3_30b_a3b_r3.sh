#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on one node of 8 GPUs with verl, vLLM and Megatron, replay R3, under Equilibra's plans.
# The lines marked (Equilibra) are what balancing adds to verl's own example of router replay.
#
#   MODEL=/models/Qwen3-30B-A3B TRAIN=train.parquet TEST=test.parquet ./run_qwen3_30b_a3b_r3.sh
#
# Further arguments go to verl: `trainer.total_training_steps=20`, or `--cfg job` to print the configuration.
set -euo pipefail
: "${MODEL:?folder of the Hugging Face model}" "${TRAIN:?parquet file to train on}" "${TEST:?parquet file to test on}"
NODES=${NODES:-1}
actor=actor_rollout_ref.actor
rollout=actor_rollout_ref.rollout
megatron=$actor.megatron
transformer=++$megatron.override_transformer_config
equilibra=+$megatron.override_mcore_model_config.equilibra

export CUDA_DEVICE_MAX_CONNECTIONS=1
# (Equilibra) must reach every Ray worker: on a running cluster, set it through ray_kwargs.ray_init.runtime_env too
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}equilibra.integrations.verl.plugin

python3 -m verl.trainer.main_ppo \
    model_engine=megatron \
    algorithm.adv_estimator=grpo \
    data.train_files="$TRAIN" \
    data.val_files="$TEST" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=8192 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=True \
    $actor.optim.lr=1e-6 \
    $actor.ppo_mini_batch_size=32 \
    $actor.use_dynamic_bsz=True \
    $actor.ppo_max_token_len_per_gpu=18432 \
    $actor.use_kl_loss=False \
    $actor.entropy_coeff=0 \
    $megatron.tensor_model_parallel_size=2 \
    $megatron.expert_model_parallel_size=8 \
    $megatron.expert_tensor_parallel_size=1 \
    $megatron.param_offload=True \
    $megatron.optimizer_offload=True \
    $megatron.router_replay.mode=R3 \
    $transformer.moe_token_dispatcher_type=alltoall \
    $transformer.moe_router_dtype=fp32 \
    $transformer.recompute_granularity=full \
    $transformer.recompute_method=uniform \
    $transformer.recompute_num_layers=1 \
    $equilibra.spare_slots=2 `# (Equilibra) copies that a rank can hold in a layer` \
    $rollout.name=vllm \
    $rollout.n=8 \
    $rollout.tensor_model_parallel_size=2 \
    $rollout.gpu_memory_utilization=0.6 \
    $rollout.enable_rollout_routing_replay=True \
    trainer.logger=[console] \
    trainer.nnodes="$NODES" \
    trainer.n_gpus_per_node=8 \
    trainer.val_before_train=False \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    "$@"
