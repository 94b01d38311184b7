"""FP8 state through torch.distributed.checkpoint: into a fresh model, on ranks that keep alike or different states."""

import multiprocessing
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from packfp8.errors import StateError
from packfp8.model.fp8_state import Fp8State, without_extra_state

NOTHING = torch.empty(0, dtype=torch.uint8)


class Delayed(nn.Linear):
    """Keeps maxima as Transformer Engine does: pickled into bytes, of which there are none before the first forward."""

    def __init__(self, trusting=True):
        super().__init__(8, 8)
        self.maxima, self.trusting = [], trusting

    def forward(self, x):
        self.maxima.append(float(x.detach().abs().max()))
        return super().forward(x) / (1 + sum(self.maxima))

    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps(self.maxima)), dtype=torch.uint8) if self.maxima else NOTHING

    def set_extra_state(self, state):
        if not state.numel():
            return
        if not self.trusting:
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")
        self.maxima = pickle.loads(state.numpy().tobytes())


def fresh(mesh=None):
    torch.manual_seed(0)
    model = nn.Sequential(Delayed(), nn.ReLU(), Delayed())
    return fully_shard(model, mesh=mesh) if mesh else model


def trained(model, seed=0):
    for step in range(3):
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step + seed)))
    return model


def answer(model):
    out = model(torch.ones(4, 8)).detach()
    return out.full_tensor() if hasattr(out, "full_tensor") else out


def save_and_load(rank, folder, differing):
    """What the trained model answers, and what a fresh one does after the load."""
    mesh, part = init_device_mesh("cpu", (2,)), f"tp{rank}" if differing else "all"
    model, other = trained(fresh(mesh), seed=10 * rank * differing), fresh(mesh)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    dcp.save(whole(model, part), checkpoint_id=folder)
    state = whole(other, part)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state["model"], options=StateDictOptions(strict=False))
    return list(other[0].maxima), list(model[0].maxima), answer(other), answer(model)


def whole(model, part):
    return {"model": without_extra_state(get_model_state_dict(model)), "fp8": Fp8State(model, part=part)}


def refused_by_itself(rank, folder, differing):
    """The error of a load into the tensors of a fresh model, without this class."""
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"model": get_model_state_dict(trained(fresh(mesh)))}, checkpoint_id=folder)
    try:
        dcp.load({"model": get_model_state_dict(fresh(mesh))}, checkpoint_id=folder)
    except CheckpointException as fault:
        return str(fault)


def run(rank, store, job, answers, *arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    told = job(rank, *arguments)
    answers.put((rank, pickle.dumps(told)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def on_two_ranks(tmp_path):
    """on_two_ranks(job, differing) -> what job(rank, folder, differing) returned on ranks 0 and 1."""
    started = []

    def on_two_ranks(job, differing=False):
        fork = multiprocessing.get_context("fork")
        answers = fork.Queue()
        arguments = (tmp_path / "store", job, answers, tmp_path / "checkpoint", differing)
        started.extend(fork.Process(target=run, args=(rank, *arguments)) for rank in range(2))
        for process in started:
            process.start()
        told = dict(answers.get(timeout=60) for _ in range(2))
        return [pickle.loads(told[rank]) for rank in range(2)]

    yield on_two_ranks
    for process in started:
        process.join(timeout=5)
        process.kill()


@pytest.mark.parametrize("differing", [False, True], ids=["one state", "a state for each rank"])
def test_a_fresh_sharded_model_goes_on_where_the_saved_one_stood(on_two_ranks, differing):
    told = on_two_ranks(save_and_load, differing)
    for found, expected, out, right in told:
        assert found == expected
        assert len(found) == 3
        assert torch.equal(out, right)
        assert out.any()
    assert (told[0][0] != told[1][0]) is differing


def test_a_state_of_another_part_is_refused():
    saved = Fp8State(trained(fresh()), part="tp0").state_dict()
    with pytest.raises(StateError) as caught:
        Fp8State(fresh(), part="tp1").load_state_dict(saved)
    assert str(caught.value).splitlines() == [
        "the checkpoint has no FP8 state of part 'tp1'",
        "  got:      'tp0'",
        "  expected: 'tp1'",
        "  because:  each part is the share of ranks that keep the same maxima",
        "  fix:      Fp8State(model, part=...) with the name under which this rank saved",
    ]


def test_without_it_the_load_into_a_fresh_model_ends(on_two_ranks):
    assert all("Size mismatch" in told and "_extra_state" in told for told in on_two_ranks(refused_by_itself))


def test_states_of_other_sizes_are_loaded_over_what_a_model_has():
    saved, other = Fp8State(trained(fresh())), trained(trained(fresh()))
    Fp8State(other).load_state_dict(saved.state_dict())
    assert other[2].maxima == saved.model[2].maxima
    assert torch.equal(answer(other), answer(saved.model))


def test_a_model_without_such_state_saves_and_loads_nothing():
    state = Fp8State(nn.Linear(2, 2)).state_dict()
    Fp8State(nn.Linear(3, 3)).load_state_dict(state)


def test_parameters_and_buffers_stay_in_the_dict_without_extra_state():
    model = nn.Sequential(Delayed(), nn.BatchNorm1d(8))
    assert without_extra_state(model.state_dict()).keys() == model.state_dict().keys() - {"0._extra_state"}
    assert not without_extra_state(nn.Module().state_dict() | {"_extra_state": NOTHING})


def lines(error):
    what, *rest = str(error).split("\n")
    return what, [line.split(":", 1)[1].strip() for line in rest]


def test_modules_that_the_checkpoint_does_not_know_are_named():
    with pytest.raises(StateError) as caught:
        Fp8State(nn.Sequential(Delayed(), Delayed())).load_state_dict(Fp8State(trained(fresh())).state_dict())
    what, (got, expected, because, fix) = lines(caught.value)
    assert "module '1'" in what
    assert got == "2 modules with state in the checkpoint"
    assert expected == "the 2 of the model, by the same names"
    assert "scales of 1" in because
    assert "as it was when it was saved" in fix


def test_a_module_that_refuses_a_pickle_is_named_with_the_way_to_allow_it():
    model = fresh()
    model[0].trusting = False
    with pytest.raises(StateError) as caught:
        Fp8State(model).load_state_dict(Fp8State(trained(fresh())).state_dict())
    what, (got, expected, because, fix) = lines(caught.value)
    assert what == "module '0' does not take its saved FP8 state"
    assert got.startswith("Refusing")
    assert "unpickles" in expected
    assert "any code" in because
    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1" in fix
