"""Figures, settings, skew and clock of the training bench; all of it: test_train_command.py."""

import re

import numpy as np
import pytest

from benchmarks.runtime import clock as runtime_clock
from benchmarks.suite import markdown
from benchmarks.train.figures import figures_of
from benchmarks.train.setting import NAMES, QUICK, STAGES, TrainSetting
from benchmarks.train.tables import TRAIN, section_rows
from equilibra.core.errors import InputError

# --- figures ---

SHARED = {"rollout": 2.0, "reward": 0.5}
SECONDS = {
    "static": {"plan": 0.1, "move": 0.0, "logprob": 2.0, "advantages": 0.4, "update": 4.0, "weights": 1.0},
    "equilibra": {"plan": 0.2, "move": 0.1, "logprob": 1.5, "advantages": 0.2, "update": 2.5, "weights": 1.0},
    "equilibra-moves": {"plan": 0.2, "move": 0.6, "logprob": 1.6, "advantages": 0.1, "update": 2.4, "weights": 1.0},
    "balanced": {"plan": 0.1, "move": 0.0, "logprob": 1.5, "advantages": 0.4, "update": 2.1, "weights": 1.0},
}
TOTALS = {"static": 10.0, "equilibra": 8.0, "equilibra-moves": 8.4, "balanced": 7.6}
IMBALANCE = {"static": 1.5, "equilibra": 1.02, "equilibra-moves": 1.04, "balanced": 1.0}
PLANNED = ("equilibra", "equilibra-moves")


def repeat(factor=1.0, **changes):
    """A round in which everything but rollout and reward takes `factor` times as long; changes: of equilibra."""
    parts = {"counts": 0.01, "planner": 0.02, "move": 0.1, "arm": 0.03, "send": 0.04}
    prepared = {"prepare": 0.1, "reward": 0.5, "begin": 0.2, "reward_alone": 0.4, "exposed": 0.4}
    contenders = {
        name: {
            "seconds": {**SHARED, **{stage: factor * took for stage, took in SECONDS[name].items()}},
            "parts": parts,
            "static_imbalance": 1.5,
            "imbalance": IMBALANCE[name],
            "moves": 0.0,
            "flash_copies": 3.0,
            "experts_s": 2.5,
            "micro_batches": 6.0,
            "tokens": 8000.0,
            "exposed_s": 0.16 if name == "equilibra" else 0.0,
        }
        for name in NAMES
    }
    for name in PLANNED:
        contenders[name] |= {"prepared": prepared, "from_contiguous": {"seconds": 0.8, "move": 0.6, "moves": 9.0}}
    contenders["equilibra"] |= changes
    return {"contenders": contenders, "others_share": 0.01}


def test_figures_are_ratios_within_a_repeat():
    figures = figures_of([repeat()])
    assert figures["speedup_over_static"]["step"]["median"] == pytest.approx(10 / 8)
    assert figures["speedup_over_static"]["logprob_and_update"]["median"] == pytest.approx(6 / 4)
    assert figures["share_of_balanced"]["step"]["median"] == pytest.approx(7.6 / 8)
    assert figures["share_of_balanced"]["logprob_and_update"]["median"] == pytest.approx(3.6 / 4)
    assert figures["planning_and_moving_share"]["median"] == pytest.approx(0.3 / 8)
    assert figures["exposed_share"]["median"] == pytest.approx(0.02)
    assert figures["prepared_share"]["median"] == pytest.approx(0.4 / 8)
    assert figures["from_contiguous_share"]["median"] == pytest.approx(0.1)
    assert figures["moves_only"]["planning_and_moving_share"]["median"] == pytest.approx(0.8 / 8.4)
    assert figures["moves_only"]["speedup_over_static"]["step"]["median"] == pytest.approx(10 / 8.4)
    assert figures["begin_seconds"]["equilibra"]["planner"]["median"] == 0.02
    assert figures["begin_seconds"]["equilibra"]["from_contiguous_move"]["median"] == 0.6
    assert "prepared_begin" not in figures["begin_seconds"]["static"]
    assert {name: spread["median"] for name, spread in figures["step_seconds"].items()} == pytest.approx(TOTALS)
    for name in NAMES:
        shares = figures["shares"][name]
        assert list(shares) == list(STAGES)
        assert sum(spread["median"] for spread in shares.values()) == pytest.approx(1.0)
    assert figures["shares"]["static"]["update"]["median"] == pytest.approx(0.4)


def test_spreads_are_over_repeats():
    figures = figures_of([repeat(), repeat(imbalance=1.1), repeat(3.0, exposed_s=0.0)])
    speedup = figures["speedup_over_static"]
    slow = (2.5 + 3 * 7.5) / (2.5 + 3 * 5.5)
    assert speedup["step"]["repeats"] == pytest.approx([1.25, 1.25, slow])
    assert (speedup["step"]["median"], speedup["step"]["low"]) == pytest.approx((1.25, 1.25))
    assert speedup["step"]["high"] == pytest.approx(slow)
    assert speedup["logprob_and_update"]["high"] == pytest.approx(1.5)  # a slow repeat is slow for all contenders
    assert figures["imbalance"] == {"median": 1.02, "low": 1.02, "high": 1.1, "repeats": [1.02, 1.1, 1.02]}
    assert figures["exposed_share"]["low"] == 0.0


def test_tables_say_what_was_asked_for():
    repeats = [repeat(), repeat(2.0)]
    found = {"repeats": repeats, "first_round": {"contenders": {name: {"moves": 7.0} for name in NAMES}}}
    rows = section_rows(figures_of(repeats), found, skew=0.35)
    assert list(rows) == list(TRAIN.sections)
    reaches = {row["figure"]: row["reach"] for row in rows["figures"] if row["reach"] is not None}
    assert reaches == {"planning and moving, of the step": 0.02}
    (ours,) = [row for row in rows["stages"] if row["contender"] == "equilibra"]
    assert ours["moves_at_first"] == 7.0
    assert ours["tokens_per_s"] == round(8000 / np.median([8.0, 13.5]))
    about = {"command": "c", "measured_on": {"cpu": "x"}}
    page = markdown(TRAIN, {"sections": {name: {**about, "rows": part} for name, part in rows.items()}})
    assert "--skew 0.35" in page
    assert re.search(r"\| the planner \| 20 \| 20.0 to 20.0 \| 20 \|", page)


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 100}, "multiple of 64"),
        ({"experts": 15}, "15"),
        ({"experts": 2}, "4 different experts of 2"),
        ({"prompts": 1}, "too few for 2 mini-batches on 2 ranks: use at least 2"),
        ({"prompts": 3, "mini_batches": 4}, "use at least 4"),
        ({"answers": 1}, "use 2 answers or more"),
        ({"answer_tokens": 1000}, "use at least 1096, or shorter answers"),
        ({"skew": float("nan")}, "skew must be"),
        ({"skew": -1.0}, "skew must be"),
        ({"layers": 0}, "layers must be from 1"),
        ({"ffn": 1 << 30}, "ffn must be"),
        ({"hidden": 4096, "ffn": 8192, "experts": 128}, "use smaller --hidden"),
    ],
)
def test_nonsense_is_refused_before_anything_starts(changes, message):
    with pytest.raises(InputError, match=message):
        TrainSetting(**changes)


def test_defaults_are_sensible():
    assert TrainSetting().repeats >= 5
    assert TrainSetting(**QUICK).model_bytes < TrainSetting().model_bytes < 4 << 30


# --- skew ---


def routed(skew: float, tmp_path) -> np.ndarray:
    """[L, E] how often the model's routers choose each expert."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.train.model import skew_routers, write_model_folder
    from equilibra.core.placement import Cluster
    from equilibra.execute.copies.copies import CopySetting
    from equilibra.execute.group import join_expert_group
    from equilibra.integrations.hf import build_model, open_model_folder

    setting = TrainSetting(**QUICK | {"skew": skew, "hidden": 128, "experts": 16})
    write_model_folder(setting, tmp_path)
    group = join_expert_group(Cluster(num_nodes=1, ranks_per_node=1))
    model = build_model(
        open_model_folder(tmp_path), group, CopySetting(), seed=0, dtype=torch.float32, device=torch.device("cpu")
    )
    skew_routers(model, setting)
    counts = np.zeros((2, 16), np.int64)

    def keep(layer: int):
        def hook(_module, _inputs, output) -> None:
            counts[layer] += np.bincount(output[0].numpy().ravel(), minlength=16)

        return hook

    for moe in model.moe_layers:
        moe.router.register_forward_hook(keep(moe.layer))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 320, (16, 40)))
    with torch.no_grad():
        model.hidden(tokens, torch.ones_like(tokens))
    return counts


def test_skew_favours_one_rank_in_every_layer_and_another_in_the_next(tmp_path):
    ratios = []
    for skew in (0.0, 0.3, 1.0):
        half_LR = routed(skew, tmp_path).reshape(2, 2, 8).sum(axis=2)
        ratios.append(np.diag(half_LR) / half_LR.mean(axis=1))  # layer 0 favours rank 0, layer 1 rank 1
    assert np.all(np.abs(ratios[0] - 1) < 0.25)
    assert np.all(ratios[1] > 1.1)
    assert np.all(ratios[2] > ratios[1] + 0.1)
    assert np.all(ratios[2] < 2)


# --- clock ---


def test_the_least_disturbed_try_counts(monkeypatch):
    busy = iter([0.0, 0.5, 0.0, 0.0, 0.0, 0.01])  # a disturbed try, a quiet wait, a quiet try
    monkeypatch.setattr(runtime_clock, "perf_counter", iter(np.arange(0.0, 100.0)).__next__)
    monkeypatch.setattr(runtime_clock, "process_time", lambda: 0.0)
    monkeypatch.setattr(runtime_clock, "sleep", lambda _seconds: None)
    monkeypatch.setattr(runtime_clock, "busy_seconds", busy.__next__)
    clock = runtime_clock.Clock(prepare=lambda: None, largest=lambda value: value, patience_s=9)
    prepared, tries = [], iter(["first", "second"])
    found = clock.time(tries.__next__, prepare=lambda: prepared.append(1))
    assert found == (1.0, 0.01, "second")
    assert len(prepared) == 2
    assert clock.run_again == 1


def test_stages_add_up():
    pytest.importorskip("torch")
    from benchmarks.runtime.clock import Stages
    from equilibra.core.placement import Cluster
    from equilibra.execute.group import join_expert_group

    stages = Stages(join_expert_group(Cluster(num_nodes=1, ranks_per_node=1)))
    for name in ("plan", "update", "update"):
        with stages.stage(name):
            pass
    assert list(stages.seconds) == ["plan", "update"]
    assert min(stages.seconds.values()) > 0
