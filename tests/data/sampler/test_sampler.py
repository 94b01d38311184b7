"""The sampler's face: a lhotse sampler whose batches are packs, and who gets which."""

from collections import Counter

import pytest
from lhotse import CutSet

from packfp8.data import PackingSampler
from packfp8.data.sampled_pack import SampledPack
from packfp8.rule import Topology, align


def test_a_pack_is_a_cutset_and_says_its_step_and_rule(make_cuts, sampler_of):
    cuts = make_cuts([1.0] * 9)
    sampler = sampler_of(cuts)
    pack = next(iter(sampler))
    assert isinstance(pack, SampledPack)
    assert isinstance(pack, CutSet)
    assert (pack.step, pack.fingerprint) == (0, f"{sampler.terms.rule.fingerprint} {sampler.terms.measure.fingerprint}")
    assert pack[0].dataloading_info == {"rank": 0, "world_size": 1, "worker_id": None}
    assert all(cut.custom is None for cut in cuts)  # the source's own cuts are left as they are


def test_rank_and_world_come_from_the_topology_never_from_the_environment(make_cuts, sampler_of, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    sampler = sampler_of(make_cuts([1.0]), dp=2, rank=1)
    assert (sampler.rank, sampler.world_size) == (1, 2)


def test_cp_and_tp_peers_get_the_same_packs(make_cuts, measure, ids_of):
    places = [{"cp_rank": cp, "tp_rank": tp} for cp in range(2) for tp in range(2)]
    rules = [align("block", Topology(dp=2, dp_rank=1, cp=2, tp=2, sp=True, **place)) for place in places]
    cuts = make_cuts([0.3 * n for n in range(1, 30)])
    packs = [ids_of(PackingSampler(cuts, measure=measure, rule=rule, budget=256)) for rule in rules]
    assert packs[0] == packs[1] == packs[2] == packs[3] != []


def test_an_example_is_measured_once_in_a_pass(make_cuts, sampler_of, measure):
    class Counting:
        sample_rate, template, fingerprint, seen = measure.sample_rate, measure.template, measure.fingerprint, Counter()

        def __call__(self, example):
            self.seen[example.id] += 1
            return measure(example)

    sampler = sampler_of(make_cuts([1.0] * 50), measure=Counting(), dp=2)
    list(sampler)
    assert set(Counting.seen.values()) == {1}
    assert len(Counting.seen) == 50


def test_a_sampler_states_no_length(make_cuts, sampler_of):
    sampler = sampler_of(make_cuts([1.0] * 5))
    with pytest.raises(TypeError):
        len(sampler)
    assert sampler.num_cuts == 5
    assert sampler.remaining_cuts is sampler.remaining_duration is None


def test_a_forecast_is_exact_and_leaves_the_sampler_where_it_is(make_cuts, sampler_of, ids_of):
    cuts = make_cuts([0.2 * n for n in range(1, 40)])
    sampler = sampler_of(cuts, dp=2, rank=1, accepts=lambda cut: cut.id != "c003")
    alone = ids_of(sampler_of(cuts, dp=2, rank=1, accepts=lambda cut: cut.id != "c003"))
    packs, state = iter(sampler), None
    drawn = [next(packs), next(packs)]
    state, report = sampler.state_dict(), sampler.get_report()
    planned = list(sampler.forecast())
    assert (sampler.state_dict(), sampler.get_report()) == (state, report)
    drawn += packs
    assert ids_of(drawn) == alone
    assert [len(step[1]) for step in planned] == [len(pack) for pack in drawn]
    assert sum(len(pack) for step in planned for pack in step) == 38


def test_filters_add_up_and_are_counted(make_cuts, sampler_of, ids_of):
    sampler = sampler_of(make_cuts([1.0] * 30), accepts=lambda cut: cut.id != "c007").filter(lambda cut: cut.id != "c008")
    names = [name for pack in ids_of(sampler) for name in pack]
    assert len(names) == 28
    assert not {"c007", "c008"} & set(names)
    assert (sampler.diagnostics.kept_cuts, sampler.diagnostics.discarded_cuts) == (28, 2)


def test_a_map_is_applied_to_each_pack_and_keeps_its_step(make_cuts, sampler_of):
    sampler = sampler_of(make_cuts([1.0] * 30)).map(lambda cuts: cuts.modify_ids(lambda name: name + "!"))
    packs = list(sampler)
    assert [pack.step for pack in packs] == list(range(len(packs)))
    assert all(cut.id.endswith("!") for pack in packs for cut in pack)
