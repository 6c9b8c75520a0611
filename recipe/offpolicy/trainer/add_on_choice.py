"""Chooses the add-ons of a run that are not extensions, outermost first; disabled ones are omitted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from ..delivery.delivery_settings import DeliverySettings
from ..extensions.add_on import AddOn
from ..monitor.mismatch.snapshot_settings import SnapshotSettings
from ..replay.replay_settings import ReplaySettings, read_megatron_mode
from ..staleness.staleness_settings import StalenessSettings
from ..support.support_settings import SupportSettings

if TYPE_CHECKING:
    from .corrected_run import CorrectedRun
    from .corrected_v0 import CorrectedV0
    from .corrected_v1 import CorrectedV1

# Modules are imported on use, because other releases may lack their dependencies.


def choose_v0(run: CorrectedV0) -> tuple[AddOn, ...]:
    """Choose the add-ons of a run by the V0 trainer."""
    return (*_choose_support(run.config), *_choose_delivery(run))


def choose_v1(run: CorrectedV1) -> tuple[AddOn, ...]:
    """Choose the add-ons of a run by a V1 trainer."""
    return tuple(_choose_v1(run))


def _choose_support(config: DictConfig) -> Iterator[AddOn]:
    if (support := SupportSettings.from_config(config)) is not None:
        from ..support.support_replay import SupportReplay

        yield SupportReplay(support)
    elif (centering := SupportSettings.for_centering(config)) is not None:
        from ..centering.score_centering import ScoreCentering

        yield ScoreCentering(centering)


def _choose_delivery(run: CorrectedRun) -> Iterator[AddOn]:
    settings = DeliverySettings.from_config(run.config)
    if settings.sums is not None or settings.probe is not None:
        from ..delivery.weight_delivery import WeightDelivery

        yield WeightDelivery(run, settings)


def _choose_v1(run: CorrectedV1) -> Iterator[AddOn]:
    config = run.config
    yield from _choose_support(config)
    yield from _choose_delivery(run)
    if (replay := ReplaySettings.from_config(config)) is not None:
        from ..replay.routing_replay import RoutingReplay

        yield RoutingReplay(run, replay)
    elif (mode := read_megatron_mode(config)) is not None:
        from ..replay.megatron_replay import MegatronReplay

        yield MegatronReplay(mode)
    if (snapshots := SnapshotSettings.from_config(config)) is not None:
        from ..staleness.weight_snapshots import WeightSnapshots

        yield WeightSnapshots(run, snapshots)
    if (staleness := StalenessSettings.from_config(config)) is not None:
        from ..staleness.staleness_limit import StalenessLimit

        yield StalenessLimit(run, staleness)
