"""SGLang's own classes of the families that can be trained: see `megappo.architecture.families`. SGLang itself finds
the classes of linear attention, some of which cannot be imported on a CPU (0.5.23, models/qwen3_5.py), and serves
Seed-OSS and SmolLM3 with transformers' code.
"""

from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM
from sglang.srt.models.gemma4_causal import Gemma4ForCausalLM
from sglang.srt.models.glm4 import Glm4ForCausalLM
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.granite import GraniteForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM, Phi3ForCausalLM
from sglang.srt.models.minimax_m2 import MiniMaxM2ForCausalLM
from sglang.srt.models.mistral import MistralForCausalLM
from sglang.srt.models.mixtral import MixtralForCausalLM
from sglang.srt.models.olmo2 import Olmo2ForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen2_moe import Qwen2MoeForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

from megappo.engines.sglang_patches import absorb_latent_attention

absorb_latent_attention()

EntryClass = [
    *(DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4ForCausalLM, Glm4MoeForCausalLM, LlamaForCausalLM),
    *(MistralForCausalLM, MixtralForCausalLM, Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM),
    *(Qwen3MoeForCausalLM, Gemma3ForCausalLM, Gemma4ForCausalLM, GraniteForCausalLM, Phi3ForCausalLM),
    *(GptOssForCausalLM, MiniMaxM2ForCausalLM, Olmo2ForCausalLM),  # the latter for OLMo 3, too
]
