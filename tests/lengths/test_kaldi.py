"""The 10 ms frame count against 2,100 counts that Kaldi made."""

from __future__ import annotations


def test_every_real_kaldi_count_is_met_at_16_khz(kaldi_agreement, data_dir):
    utterances = kaldi_agreement.read(data_dir)
    assert len(utterances) == 2_100
    agree, others = kaldi_agreement.compare("16 kHz, samples rounded, edges snipped", utterances)
    assert (agree, sum(others.values())) == (2_100, 0)


def test_16_khz_is_the_least_rate_at_which_every_duration_is_whole_samples(kaldi_agreement, data_dir):
    whole = kaldi_agreement.whole_at(kaldi_agreement.read(data_dir))
    assert min(rate for rate, n in whole.items() if n == 2_100) == 16_000
    assert whole[8_000] == 1_698
    assert whole[44_100] == 447


def test_each_other_way_of_counting_errs_as_often_as_reported_and_for_a_known_reason(kaldi_agreement, data_dir):
    utterances = kaldi_agreement.read(data_dir)
    found = {way: kaldi_agreement.compare(way, utterances) for way in kaldi_agreement.WAYS}
    assert all("" not in reasons for _, reasons in found.values())
    assert all(agree + sum(reasons.values()) == 2_100 for agree, reasons in found.values())
    assert {way: agree for way, (agree, _) in found.items()} == {
        "16 kHz, samples rounded, edges snipped": 2_100,
        "16 kHz, samples cut off by int()": 2_100,
        "16 kHz, edges kept": 0,
        "floor(100 * seconds)": 0,
        "8 kHz, samples rounded": 2_098,
        "22.05 kHz, samples rounded": 141,
        "44.1 kHz, samples rounded": 2_100,
        "48 kHz, samples rounded": 2_100,
    }
    assert sorted(found["floor(100 * seconds)"][1].values()) == [12, 729, 1_359]


def test_an_error_of_an_unknown_kind_has_no_explanation(kaldi_agreement):
    utterance = kaldi_agreement.Utterance(kaldi_agreement.Fraction("6.014"), 599)
    for way in kaldi_agreement.WAYS:
        assert kaldi_agreement.explanation(way, utterance, 599 + 40) == ""
        assert kaldi_agreement.explanation(way, utterance, 599 - 3) == ""
