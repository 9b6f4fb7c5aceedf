"""The strategy on two and four real ranks. One job runs all scenarios; each test looks at one result.

Training is compared with `strategy_models.train_alone`: plain torch, one process, all ranks' batches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import torchrun
from tests.integration.ranks import Stem
from tests.integration.strategy_models import Block
from tests.integration.strategy_scenarios import SCENARIOS

SCRIPT = "tests.integration.strategy_scenarios"
ON_FOUR_RANKS = ["hybrid_shard"]
ON_TWO_RANKS = [name for name in SCENARIOS if name not in ON_FOUR_RANKS]
UNITS = ["", "blocks.0", "blocks.1"]


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("strategy") / "results.json"
    torchrun(SCRIPT, str(out), *ON_TWO_RANKS, ranks=2)
    return json.loads(out.read_text())


@pytest.fixture
def result(request: pytest.FixtureRequest, two_ranks: Any) -> Any:
    name = request.node.name.partition("[")[0].removeprefix("test_")
    name = request.node.callspec.params.get("name", name) if hasattr(request.node, "callspec") else name
    values = two_ranks[name]
    assert "error" not in values, values["error"]
    return values


def trained_as_alone(values: dict[str, Any]) -> bool:
    """Equal to rounding, after training that moved the weights ten thousand times further."""
    return bool(values["weights_off"] < 1e-6 and values["moved"] > 1e-2 and values.get("losses_off", 0.0) < 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "only_the_root",
        "a_set_of_classes",
        "shard_grad_op",
        "no_shard",
        "activation_checkpointing",
        "compiled",
        "compiled_by_wrapping",
        "gradient_accumulation",
        "clip_by_norm",
        "clip_by_value",
        "unfreezing",
        "gan_in_the_root",
        "gan_in_units",
        "gan_kept_gathered",
        "gradient_inside_the_step",
        "self_sharded",
        "tensor_parallel",
    ],
)
def test_training_equals_one_process(name: str, result: Any) -> None:
    assert trained_as_alone(result), result
    assert result.get("all_sharded", True)


def test_plain(result: Any) -> None:
    assert result["units"] == UNITS
    assert result["tied"]


def test_only_the_root(result: Any) -> None:
    assert result["units"] == [""]


def test_a_set_of_classes(result: Any) -> None:
    """The head is a Linear too, but its weight is the embedding's: the root manages both."""
    inner = [f"blocks.{i}.{layer}" for i in range(2) for layer in ("wide", "narrow")]
    assert result["units"] == ["", *inner, "frozen"]


def test_no_shard(result: Any) -> None:
    assert result["local_rows"] == 2 * Block().wide.in_features


def test_activation_checkpointing(result: Any) -> None:
    assert result["forwards_per_step"] == 2 * 2  # two blocks, in forward and again in backward


@pytest.mark.parametrize("name", ["compiled", "compiled_by_wrapping"])
def test_compiled_blocks_are_units(name: str, result: Any) -> None:
    assert result["units"] == UNITS


def test_gathers(result: Any) -> None:
    """The root once; a block in forward and backward, or in forward alone."""
    assert result == {"FULL_SHARD": 1 + 2 * 2, "SHARD_GRAD_OP": 1 + 2}


def test_gradient_accumulation(result: Any) -> None:
    """Two micro-batches an update, and gradients travel once."""
    assert result["reduce_scatters_per_update_and_unit"] == 1


def test_equals_stock_strategy(result: Any) -> None:
    assert result["losses_equal"]
    assert result["weights_equal"]
    assert result["moved"] > 1e-2


def test_replicas_start_equal(result: Any) -> None:
    assert result["FULL_SHARD_off"] == result["NO_SHARD_off"] == 0.0
    assert result["NO_SHARD_same"]
    assert not result["FULL_SHARD_same"]  # each rank has its own part


def test_odd_buffers_start_equal(result: Any) -> None:
    """Rank 1 was seeded with 4, and so its values were 4."""
    assert (
        result["rank1"]
        == result["rank0"]
        == {
            "float8": 9.0,
            "unsigned": 6.0,
            "turn": 6.0,
            "transposed": 18.0,
            "repeated": 9.0,
            "sparse": 3.0,
            "compressed": 3.0,
            "flag": 0.0,
        }
    )


def test_refused(result: Any) -> None:
    assert result["swa"].startswith("StochasticWeightAveraging averages weights in a whole copy of the model")
    assert result["ema"].startswith("Averages averages weights")
    assert result["optimizer"].startswith("LBFGS cannot update sharded parameters")


def test_without_sync_replicas_differ(result: Any) -> None:
    assert not result["same"]


def test_every_loop(result: Any) -> None:
    assert result["sharded_after_validate"]
    assert result["weights_off"] < 1e-6
    assert result["test_loss_off"] < 1e-6
    assert result["predictions_equal"]
    assert result["second_fit_moved"] > 1e-2
    assert result["loss_after_second_fit"]
    assert result["sharded_in_the_end"]


def test_inference_mode_first(result: Any) -> None:
    assert result["inference_mode"] == [False]


def test_model_summary(result: Any) -> None:
    assert result["total"] == result["expected"]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_meta_device(strategy: str, result: Any) -> None:
    values = result[strategy]
    assert values["tied"]
    assert values["frozen"]
    assert values["finite"]
    assert 0.1 < values["spread"] < 0.4  # reset_parameters ran: uniform within 1/sqrt(8)
    assert values["same"]
    assert values["local_same"] == (strategy == "NO_SHARD")


def test_raising_step(result: Any) -> None:
    assert result["errors"] == ["planned", "planned"]
    assert not result["own_forward"]
    assert result["hooks"] == [1, 1]


def test_bf16_mixed(result: Any) -> None:
    assert result.pop("losses_off") < 0.02
    assert result == {
        "root": "torch.bfloat16",
        "logits": "torch.bfloat16",
        "targets": "torch.float32",
        "autocast": "False",
        "parameter": "torch.float32",
        "gradient": "torch.float32",
    }


def test_bf16_true(result: Any) -> None:
    assert result.pop("losses_off") < 0.02
    assert set(result.values()) == {"torch.bfloat16", "False"}


def test_gan_in_units(result: Any) -> None:
    assert result["units"] == ["", "generator", "discriminator"]


def test_backward_past_the_strategy(result: Any) -> None:
    assert "call self.manual_backward(loss) instead of loss.backward()" in result["error_text"]


def test_self_sharded(result: Any) -> None:
    assert result["units"] == UNITS


def test_half_sharded(result: Any) -> None:
    assert "leaves 1 trainable parameters out: embedding.weight" in result["error_text"]


def test_tensor_parallel(result: Any) -> None:
    assert result["local_rows"] == Block().wide.out_features // 2


def test_hybrid_shard_under_slurm(stem: Stem, tmp_path: Path) -> None:
    """Four ranks, told their places as by Slurm: two replicas of two shards, unseeded but for rank 0."""
    out = tmp_path / "results.json"
    stem.load(SCRIPT)
    stem.run(f"{SCRIPT}:under_slurm", str(out), *ON_FOUR_RANKS, ranks=4, folder=tmp_path, timeout=180)
    values = json.loads(out.read_text())["hybrid_shard"]
    assert "error" not in values, values["error"]
    assert trained_as_alone(values), values
    assert values["environment"] == "SLURMEnvironment"
    assert values["placements"].startswith("(Replicate()")
    assert values["local_rows"] == Block().wide.out_features // 2
    assert values["sampler"] == {"num_replicas": 4, "rank": 0}
