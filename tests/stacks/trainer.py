"""Run `python -m verl.trainer.main_ppo` on this machine's CPUs, and read what it logged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ACTOR", "BLOCK", "MEGATRON", "REPOSITORY", "Launch", "Run", "environment", "launch", "metrics_of", "run"]

REPOSITORY = Path(__file__).resolve().parents[2]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
BLOCK = f"+{MEGATRON}.override_mcore_model_config.equilibra"
PLUGIN = "equilibra.integrations.verl.plugin"
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu", "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false", "NUMBA_CACHE_DIR": f"{sys.prefix}/numba",
    "RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0",
}  # fmt: skip


def overrides(data: Path, folder: Path) -> list[str]:
    """GRPO with R3 on two expert-parallel ranks, each with a vLLM server; two mini-batches, each seen twice."""
    return [
        "model_engine=megatron", "algorithm.adv_estimator=grpo",
        f"data.train_files={data}/train.parquet", f"data.val_files={data}/val.parquet", "data.train_batch_size=4",
        "data.max_prompt_length=48", "data.max_response_length=32", "data.shuffle=False",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={data}/model", "actor_rollout_ref.model.use_remove_padding=True",
        f"{ACTOR}.optim.lr=2e-3", f"+{ACTOR}.optim.override_optimizer_config.adam_eps=1e-5",
        f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu=256", f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.entropy_coeff=0",
        f"{MEGATRON}.vanilla_mbridge=True", f"{MEGATRON}.expert_model_parallel_size=2",
        f"{MEGATRON}.expert_tensor_parallel_size=1", f"{MEGATRON}.router_replay.mode=R3",
        f"{MEGATRON}.override_transformer_config.attention_backend=local",
        f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.enforce_eager=True",
        f"{ROLLOUT}.free_cache_engine=False", f"+{ROLLOUT}.enable_sleep_mode=False",
        f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.n=4", f"{ROLLOUT}.max_model_len=128",
        f"{ROLLOUT}.max_num_batched_tokens=256", f"{ROLLOUT}.max_num_seqs=16", f"{ROLLOUT}.enable_prefix_caching=False",
        f"{ROLLOUT}.enable_rollout_routing_replay=True", f"{ROLLOUT}.load_format=auto",
        f"+{ROLLOUT}.engine_kwargs.vllm.distributed_executor_backend=uni",  # a process less to start per server
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=16",
        f"reward.custom_reward_function.path={Path(__file__).with_name('reward.py')}",
        "reward.custom_reward_function.name=score", "reward.num_workers=1",
        "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.nnodes=1", "trainer.logger=[console,file]",
        "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.total_epochs=1",
        "trainer.resume_mode=disable", f"trainer.rollout_data_dir={folder}/answers",
        f"trainer.default_local_dir={folder}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=2",
        "+ray_kwargs.ray_init.include_dashboard=False", f"+ray_kwargs.ray_init._temp_dir={folder}/ray",
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run has logged."""

    metrics: dict[int, dict[str, Any]]
    """verl's metrics by step"""
    answers: dict[int, list[tuple[str, str, float]]]
    """prompt, answer and reward of every sequence by step, in the order of the prompts"""
    routing: dict[int, frozenset[str]]
    """hashes of the routing that vLLM recorded, of all data-parallel ranks, by step"""
    rows: NDArray[np.int64]
    """[visits, ranks] rows that entered a rank's experts, for every forward of an MoE layer"""
    seconds: float

    def of(self, name: str) -> list[float]:
        """A metric's values, step by step."""
        return [float(self.metrics[step][name]) for step in sorted(self.metrics)]

    @property
    def slowest_over_mean(self) -> float:
        """The slowest rank's rows over the mean rank's, summed over all forwards."""
        return float(self.rows.max(axis=1).sum() / self.rows.mean(axis=1).sum())


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that has started."""

    folder: Path
    process: subprocess.Popen[bytes]
    began: float

    def read(self) -> Run:
        metrics, rows = metrics_of(self.folder / "metrics.jsonl"), self.folder / "rows"
        hashes = zip(*(file.read_text().split() for file in rows.glob("*.routing")), strict=True)
        return Run(
            metrics=metrics, answers=_answers(self.folder / "answers"), rows=_rows(rows),
            routing={step: frozenset(of_ranks) for step, of_ranks in zip(sorted(metrics), hashes, strict=False)},
            seconds=time.monotonic() - self.began,
        )  # fmt: skip

    def wait(self, timeout_s: float) -> int:
        """The exit code; a run that takes longer is ended and is an error."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"no end after {timeout_s} s:\n{self.tail()}") from None

    def tail(self, num_lines: int = 60) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-num_lines:])


def launch(
    work: Path, name: str, steps: int, settings: Sequence[str] = (), *, plugin: bool = True, faults: str = ""
) -> Launch:
    """Start verl's trainer. work: a folder with a short name, since Ray's sockets are in it. plugin: Equilibra's."""
    data, folder = work / "data", work / name
    if not data.exists():
        subprocess.run([sys.executable, "-m", "tests.stacks.tiny", data], check=True, env=environment(), cwd=work)
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    modules = ["tests.stacks.cpu", *([PLUGIN] if plugin else [])]
    variables = environment() | {
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules), "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
        "EQUILIBRA_TEST_RUN": str(folder), "EQUILIBRA_TEST_ROWS": f"{folder}/rows", "EQUILIBRA_TEST_FAULTS": faults,
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(data, folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"trainer.total_training_steps={steps}", *settings],
            cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Launch(folder=folder, process=process, began=time.monotonic())


def run(
    work: Path, name: str, steps: int, settings: Sequence[str] = (), *, timeout_s: float = 1200, **options: Any
) -> Run:
    """Run verl's trainer to its end."""
    started = launch(work, name, steps, settings, **options)
    code = started.wait(timeout_s)
    assert code == 0, f"verl ended with {code}:\n{started.tail()}"
    return started.read()


def environment() -> dict[str, str]:
    """The variables of a process in which verl runs on CPUs."""
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    packages = [str(REPOSITORY), str(REPOSITORY / "src")]
    return {**os.environ, **ENVIRONMENT, "PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(packages)}


def metrics_of(file: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["step"]: line["data"] for line in lines}


def _answers(folder: Path) -> dict[int, list[tuple[str, str, float]]]:
    found = {}
    for file in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[int(file.stem)] = sorted((line["input"], line["output"], line["score"]) for line in lines)
    return found


def _rows(folder: Path) -> NDArray[np.int64]:
    of_ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.jsonl"))]
    for lines in zip(*of_ranks, strict=True):
        assert len({(line["step"], line["update"], line["layer"]) for line in lines}) == 1, "ranks ran different layers"
    return np.array([[line["rows"] for line in of_rank] for of_rank in of_ranks]).T
