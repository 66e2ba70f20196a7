"""The installed verl has every name, signature and call that the hooks rely on; others are refused with the reason."""

from tests.distributed.ranks import run_ranks
from tests.verl_engine import contract_runs

from equilibra.integrations.verl.hooks import WRITTEN_FOR


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


def test_nothing_is_loaded_before_verl_loads_its_engine() -> None:
    (found,) = run_ranks(1, contract_runs.early)
    assert found == {"plugin": True, "megatron": False, "hooks": False}
