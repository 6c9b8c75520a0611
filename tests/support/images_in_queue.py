"""Send rows with images through a real TransferQueue, with the V1 trainer's own reads and writes, and print the
results.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf

from recipe.offpolicy.batch.padding import put_columns, read_columns
from recipe.offpolicy.batch.seals import hash_model_input
from recipe.offpolicy.trainer.batch_view import MEDIA, MediaError
from recipe.offpolicy.trainer.corrected_v1 import OWN_PARTITION, CorrectedV1
from tests.support import images as im
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

ROWS = 8
COLUMNS = ("prompts", "responses", "response_mask", "position_ids", MEDIA, "uid")


def put(rows: im.ImageRollout) -> Any:
    """Put the rows as V1's agent loop does, and return their batch in another order, as verl's balancing does."""
    fields = []
    for row, positions in enumerate(rows.positions()):
        field: dict[str, Any] = {"prompts": rows.prompts[row], "responses": rows.responses[row]}
        field |= {"response_mask": rows.response_mask[row], "position_ids": positions}
        field["input_ids"] = torch.cat([rows.prompts[row], rows.responses[row]])
        fields.append(field | {MEDIA: rows.media[row], "uid": f"prompt{row}"})
    keys = [f"prompt{row}_0_0" for row in range(ROWS)]
    tags = [{"seq_len": positions.shape[1]} for positions in rows.positions()]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
    order = [5, 0, 7, 2, 3, 6, 1, 4]
    return order, tq.KVBatchMeta(
        keys=[keys[row] for row in order], tags=[tags[row] for row in order], partition_id="train", extra_info={}
    )


def check_rows(rows: im.ImageRollout, order: list[int], batch: Any) -> None:
    """Check that every column of a row belongs to that row."""
    found = read_columns(batch, *COLUMNS, "input_ids", "advantages")
    assert torch.equal(hash_model_input(found), hash_model_input(rows.to_tensordict())[torch.tensor(order)])
    for place, row in enumerate(order):
        assert torch.equal(found["responses"].unbind()[place], rows.responses[row])
        assert torch.equal(found["advantages"].unbind()[place], rows.advantages[row])
        assert torch.equal(found["position_ids"].unbind()[place], rows.positions()[row])
        media = dict(found[MEDIA][place])
        assert media.keys() == rows.media[row].keys()
        assert all(torch.equal(media[name], own) for name, own in rows.media[row].items())


def forward(alongside: Any) -> None:
    """A worker's forward pass, which returns minus the number of each token's id."""
    found = read_columns(alongside, "prompts", "responses", "position_ids", MEDIA)
    assert all(dict(media) == {} for media in found[MEDIA])
    whole = []
    for prompt, response, positions in zip(
        found["prompts"].unbind(), found["responses"].unbind(), found["position_ids"].unbind(), strict=True
    ):
        ids = torch.cat([prompt, response])
        assert torch.equal(positions, torch.arange(len(ids)).repeat(im.AXES, 1))
        whole.append(-torch.cat([ids[1:], ids[:1]]).float())
    put_columns(alongside, log_probs=torch.nested.as_nested_tensor(whole, layout=torch.jagged))


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False)
    tq.init()
    run: Any = object.__new__(CorrectedV1)
    workers = SimpleNamespace(compute_log_prob=forward, _dispatch_info={"actor": [0]})
    sizes = {"rollout": {"log_prob_micro_batch_size_per_gpu": 1}, "actor": {"strategy": "fsdp2"}}
    run.trainer = SimpleNamespace(actor_rollout_wg=workers, config=OmegaConf.create({"actor_rollout_ref": sizes}))
    run.add_ons = SimpleNamespace(batch_flags=dict)

    rows = im.make_rollout(ROWS)
    order, batch = put(rows)
    advantages = [rows.advantages[row] for row in order]
    batch = put_columns(batch, advantages=torch.nested.as_nested_tensor(advantages, layout=torch.jagged))
    check_rows(rows, order, batch)
    print("rows: each with its own")

    asked = [([3, 4], [5, 6]), ([7], [8, 9, 10])]
    try:
        run._compute_log_probs(batch, asked)
    except MediaError as error:
        print(f"refused: {error}")
    tq.kv_clear(keys=batch.keys, partition_id="train")

    for row in im.WITH_IMAGE:
        rows.media[row] = {}
    _, batch = put(rows)
    print(f"scored: {run._compute_log_probs(batch, asked)}")
    print(f"left: {tq.kv_list(OWN_PARTITION)}")


if __name__ == "__main__":
    main()
