"""The installed verl has every name, signature and call that the hooks rely on; others are refused with the reason."""

from tests.distributed.ranks import run_ranks
from tests.verl_engine import contract_runs
from tests.verl_engine.contract_runs import LENGTHS, LIMIT

from equilibra.integrations.verl.contract import WRITTEN_FOR


def test_contract_with_the_installed_verl() -> None:
    (found,) = run_ranks(1, contract_runs.contract)
    assert found["differences"] == [], f"verl {found['version']} is another than {WRITTEN_FOR}"
    assert found["version"] in WRITTEN_FOR
    assert found["hooked"]
    assert found["hooked once"]
    gone, renamed, moved, field = found["broken"]
    assert "verl 0.10.0" in gone
    assert "build_r3_replay_mask is missing" in gone
    assert "set_router_replay_data has no parameter tf_config, vp_rank, replay_mask, local_cp_size" in renamed
    assert "forward_backward_batch does not call prepare_micro_batches" in moved
    assert "McoreEngineConfig has no field router_replay" in field
    assert found["fields"] == {
        "megatron": "__init__() got an unexpected keyword argument 'equilibra'",
        "override_mcore_model_config": 1,
        "as a DictConfig": 1,
    }
    of_micro_batches(found["micro-batches"])


def of_micro_batches(found: dict) -> None:
    assert [len(members) for members in found["spread"]] == [len(members) for members in found["verl"]]
    assert sorted(s for members in found["spread"] for s in members) == list(range(len(LENGTHS)))
    assert found["tokens"] == [sum(LENGTHS[s] for s in members) for members in found["spread"]]
    assert max(found["tokens"]) <= LIMIT
    assert found["spread"] != found["verl"]
    assert found["skew"][1] < found["skew"][0]
    assert found["restored"]
    assert found["kept"] == [1.0] * len(found["spread"])
    assert found["in groups"]


def test_nothing_is_loaded_before_verl_loads_its_engine() -> None:
    (found,) = run_ranks(1, contract_runs.early)
    assert found == {"plugin": True, "megatron": False, "hooks": False}
