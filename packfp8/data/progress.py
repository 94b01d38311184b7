"""Progress: how far training has come in a sampler's epoch, as checkpoints save and load it."""

from __future__ import annotations

import json

from packfp8.data.batch import PackedBatch
from packfp8.data.sampler import PackingSampler


class Progress:
    """The state of a sampler after the batches that were trained on, whatever a loader's workers have drawn beyond them.

        progress = Progress(sampler)
        for batch in loader:
            ...
            optimizer.step()
            progress.trained(batch)
        torch.distributed.checkpoint.save({"model": ..., "progress": progress}, checkpoint_id=folder)

    The state is one text, because torch.distributed.checkpoint takes lists apart, and loads only as many items as the object
    had before; a sampler that has just been built has none. It is the same on every rank, so that one copy serves all.
    """

    def __init__(self, sampler: PackingSampler) -> None:
        self.sampler = sampler
        self._epoch, self._step = sampler.epoch, sampler.state_dict()["step"]

    def trained(self, batch: PackedBatch) -> None:
        """Note that this batch, of the sampler's present epoch, has been trained on."""
        self._epoch, self._step = self.sampler.epoch, batch.step

    def state_dict(self) -> dict[str, str]:
        """The sampler's state as one text, by the key `sampler`; in an epoch of which nothing was trained on, its start."""
        step = self._step if self.sampler.epoch == self._epoch else -1
        return {"sampler": json.dumps(self.sampler.state_dict(step=step))}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Let the sampler's next iteration go on from there.

        Raises:
            StateError: as `PackingSampler.load_state_dict`.
        """
        self.sampler.load_state_dict(json.loads(state_dict["sampler"]))
        self._epoch, self._step = self.sampler.epoch, self.sampler.state_dict()["step"]
