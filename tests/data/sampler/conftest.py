"""What the sampler's tests share: cuts whose audio does not exist, samplers of every rank, the ids that they yield."""

import pytest
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio import AudioSource

from packfp8.data import PackingSampler
from packfp8.rule import Topology, align

RATE = 16_000


def cut_of(name, seconds=1.0, text="abc"):
    """A cut whose recording is nowhere: whoever reads it fails."""
    source = AudioSource(type="file", channels=[0], source=f"/nowhere/{name}.wav")
    recording = Recording(id=name, sources=[source], sampling_rate=RATE, num_samples=32_000_000, duration=2000.0)
    spoken = [SupervisionSegment(id=name, recording_id=name, start=0, duration=seconds or 1.0, text=text)]
    return MonoCut(id=name, start=0, duration=seconds, channel=0, supervisions=spoken, recording=recording)


@pytest.fixture(scope="session")
def make_cut():
    """A function (name, seconds, text) -> a cut whose audio does not exist."""
    return cut_of


@pytest.fixture(scope="session")
def make_cuts():
    """A function from seconds to an eager CutSet of cuts "c000", "c001", ..."""
    return lambda seconds: CutSet([cut_of(f"c{n:03d}", one) for n, one in enumerate(seconds)])


@pytest.fixture(scope="session")
def sampler_of(measure):
    """A function from a source, topology and options to a sampler of 20 tokens a second; `accepts` is its filter."""

    def sampler_of(cuts, *, dp=1, rank=0, layout="thd", recipe="block", cp=1, accepts=None, **options):
        rule = align(recipe, Topology(dp=dp, dp_rank=rank, cp=cp), layout=layout)
        sampler = PackingSampler(cuts, **{"measure": measure, "rule": rule, "budget": 256, "window": 4, **options})
        return sampler if accepts is None else sampler.filter(accepts)

    return sampler_of


@pytest.fixture(scope="session")
def ids_of():
    """A function from packs to the ids of each: lists, step after step."""
    return lambda packs: [[cut.id for cut in pack] for pack in packs]


@pytest.fixture(scope="session")
def columns_of(sampler_of, ids_of):
    """A function from a source and options to the ids of every rank's packs."""
    return lambda cuts, dp, **options: [ids_of(sampler_of(cuts, dp=dp, rank=rank, **options)) for rank in range(dp)]
