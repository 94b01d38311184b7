"""SampledPack: what a sampler hands to a dataset, the cuts of one pack and the number of their step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lhotse import CutSet
from lhotse.utils import fastcopy

from packfp8.lengths import Measure
from packfp8.rule import Alignment


class SampledPack(CutSet):
    """The cuts of one pack, in slot order; a CutSet, so that any lhotse dataset takes it.

    Args:
        cuts: cuts, `TextExample`s, dicts or `Example`s; none in a pack of zero weight.
        step: number of its step in the epoch.
        fingerprint: of the rule and the measure by which it was packed.
    """

    def __init__(self, cuts: Iterable = (), step: int = 0, fingerprint: str = "") -> None:
        super().__init__(list(cuts))
        self.step, self.fingerprint = step, fingerprint

    def __repr__(self) -> str:
        return f"SampledPack({len(self)} examples, step={self.step}, fingerprint={self.fingerprint!r})"


def fingerprint_of(rule: Alignment, measure: Measure) -> str:
    """Short text, equal where examples get the same lengths and packs the same multiples."""
    return f"{rule.fingerprint} {measure.fingerprint}"


def labelled(item: object, name: str, info: dict) -> object:
    """A copy of an item that bears its name and `dataloading_info`; the source's own item stays as it is.

    lhotse's `IterableDatasetWrapper` writes to `dataloading_info` of each cut. A text or dict without an id gets one, so that
    the batch names it as the sampler does.
    """
    if isinstance(item, Mapping):
        return item if item.get("id") is not None else {**item, "id": name}
    if hasattr(item, "tracks"):  # a mixed cut keeps custom fields in the first of its tracks that is not padding
        tracks = [fastcopy(track, cut=fastcopy(track.cut)) for track in item.tracks]
        for track in tracks:
            track.cut.custom = dict(track.cut.custom or {})
        twin = fastcopy(item, tracks=tracks)
        twin.dataloading_info = dict(info)
        return twin
    if not hasattr(item, "custom"):
        return item
    named = {} if getattr(item, "id", None) is not None else {"id": name}
    return fastcopy(item, custom={**(item.custom or {}), **named, "dataloading_info": dict(info)})
