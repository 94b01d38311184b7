"""A topology read from a device mesh, by the mesh's methods only."""

import pytest

from packfp8.errors import RuleError
from packfp8.rule import Topology


class Mesh:
    """The methods of torch's DeviceMesh that a topology asks, for the rank at `coordinates`."""

    def __init__(self, sizes, coordinates):
        self.mesh_dim_names, self._sizes, self._at = tuple(sizes), tuple(sizes.values()), dict(zip(sizes, coordinates))

    def size(self, dim):
        return self._sizes[dim]

    def get_local_rank(self, name):
        return self._at[name]


def test_named_dimensions_become_sizes_and_coordinates():
    got = Topology.from_mesh(Mesh({"dp": 2, "cp": 3, "tp": 4}, (1, 2, 3)), sp=True)
    assert got == Topology(2, 3, 4, True, 1, 2, 3)


def test_replicas_and_shards_are_both_data_parallel_the_earlier_the_slower():
    got = Topology.from_mesh(Mesh({"dp_replicate": 2, "dp_shard": 3, "cp": 2}, (1, 2, 0)))
    assert (got.dp, got.dp_rank, got.cp) == (6, 5, 2)


def test_pipeline_stages_see_the_same_pack():
    assert Topology.from_mesh(Mesh({"pp": 4, "dp": 2}, (3, 1))) == Topology(dp=2, dp_rank=1)


@pytest.mark.parametrize("sizes", [{"world": 8}, {"dp": 2, "ep": 2}, {"dp": 2, "dp_shard": 2}, {}])
def test_a_mesh_that_cannot_be_read_is_refused(sizes):
    with pytest.raises(RuleError) as caught:
        Topology.from_mesh(Mesh(sizes, (0,) * len(sizes)))
    assert "device mesh cannot be read" in str(caught.value)
    assert "init_device_mesh" in str(caught.value)


def test_a_real_device_mesh_is_read(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
        assert Topology.from_mesh(mesh, sp=True) == Topology(sp=True)
    finally:
        dist.destroy_process_group()
