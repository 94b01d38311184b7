"""FP8 in the spellings that NeMo users have: what is read, and what is refused because it would do nothing."""

import pytest

from packfp8 import ConfigError
from packfp8.model.fp8 import Fp8


class Node:
    """Behaves as an OmegaConf node does: keys() and indexing; iterating over a list node is all that a list needs."""

    def __init__(self, values):
        self._values = values

    def keys(self):
        return self._values.keys()

    def __getitem__(self, key):
        value = self._values[key]
        return Node(value) if isinstance(value, dict) else value


@pytest.fixture(params=[dict, Node], ids=["dict", "node"])
def config(request):
    return request.param


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_the_transformer_engine_section_is_read(config, recipe):
    fp8 = Fp8.from_config(config({"automodel_backend": {"attn": "te", "te_fp8": {"recipe": recipe}}, "trainer": {"steps": 3}}))
    assert fp8 == Fp8.te(recipe)


def test_every_key_of_the_torchao_section_is_read(config):
    section = {
        "enabled": True,
        "recipe_name": "tensorwise",
        "filter_fqns": ["lm_head", "router"],
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
        "force_recompute_fp8_weight_in_bwd": True,
        "emulate": True,
    }
    assert Fp8.from_config(config({"fp8": section})) == Fp8.torchao(
        "tensorwise",
        filter_fqns=("lm_head", "router"),
        fsdp_all_gather=True,
        precompute_scale=True,
        recompute_weight=True,
        emulate=True,
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_torchao_section_may_be_short(config, recipe):
    assert Fp8.from_config(config({"fp8": {"enabled": True, "recipe_name": recipe}})) == Fp8.torchao(recipe)


def test_a_recipe_left_null_is_torchao_s_own_default(config):
    assert Fp8.from_config(config({"fp8": {"enabled": True, "recipe_name": None}})) == Fp8.torchao("tensorwise")


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"automodel_backend": {"attn": "te"}},
        {"automodel_backend": {"te_fp8": None}},
        {"automodel_backend": None, "fp8": None},
        {"fp8": {"enabled": False, "recipe_name": "rowwise", "filter_fqns": ["lm_head"]}},
        {"model": {"automodel_backend": {"te_fp8": None}, "fp8": {"enabled": False}}, "trainer": {"fp8": "none"}},
    ],
)
def test_no_fp8_asked_for_is_none(config, content):
    assert Fp8.from_config(config(content)) is None


def test_a_disabled_torchao_section_leaves_transformer_engine_alone(config):
    fp8 = Fp8.from_config(config({"automodel_backend": {"te_fp8": {"recipe": "block"}}, "fp8": {"enabled": False}}))
    assert fp8 == Fp8.te("block")


REFUSED = {
    "both at once": (
        {"automodel_backend": {"te_fp8": {"recipe": "block"}}, "fp8": {"enabled": True, "recipe_name": "rowwise"}},
        "two FP8 libraries are configured at once",
        "automodel_backend.te_fp8: 'block' and fp8: 'rowwise'",
    ),
    "a misspelt key": ({"fp8": {"enabled": True, "filter_fqn": ["a"]}}, "fp8 has a key that nothing reads", "filter_fqn"),
    "a key of the other library": (
        {"automodel_backend": {"te_fp8": {"recipe": "block", "emulate": True}}},
        "automodel_backend.te_fp8 has a key that nothing reads",
        "emulate",
    ),
    "enabled left out": ({"fp8": {"recipe_name": "rowwise"}}, "fp8 would silently do nothing", "enabled: None"),
    "enabled as a text": ({"fp8": {"enabled": "yes"}}, "fp8 would silently do nothing", "enabled: 'yes'"),
    "no recipe": ({"automodel_backend": {"te_fp8": {}}}, "automodel_backend.te_fp8 would silently do nothing", "keys []"),
    "a section without its name": (
        {"te_fp8": {"recipe": "block"}},
        "a section of FP8 without the name above it",
        "keys ['te_fp8']",
    ),
    "a section below the one that NeMo's YAML calls model": (
        {"model": {"automodel_backend": {"te_fp8": {"recipe": "block"}}}},
        "the FP8 section below model would silently do nothing",
        "the configuration above model",
    ),
    "torchao's section below another": (
        {"model": {"fp8": {"enabled": True}}, "fp8": {"enabled": False}},
        "the FP8 section below model would silently do nothing",
        "the configuration above model",
    ),
    "a switch as a text": ({"fp8": {"enabled": True, "emulate": "false"}}, "fp8.emulate is neither true nor false", "'false'"),
    "filters as one text": (
        {"fp8": {"enabled": True, "filter_fqns": "lm_head"}},
        "fp8.filter_fqns is not a list of names",
        "'lm_head'",
    ),
    "a section that is a text": ({"fp8": "tensorwise"}, "fp8 is not a section", "'tensorwise'"),
    "an unknown recipe": (
        {"automodel_backend": {"te_fp8": {"recipe": "auto"}}},
        "the recipe is none of Transformer Engine that the rule knows",
        "'auto'",
    ),
    "a recipe of the other library": (
        {"fp8": {"enabled": True, "recipe_name": "block"}},
        "the recipe is none of torchao that the rule knows",
        "'block'",
    ),
    "a gather that rowwise lacks": (
        {"fp8": {"enabled": True, "recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True}},
        "torchao's fsdp_all_gather would do nothing",
        "recipe 'rowwise'",
    ),
    "scales of a gather that is off": (
        {"fp8": {"enabled": True, "precompute_float8_dynamic_scale_for_fsdp": True}},
        "torchao's precompute_scale would do nothing",
        "fsdp_all_gather=False",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_contradicts_itself_or_would_do_nothing_is_refused(config, case):
    content, what, got = case
    with pytest.raises(ConfigError) as caught:
        Fp8.from_config(config(content))
    error = caught.value
    assert what in error.what
    assert got in str(error.got)
    assert all((error.expected, error.because, error.fix))
    assert len(str(error).splitlines()) == 5


class DelayedScaling:
    """Named as the class in transformer_engine.common.recipe."""

    fp8_dpa = False


class Tuned(DelayedScaling):
    pass


class CustomRecipe:
    pass


def test_a_recipe_object_is_known_by_its_class_or_the_nearest_base(config):
    recipe = Tuned()
    fp8 = Fp8.from_config(config({"automodel_backend": {"te_fp8": {"recipe": recipe}}}))
    assert fp8.recipe == "delayed"
    assert fp8.te_recipe == (recipe,)


def test_a_recipe_object_without_known_multiples_is_refused():
    with pytest.raises(ConfigError, match="none of Transformer Engine that the rule knows"):
        Fp8.te(CustomRecipe())
