"""The fit of decode laws finds the law that made the measurements, and says what it is off on cases kept apart."""

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.cost.test_cost_decode import LAW

from benchmarks.probes.decode_fit import attention_predicted, experts_predicted, fit_decode
from equilibra.core.errors import InputError
from equilibra.core.model import model_named
from equilibra.cost.decode import Context, attention_us, experts_us
from equilibra.cost.presets import prices_named
from equilibra.cost.prices import ExpertLaw

TRUE = replace(
    LAW, attention_fixed_us=30.0, weight_gb_per_s=3500.0, cache_gb_per_s=3000.0, dense_tflops=600.0, sequence_us=0.02,
    experts=ExpertLaw(fixed_us=15.0, weight_gb_per_s=3200.0, row_gb_per_s=4000.0, tflops=600.0),
)  # fmt: skip
SHAPE = ("hidden", "expert_ffn", "num_experts", "top_k", "num_heads", "cache_heads", "cache_values", "score_width",
         "attention_width", "embedding_parameters")  # fmt: skip


def measured(noise=0.0, law=TRUE):
    """As the probe writes them, in its shuffled order."""
    rng = np.random.default_rng(0)
    models = {name: model_named(name) for name in ("qwen3-30b-a3b", "gpt-oss-20b")}
    cases = []
    for name, model in models.items():
        cases += [
            {"kind": "attention", "model": name, "batch": b, "context": c,
             "us": attention_predicted(law, model, batch=b, context=c)}
            for b in (64, 128, 256, 512, 1024) for c in (128, 1024, 2048, 4096, 8192)
        ]  # fmt: skip
        cases += [
            {"kind": "experts", "model": name, "active": held, "rows": max(rows * held // 32, 1),
             "us": experts_predicted(law, model, active=held, rows=max(rows * held // 32, 1))}
            for held in (4, 8, 16, 32) for rows in (64, 256, 1024, 4096, 16384)
        ]  # fmt: skip
        parameters = model.embedding_parameters
        cases += [
            {"kind": "dense", "model": name, "batch": b, "parameters": parameters,
             "us": 12 + max(parameters * 2e-3 / law.weight_gb_per_s, 2e-6 * b * parameters / law.dense_tflops)}
            for b in (64, 256, 1024)
        ]  # fmt: skip
    for case in cases:
        case["us"] *= float(np.exp(rng.normal(0, noise)))
    order = rng.permutation(len(cases))
    shapes = {name: {key: getattr(model, key) for key in SHAPE} for name, model in models.items()}
    return {"models": shapes, "cases": [cases[i] for i in order]}


def test_the_law_that_made_them_is_found():
    fit = fit_decode(measured(), LAW, source="made")
    for name in ("attention_fixed_us", "weight_gb_per_s", "cache_gb_per_s", "dense_tflops", "sequence_us"):
        assert getattr(fit.law, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert fit.law.source == "made"
    assert fit.law.score_tflops == LAW.score_tflops  # no case waits for scores
    assert fit.law.transfer_us == LAW.transfer_us
    for name, error in fit.errors.items():
        assert error["worst"] < 0.02, name


def test_bends_and_factors_of_shapes_are_found():
    true = replace(TRUE, attention_bend=2.0, expert_bend=1.5, factor_of_cache={"8x1024": 1.3},
                   factor_of_experts={"2880x2880": 0.8})  # fmt: skip
    fit = fit_decode(measured(law=true), LAW, source="made")
    ratios = [
        (fit.law.factor_of_cache, "4x1024", "8x1024", 1.3), (fit.law.factor_of_experts, "2048x768", "2880x2880", 0.8),
    ]  # fmt: skip
    for factors, first, second, expected in ratios:
        assert factors.get(second, 1.0) / factors.get(first, 1.0) == pytest.approx(expected, rel=0.05)
    assert fit.errors["attention, kept apart"]["worst"] < 0.05
    assert fit.errors["experts, kept apart"]["worst"] < 0.1  # a bend, a factor and a fixed rate beside each other


def test_predictions_are_those_of_the_laws():
    """One rank; a layer's own weights; as many tokens as make the experts active that were."""
    law = replace(TRUE, attention_bend=2.0, expert_bend=3.0, factor_of_cache={"8x1024": 1.3},
                  factor_of_experts={"2880x2880": 0.8})  # fmt: skip
    prices = prices_named("h200")
    model = model_named("gpt-oss-20b")
    layer = replace(model, quadratic_share=1.0,
                    dense_parameters=model.hidden * (2 * 64 * 64 + 1024 + model.num_experts))  # fmt: skip
    about = Context(mean=2048)
    said = attention_us(layer, law, prices, about, batch=256.0, tensor=1, nodes=1)
    assert attention_predicted(law, model, batch=256, context=2048) == pytest.approx(float(said), rel=1e-9)
    said = experts_us(model, law, prices, tokens=4096.0, nodes=1, tensor=1, imbalance=1.0)
    assert experts_predicted(law, model, active=32, rows=4096 * 4) == pytest.approx(float(said), rel=1e-6)


def test_errors_on_cases_kept_apart_are_those_of_the_noise():
    fit = fit_decode(measured(noise=0.03), LAW, source="made")
    for kind in ("attention", "experts"):
        assert 0.01 < fit.errors[f"{kind}, kept apart"]["mean"] < 0.05


def test_a_wrong_law_shows():
    wrong = measured()
    for case in wrong["cases"]:
        if case["kind"] == "attention":
            case["us"] = 10 + case["batch"] ** 2 * case["context"] * 1e-4
    fit = fit_decode(wrong, LAW, source="made")
    assert fit.errors["attention, kept apart"]["mean"] > 0.2


@pytest.mark.parametrize("said", [{}, {"models": {}, "cases": []}, {"models": {}, "cases": [{"model": "m"}]}])
def test_other_files_are_refused(said):
    with pytest.raises(InputError, match="measurements of decoding"):
        fit_decode(said, LAW, source="made")
