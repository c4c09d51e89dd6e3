"""What a trainer rank takes, and how that decides how parameters are gathered."""

from __future__ import annotations

import msgspec
from builders.files import EXAMPLES, SORT_MODEL

from streamrl.learning.rank_memory import TrainingSizes, bytes_per_rank, choose_gathered, training_sizes
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.recipe.objective import Objective, objective_settings
from streamrl.recipe.sections import Gathered, Lora, Training

GAME = EXAMPLES / "game" / "model"

SEVEN_B = TrainingSizes(
    parameters=7_600_000_000, outside=1_090_000_000, layer=233_000_000, ranks=8, sixteen_bit=True, on_device=True
)
ROOM = 72 << 30


def test_layerwise_memory_falls_with_ranks() -> None:
    """Memory of layers falls with the number of ranks, and memory of whole batches does not."""
    by_layer, by_batch = (
        [bytes_per_rank(msgspec.structs.replace(SEVEN_B, ranks=n), kind).total for n in (8, 16, 32, 1024)]
        for kind in (Gathered.LAYER, Gathered.BATCH)
    )
    assert by_layer == sorted(by_layer, reverse=True) and by_layer[0] < 32e9 and by_layer[-1] < 12e9
    assert min(by_batch) > 6 * SEVEN_B.parameters


def test_a_value_model_is_whole_on_every_rank() -> None:
    own = msgspec.structs.replace(SEVEN_B, critic=SEVEN_B.parameters)
    for ranks in (1, 8):
        without, total = (
            bytes_per_rank(msgspec.structs.replace(sizes, ranks=ranks), Gathered.LAYER).total
            for sizes in (SEVEN_B, own)
        )
        assert total - without == 16 * SEVEN_B.parameters


def test_a_reference_counts_with_its_own_size() -> None:
    """A reference of another size takes float32 values of its own parameters, split over the ranks."""
    larger = msgspec.structs.replace(SEVEN_B, reference=32_800_000_000)
    assert bytes_per_rank(larger, Gathered.LAYER).total - bytes_per_rank(SEVEN_B, Gathered.LAYER).total == 4 * 4.1e9
    objectives = [Objective(kl_coefficient=0.1), Objective(kl_coefficient=0.1, reference=str(GAME)), Objective()]
    by_key = [
        training_sizes(Training(), Lora(), objective_settings(objective), read_model_facts(SORT_MODEL)).reference
        for objective in objectives
    ]
    assert by_key == [read_model_facts(SORT_MODEL).parameters, read_model_facts(GAME).parameters, 0]


def test_parameters_are_gathered_for_a_batch_where_that_fits() -> None:
    def chosen(sizes: TrainingSizes, wanted: Gathered = Gathered.AUTO, room: int = ROOM) -> tuple[Gathered, str]:
        return choose_gathered(wanted, msgspec.structs.replace(sizes, activations=4 << 30), room)

    assert chosen(SEVEN_B) == (
        Gathered.BATCH,
        "parameters are gathered once a batch: 68.75 GiB a rank, which fits 72.00 GiB",
    )
    larger = msgspec.structs.replace(SEVEN_B, parameters=32_800_000_000, layer=488_000_000, ranks=16)
    kind, reason = chosen(larger)
    assert kind is Gathered.LAYER
    assert "layer by layer" in reason and "whole batches do not fit 72.00 GiB" in reason
    assert chosen(SEVEN_B, Gathered.LAYER)[0] is Gathered.LAYER
    assert chosen(msgspec.structs.replace(SEVEN_B, ranks=1), Gathered.LAYER)[0] is Gathered.BATCH
