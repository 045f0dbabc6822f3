"""The names a model author imports: the layer, its config, its cache and its rotary positions."""

from mla_suite.models.cache import PagedLatentCache, Step, slots
from mla_suite.models.config import PRESETS, MLAConfig, Yarn
from mla_suite.models.mla import MLA
from mla_suite.models.rope import cos_sin_table, rotate

__all__ = ["MLA", "PRESETS", "MLAConfig", "PagedLatentCache", "Step", "Yarn", "cos_sin_table", "rotate", "slots"]
