"""DeepSeek-V3.2: DeepSeek-V3's router and names; the indexers of its sparse attention are copied with the rest.

Source: transformers' modeling_deepseek_v32.py.
"""

from dataclasses import replace

from .deepseek_v3 import FAMILY as V3

FAMILY = replace(V3, model_type="deepseek_v32", model_class="DeepseekV32ForCausalLM")
