"""Accelerate, Lightning and the Hugging Face Trainer: the setting that leaves packs alone, and what they do without it."""

import inspect

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers import Trainer as HfTrainer

from packfp8.data import Collator, Example, PackedDataset, PackingSampler, Turn
from packfp8.data.reshard import check_loader
from packfp8.errors import ConfigError
from packfp8.rule import Topology, align

EXAMPLES = [Example(id=f"s{n}", turns=(Turn("assistant", ("word " * (n % 7 + 1),)),)) for n in range(40)]


class AsKwargs:
    """What a Hugging Face model takes, instead of the batch: picklable, importable."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, pack):
        batch = self.dataset[pack]
        return {"input_ids": batch.input_ids[None], **batch.kwargs("hf")}


@pytest.fixture
def loader(measure):
    """loader(dp=1, dp_rank=0, wrap=...) -> a loader of packs."""

    def loader(dp=1, dp_rank=0, wrap=lambda dataset: dataset):
        rule = align("block", Topology(dp=dp, dp_rank=dp_rank))
        sampler = PackingSampler(EXAMPLES, measure=measure, rule=rule, budget=128)
        dataset = PackedDataset(Collator(measure=measure, rule=rule, budget=128))
        return DataLoader(wrap(dataset), sampler=sampler, batch_size=None)

    return loader


def seen(batches):
    return [(batch.step, batch.ids) for batch in batches]


def test_packs_straight_from_the_loader_are_let_pass(loader):
    check_loader(loader())
    check_loader(loader(dp=2, dp_rank=1))


def test_accelerate_without_the_loader_leaves_packs_alone(loader):
    accelerator = Accelerator(cpu=True)
    model, packs = torch.nn.Linear(2, 2), loader()
    accelerator.prepare(model)
    check_loader(packs)
    assert seen(batch.to(accelerator.device) for batch in packs) == seen(loader())


@pytest.mark.parametrize("even_batches", [False, True])
def test_accelerate_with_the_loader_is_caught_before_it_fails_on_batches_without_a_size(even_batches, loader):
    prepared = prepare_data_loader(loader(dp=2), num_processes=2, process_index=0, even_batches=even_batches)
    with pytest.raises(ConfigError, match="BatchSamplerShard among 2 processes"):
        check_loader(prepared)
    with pytest.raises((TypeError, ValueError)):
        next(iter(prepared))


class Packs(torch.utils.data.IterableDataset):
    """Packs behind an iterable dataset, as lhotse's IterableDatasetWrapper has them."""

    def __init__(self, loader):
        self.sampler, self.dataset = loader.sampler, loader.dataset

    def __iter__(self):
        return (self.dataset[pack] for pack in self.sampler)


@pytest.mark.parametrize("dispatch", [False, True])
def test_accelerate_would_deal_packs_of_an_iterable_dataset_twice_and_is_caught(dispatch, loader):
    packs = DataLoader(Packs(loader(dp=2)), batch_size=None)
    check_loader(packs)
    prepared = prepare_data_loader(packs, num_processes=2, process_index=1, dispatch_batches=dispatch, put_on_device=True)
    with pytest.raises(ConfigError) as caught:
        check_loader(prepared)
    what, got, expected, because, fix = str(caught.value).splitlines()
    assert "a second time" in what
    assert ("DataLoaderDispatcher" if dispatch else "IterableDatasetShard among 2") in got
    assert "PackingSampler alone" in expected
    assert "different ones" in because
    assert "use_distributed_sampler=False" in fix


def lightning(**settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", max_epochs=1, **quiet, **settings)


class Watch(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.got = torch.nn.Linear(1, 1), []

    def training_step(self, batch, batch_idx):
        self.got.append(batch)
        return self.layer(batch.loss_mask.sum()[None]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_lightning_trains_on_each_pack_as_it_is(loader):
    model = Watch()
    lightning(devices=1, use_distributed_sampler=False).fit(model, loader())
    assert seen(model.got) == seen(loader())


def prepared_by_lightning(packs, **settings):
    trainer = lightning(devices=2, strategy="ddp", **settings)
    return trainer._data_connector._prepare_dataloader(packs, shuffle=False, mode=RunningStage.TRAINING)


def test_lightning_on_several_ranks_leaves_packs_alone_where_it_is_told_to(loader):
    packs = loader(dp=2)
    prepared = prepared_by_lightning(packs, use_distributed_sampler=False)
    assert prepared is packs
    check_loader(prepared)


def test_lightning_would_deal_packs_twice_and_is_refused(loader):
    """By Lightning itself, as packs have no length; were they counted, by the check."""
    with pytest.raises((TypeError, ConfigError)):
        check_loader(prepared_by_lightning(loader(dp=2)))


class PackTrainer(HfTrainer):
    packs = None

    def get_train_dataloader(self):
        return self.packs


def test_the_hugging_face_trainer_trains_on_each_pack_as_it_is(loader, tmp_path):
    sizes = {"vocab_size": 272, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, losses = LlamaForCausalLM(LlamaConfig(**sizes)), []
    forward = model.forward

    def watched(**kwargs):
        out = forward(**kwargs)
        losses.append((kwargs["input_ids"], kwargs["shift_labels"], kwargs["num_items_in_batch"], out.logits, out.loss))
        return out

    watched.__signature__ = inspect.signature(forward)
    model.forward = watched
    settings = {"max_steps": 3, "learning_rate": 0.0, "report_to": [], "save_strategy": "no", "use_cpu": True}
    trainer = PackTrainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), disable_tqdm=True, **settings))
    trainer.packs = loader(wrap=AsKwargs)
    trainer.train()
    batches = list(loader())[:3]
    assert len(losses) == 3
    for (ids, labels, count, logits, loss), batch in zip(losses, batches, strict=True):
        assert torch.equal(ids[0], batch.input_ids)
        assert int(count) == batch.num_supervised
        total = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
        torch.testing.assert_close(loss, total / batch.num_supervised)
