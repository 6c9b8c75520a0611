"""Choice of the add-ons of a run that are not extensions, outermost first; disabled add-ons are left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..delivery.delivery_settings import DeliverySettings
from ..extensions.add_on import AddOn
from ..replay.replay_settings import ReplaySettings, read_megatron_mode
from ..staleness.staleness_settings import StalenessSettings
from ..staleness.weight_snapshots import SnapshotSettings
from ..support.support_settings import SupportSettings

if TYPE_CHECKING:
    from .corrected_run import CorrectedRun
    from .corrected_v1 import CorrectedV1

# Modules are imported on use, because other releases may lack their dependencies.


def choose_v0(run: CorrectedRun) -> Iterator[AddOn]:
    """Choose the add-ons of a run that uses the V0 trainer."""
    config = run.config
    if (support := SupportSettings.from_config(config)) is not None:
        from ..support.support_replay import SupportReplay

        yield SupportReplay(support)
    elif (centering := SupportSettings.for_centering(config)) is not None:
        from ..centering.score_centering import ScoreCentering

        yield ScoreCentering(centering)
    settings = DeliverySettings.from_config(config)
    if settings.sums is not None or settings.probe is not None:
        from ..delivery.weight_delivery import WeightDelivery

        yield WeightDelivery(run, settings)


def choose_v1(run: CorrectedV1) -> Iterator[AddOn]:
    """Choose the add-ons of a run that uses a V1 trainer."""
    config = run.config
    yield from choose_v0(run)
    if (replay := ReplaySettings.from_config(config)) is not None:
        from ..replay.routing_replay import RoutingReplay

        yield RoutingReplay(run, replay)
    elif (mode := read_megatron_mode(config)) is not None:
        from ..replay.megatron_engine import MegatronReplay

        yield MegatronReplay(mode)
    if (snapshots := SnapshotSettings.from_config(config)) is not None:
        from ..staleness.weight_snapshots import WeightSnapshots

        yield WeightSnapshots(run, snapshots)
    if (staleness := StalenessSettings.from_config(config)) is not None:
        from ..staleness.staleness_limit import StalenessLimit

        yield StalenessLimit(run, staleness)
