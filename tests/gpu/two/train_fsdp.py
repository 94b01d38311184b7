"""FSDP2 over two ranks on the embedded corpus: BF16 by three seeds, each FP8 recipe by the first; a resume in the middle.

    torchrun --nproc-per-node 2 tests/gpu/two/train_fsdp.py --picture tests/gpu/results/curves-fsdp.png

Every run of one seed begins with the same parameters and sees the same packs: sampler, dealer, workers and collator are those
of a user. Some packs of rank 1 are text alone. The question is whether the mean loss of the last 50 steps of an FP8 run is
within 2 % of BF16's, or within the spread of its three seeds. Then some runs are taken up at their middle: model, optimizer,
FP8 state and sampler are built anew and loaded, and each loss is compared with the uninterrupted run's.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for where runs shall repeat
os.environ.setdefault("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # the checkpoints are this program's own

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2])]  # of the benchmarks beside this folder

import click  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from lhotse.utils import fastcopy  # noqa: E402
from sharded import Ranks, build, clip, forget, rule_of, shard  # noqa: E402
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from train_curves import LAST, draw, table  # noqa: E402
from workload import MEASURE  # noqa: E402

from packfp8 import Collator, PackedDataset, PackingSampler, Topology, corpus  # noqa: E402
from packfp8.data.corpus import texts  # noqa: E402
from packfp8.data.example import as_example  # noqa: E402
from packfp8.data.lockstep import in_lockstep  # noqa: E402
from packfp8.data.peers import check_start  # noqa: E402
from packfp8.data.progress import Progress  # noqa: E402
from packfp8.data.sampled_pack import SampledPack  # noqa: E402
from packfp8.model.fp8_state import Fp8State, without_extra_state  # noqa: E402
from packfp8.model.loss import count_supervised  # noqa: E402
from packfp8.model.plain_decoder import DecoderSizes  # noqa: E402

RUNS = (
    ("bf16", 0),
    ("delayed", 0),
    ("block", 0),
    ("tensorwise", 0),
    ("plain", 0),
    ("current", 0),
    ("bf16", 1),
    ("bf16", 2),
)
"""Variant and seed. "plain" is the decoder in plain torch in BF16, which torchao's recipe is run on."""
RESUMED = ("delayed", "block", "tensorwise")
WARMUP_STEPS = 20


def items(copies: int) -> list:
    """The corpus and its texts, decoded once, so many times over, under ids of their own."""
    spoken = [cut.move_to_memory(audio_format="wav") for cut in corpus()]
    again = [fastcopy(cut, id=f"{cut.id}-{n}") for n in range(copies) for cut in spoken]
    return again + [{"id": f"text{k}-{n}", "text": one.text} for n in range(copies) for k, one in enumerate(texts())]


class Deaf(PackedDataset):
    """A dataset some of whose packs, one of so many, are made of texts alone."""

    def __init__(self, collator: Collator, every: int) -> None:
        super().__init__(collator)
        self.every, self.texts, left = every, [], collator.budget
        for k, one in enumerate(texts()):
            item = {"id": f"text{k}", "text": one.text}
            left -= MEASURE.measure(as_example(item)).tokens
            if left >= 0:
                self.texts.append(item)

    def __getitem__(self, pack: SampledPack):
        if pack.step % self.every == self.every - 1:
            pack = SampledPack(self.texts, step=pack.step, fingerprint=pack.fingerprint)
        return super().__getitem__(pack)


class Training:
    """One run: its model, optimizer and data, how far it has come, and the losses so far.

    Args:
        variant, seed: of RUNS.
        sizes: of the decoder.
        data: `items`.
        ranks: where it runs.
        options: budget, lr, workers and text_every.
    """

    def __init__(self, variant: str, seed: int, sizes: DecoderSizes, data: list, ranks: Ranks, **options) -> None:
        self.ranks, self.lr, self.done, self.losses, self.seconds = ranks, options["lr"], 0, [], 0.0
        rule = rule_of(variant, Topology(dp=ranks.world, dp_rank=ranks.rank))
        self.mesh = ranks.mesh("dp")
        self.model = shard(build(variant, sizes, rule, seed=seed, device=ranks.device), self.mesh)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        terms = {"measure": MEASURE, "rule": rule, "budget": options["budget"]}
        self.sampler, collator = PackingSampler(data, **terms, seed=seed), Collator(**terms)
        check_start(self.sampler, collator, ranks.host, steps=8)
        dataset = Deaf(collator, options["text_every"]) if ranks.rank == 1 else PackedDataset(collator)
        many = {"prefetch_factor": 8} if options["workers"] else {}
        self.loader = DataLoader(
            dataset,
            sampler=self.sampler,
            batch_size=None,
            num_workers=options["workers"],
            pin_memory=ranks.device.type == "cuda",
            **many,
        )
        self.progress, self.names, self.silent = Progress(self.sampler), 0, []

    def run(self, until: int, save_at: int = 0, folder: Path | None = None) -> torch.Tensor:
        """The losses of the steps from where it stands to `until`, float64, over all ranks."""
        batches = in_lockstep(self.loader, self.ranks.host)
        started, totals, first = time.perf_counter(), [], self.done
        for batch in batches:
            totals.append(self.step(batch))
            if folder and self.done == save_at:
                saving = time.perf_counter()
                dcp.save(self.state(), checkpoint_id=folder)
                started += time.perf_counter() - saving
            if self.done == until:
                break
        batches.close()
        sums = torch.stack([total for total, _ in totals])
        dist.all_reduce(sums)
        losses = sums.cpu() / torch.stack([count for _, count in totals]).cpu()
        self.seconds = (time.perf_counter() - started) / (until - first)
        return losses

    def step(self, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's sum of losses, and the count over all ranks."""
        self.names = zlib.crc32(repr(batch.ids).encode(), self.names)
        self.silent.append(not batch.audio.shape[0])
        count = count_supervised([batch], self.mesh, device=self.ranks.device)
        out = self.model(batch.to(self.ranks.device, non_blocking=True), global_supervised=count)
        out.loss.backward()
        clip(self.parameters)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.done + 1) / WARMUP_STEPS)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.model.fp8:
            self.model.fp8.after_optimizer_step(self.model)
        self.progress.trained(batch)
        self.done += 1
        return out.loss_sum.detach().double(), count

    def state(self) -> dict:
        """All that a checkpoint holds."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"model": without_extra_state(model), "optimizer": optimizer, "done": self.done}
        return own | {"fp8": Fp8State(self.model), "progress": self.progress}

    def load(self, folder: Path, *, leave_out: tuple[str, ...] = ()) -> Training:
        """Itself, as it was when the checkpoint was saved; without what is left out."""
        state = {name: value for name, value in self.state().items() if name not in leave_out}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),
        )
        if self.model.fp8:
            self.model.fp8.after_optimizer_step(self.model)
        self.done = state["done"]
        return self


def one_sided(silent: list[bool], ranks: Ranks) -> int:
    """Steps in which some rank had no audio, and another had."""
    told: list = [None] * ranks.world
    dist.all_gather_object(told, silent, group=ranks.host)
    return sum(any(step) and not all(step) for step in zip(*told, strict=True))


def resumed(fresh, folder: Path, expected: torch.Tensor, until: int, variant: str) -> str:
    """What a run that was taken up from the checkpoint says beside the uninterrupted one."""
    found = [fresh().load(folder).run(until) for _ in range(2)]
    gaps = [(one - expected).abs() for one in found]
    if not gaps[0].any():
        told = f"{len(expected)} losses equal bit for bit"
    else:
        at = int(gaps[0].nonzero()[0])
        apart = (found[0] - found[1]).abs().max()
        told = (
            f"from loss {at + 1} of {len(expected)} on apart, by {gaps[0].max():.2e} at most; two resumed runs by {apart:.2e}"
        )
    if variant == "delayed":
        without = fresh().load(folder, leave_out=("fp8",)).run(until)
        told += f"; without FP8 state apart by {(without - expected).abs().max():.2e}"
    return told


@click.command()
@click.option("--steps", default=500, show_default=True)
@click.option("--resumed-steps", default=50, show_default=True, help="Steps after the checkpoint, which is at the middle.")
@click.option("--budget", default=2048, show_default=True, help="Tokens of a pack.")
@click.option("--hidden", default=512, show_default=True)
@click.option("--layers", default=6, show_default=True)
@click.option("--lr", default=6e-5, show_default=True)
@click.option("--copies", default=80, show_default=True, help="Times that the corpus is in an epoch.")
@click.option("--text-every", default=25, show_default=True, help="One of so many packs of rank 1 is text alone.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--workers", default=6, show_default=True, help="Processes of each rank that read audio.")
@click.option("--only", multiple=True, help="Variants to run; all where none is given.")
@click.option("--seconds", default=330.0, show_default=True, help="No run is begun after so many.")
@click.option("--deterministic/--not-deterministic", default=True, show_default=True, help="Kernels that repeat to the bit.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file for all curves.")
def main(
    steps, resumed_steps, budget, hidden, layers, lr, copies, text_every, device, workers, only, seconds, deterministic, picture
) -> None:
    """Train every variant, resume some, and print the table."""
    started = time.perf_counter()
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    ranks = Ranks(device)
    ranks.header()
    sizes = DecoderSizes(vocab=272, hidden=hidden, ffn=hidden * 11 // 4 // 16 * 16, layers=layers, heads=8, kv_heads=4)
    data, curves, names, middle = items(copies), {}, {}, steps // 2
    folders: list = [tempfile.mkdtemp() if not ranks.rank else ""]
    dist.broadcast_object_list(folders, group=ranks.host)
    ranks.tell(f"{sizes}\n{steps} steps of {ranks.world} packs of {budget} tokens, AdamW {lr}, {len(data)} examples\n")
    for variant, seed in RUNS:
        if only and variant not in only:
            continue
        late: list = [time.perf_counter() - started > seconds]
        dist.broadcast_object_list(late, group=ranks.host)
        if late[0]:
            ranks.tell(f"{variant:<10} seed {seed}  not run: {seconds:.0f} s are over")
            continue

        def fresh(variant=variant, seed=seed) -> Training:
            forget(ranks.device)
            return Training(variant, seed, sizes, data, ranks, budget=budget, lr=lr, workers=workers, text_every=text_every)

        folder = Path(folders[0]) / variant if variant in RESUMED and not seed else None
        training = fresh()
        curve = curves[variant, seed] = training.run(steps, middle, folder)
        same = names.setdefault(seed, training.names) == training.names
        ranks.tell(
            f"{variant:<10} seed {seed}  first {curve[0]:.4f}  last {LAST} {curve[-LAST:].mean():.4f}  "
            f"{1e3 * training.seconds:.1f} ms a step, one rank without audio in {one_sided(training.silent, ranks)} steps, "
            f"{'packs of its seed' if same else 'OTHER PACKS'}, {time.perf_counter() - started:.0f} s"
        )
        if folder:
            del training
            told = resumed(fresh, folder, curve[middle : middle + resumed_steps], middle + resumed_steps, variant)
            ranks.tell(f"{variant:<10} resumed at {middle}: {told}, {time.perf_counter() - started:.0f} s")
    if not ranks.rank:
        table(curves)
        if {("plain", 0), ("tensorwise", 0)} <= curves.keys():
            ratio = curves["tensorwise", 0][-LAST:].mean() / curves["plain", 0][-LAST:].mean()
            print(f"tensorwise {ratio - 1:+.2%} of BF16 in plain torch")
        if picture and curves:
            draw(curves, picture)
        shutil.rmtree(folders[0])
    dist.barrier(ranks.host)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
