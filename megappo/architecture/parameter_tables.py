"""Tables of parameters, one Hugging Face tensor a line: the Megatron parameter it is in (its name in the local layer
spec, then the one in TransformerEngine's if that differs) <- the tensor (its sizes, /tp where tensor-parallel ranks cut
it, /etp where expert-tensor-parallel ranks do).

The tensors of one parameter are stacked along dimension 0. Names within layers lack the layer's prefix. {names} are a
family's own.
"""

MODEL = """
embedding.word_embeddings.weight <- model.embed_tokens.weight (vocab/tp hidden)
decoder.final_layernorm.weight <- model.norm.weight (hidden)
"""
OUTPUT = """
output_layer.weight <- {tensor} (vocab/tp hidden)
"""
VALUE_OUTPUT = """
{module}.weight <- score.weight (values hidden)
"""
VALUE_OUTPUT_BIAS = """
{module}.bias <- score.bias (values)
"""
NORMS = """
input_layernorm.weight | self_attention.linear_qkv.layer_norm_weight <- {0}.weight (hidden)
post_attention_layernorm.weight <- {1}.weight (hidden)
pre_mlp_layernorm.weight | mlp.linear_fc1.layer_norm_weight <- {2}.weight (hidden)
post_mlp_layernorm.weight <- {3}.weight (hidden)
"""
QUERIES_AND_KEYS = """
self_attention.linear_qkv.weight <- self_attn.q_proj.weight (q/tp hidden)
self_attention.linear_qkv.weight <- self_attn.k_proj.weight (kv/tp hidden)
"""
VALUES = """
self_attention.linear_qkv.weight <- self_attn.v_proj.weight (kv/tp hidden)
"""
ATTENTION_OUTPUT = """
self_attention.linear_proj.weight <- self_attn.o_proj.weight (hidden attended/tp)
"""
QKV_BIAS = """
self_attention.linear_qkv.bias <- self_attn.q_proj.bias (q/tp)
self_attention.linear_qkv.bias <- self_attn.k_proj.bias (kv/tp)
self_attention.linear_qkv.bias <- self_attn.v_proj.bias (kv/tp)
"""
OUTPUT_BIAS = """
self_attention.linear_proj.bias <- self_attn.o_proj.bias (hidden)
"""
SINKS = """
self_attention.core_attention.softmax_offset <- self_attn.sinks (heads/tp)
"""
QK_NORMS = """
self_attention.q_layernorm.weight <- self_attn.q_norm.weight (head)
self_attention.k_layernorm.weight <- self_attn.k_norm.weight (head)
"""
ALL_HEADS_NORMS = """
self_attention.q_layernorm.weight <- self_attn.q_norm.weight (q/tp)
self_attention.k_layernorm.weight <- self_attn.k_norm.weight (kv/tp)
"""
LAYER_SCALAR = """
layer_scalar <- layer_scalar (one)
"""
QUERY = """
self_attention.linear_q_proj.weight <- self_attn.q_proj.weight (q/tp hidden)
"""
LATENT_QUERY = """
self_attention.q_layernorm.weight | self_attention.linear_q_up_proj.layer_norm_weight <-
    self_attn.q_a_layernorm.weight (q_latent)
self_attention.linear_q_up_proj.weight <- self_attn.q_b_proj.weight (q/tp q_latent)
self_attention.linear_q_down_proj.weight <- self_attn.q_a_proj.weight (q_latent hidden)
"""
# Rotary dimensions need no reordering: with latent attention Megatron takes them in Hugging Face's pairs.
LATENT_ATTENTION = """
self_attention.linear_kv_down_proj.weight <- self_attn.kv_a_proj_with_mqa.weight (kv_latent_and_rope hidden)
self_attention.kv_layernorm.weight | self_attention.linear_kv_up_proj.layer_norm_weight <-
    self_attn.kv_a_layernorm.weight (kv_latent)
self_attention.linear_kv_up_proj.weight <- self_attn.kv_b_proj.weight (k_and_v/tp kv_latent)
self_attention.linear_proj.weight <- self_attn.o_proj.weight (hidden v/tp)
"""
WITH_NEXT = "self_attn.q_a_proj.weight"
"""The last tensor of LATENT_QUERY comes before the first of LATENT_ATTENTION: SGLang makes one matrix of the two, and
silently takes neither from a bucket that lacks the other."""
LINEAR_INPUTS = {
    "by head": """
self_attention.linear_qkv.weight <- linear_attn.in_proj_qkvz.weight (linear_qkvz/tp hidden)
self_attention.linear_qkv.weight <- linear_attn.in_proj_ba.weight (linear_ba/tp hidden)
""",
    "apart": """
self_attention.linear_qkv.weight <- linear_attn.in_proj_q.weight (linear_k/tp hidden)
self_attention.linear_qkv.weight <- linear_attn.in_proj_k.weight (linear_k/tp hidden)
self_attention.linear_qkv.weight <- linear_attn.in_proj_v.weight (linear_v/tp hidden)
self_attention.linear_qkv.weight <- linear_attn.in_proj_z.weight (linear_v/tp hidden)
self_attention.linear_qkv.weight <- linear_attn.in_proj_b.weight (linear_heads/tp hidden)
self_attention.linear_qkv.weight <- linear_attn.in_proj_a.weight (linear_heads/tp hidden)
""",
}
"""Format -> queries, keys, values, output gates, betas and decays. In the first, the tensors have them head by head, as
the Megatron parameter of both."""
LINEAR_ATTENTION = """
self_attention.conv1d <- linear_attn.conv1d_q.weight (linear_k/tp one kernel)
self_attention.conv1d <- linear_attn.conv1d_k.weight (linear_k/tp one kernel)
self_attention.conv1d <- linear_attn.conv1d_v.weight (linear_v/tp one kernel)
self_attention.A_log <- linear_attn.A_log (linear_heads/tp)
self_attention.dt_bias <- linear_attn.dt_bias (linear_heads/tp)
self_attention.norm <- linear_attn.norm.weight (linear_v_head)
self_attention.linear_proj.weight <- linear_attn.out_proj.weight (hidden linear_v/tp)
"""
MLP = """
mlp.linear_fc1.weight <- mlp.gate_proj.weight (ffn/tp hidden)
mlp.linear_fc1.weight <- mlp.up_proj.weight (ffn/tp hidden)
mlp.linear_fc2.weight <- mlp.down_proj.weight (hidden ffn/tp)
"""
ROUTER = """
mlp.router.weight <- {block}.{router}.weight (experts hidden)
"""
ROUTER_LINEAR_BIAS = """
mlp.router.bias <- {block}.{router}.bias (experts)
"""
SHARED_EXPERT = """
mlp.shared_experts.linear_fc1.weight <- mlp.{shared}.gate_proj.weight (shared_ffn/tp hidden)
mlp.shared_experts.linear_fc1.weight <- mlp.{shared}.up_proj.weight (shared_ffn/tp hidden)
mlp.shared_experts.linear_fc2.weight <- mlp.{shared}.down_proj.weight (hidden shared_ffn/tp)
"""
SHARED_GATE = """
mlp.shared_experts.gate_weight <- mlp.{shared}_gate.weight (one hidden)
"""
SCORE_BIAS = """
mlp.router.expert_bias <- {block}.{bias_name} (experts)
"""
# TransformerEngine's grouped layer holds all experts of a rank.
EXPERT = """
mlp.experts.local_experts.{expert}.linear_fc1.weight | mlp.experts.linear_fc1.weight{expert} <-
    {block}.experts.{expert}.{gate}.weight (expert_ffn/etp hidden)
mlp.experts.local_experts.{expert}.linear_fc1.weight | mlp.experts.linear_fc1.weight{expert} <-
    {block}.experts.{expert}.{up}.weight (expert_ffn/etp hidden)
mlp.experts.local_experts.{expert}.linear_fc2.weight | mlp.experts.linear_fc2.weight{expert} <-
    {block}.experts.{expert}.{down}.weight (hidden expert_ffn/etp)
"""
EXPERT_BIAS = """
mlp.experts.local_experts.{expert}.linear_fc1.bias | mlp.experts.linear_fc1.bias{expert} <-
    {block}.experts.{expert}.{gate}.bias (expert_ffn/etp)
mlp.experts.local_experts.{expert}.linear_fc1.bias | mlp.experts.linear_fc1.bias{expert} <-
    {block}.experts.{expert}.{up}.bias (expert_ffn/etp)
mlp.experts.local_experts.{expert}.linear_fc2.bias | mlp.experts.linear_fc2.bias{expert} <-
    {block}.experts.{expert}.{down}.bias (hidden)
"""
TOWERS = {
    "qwen2_5_vl": """
patch_embed.proj.weight (hidden_size in_channels temporal_patch_size patch_size patch_size)
merger.ln_q.weight (hidden_size)
merger.mlp.0.weight (merged_size merged_size)
merger.mlp.0.bias (merged_size)
merger.mlp.2.weight (out_hidden_size merged_size)
merger.mlp.2.bias (out_hidden_size)
""",
    "qwen3_vl": """
patch_embed.proj.weight (hidden_size in_channels temporal_patch_size patch_size patch_size)
patch_embed.proj.bias (hidden_size)
pos_embed.weight (num_position_embeddings hidden_size)
merger.norm.weight (hidden_size)
merger.norm.bias (hidden_size)
merger.linear_fc1.weight (merged_size merged_size)
merger.linear_fc1.bias (merged_size)
merger.linear_fc2.weight (out_hidden_size merged_size)
merger.linear_fc2.bias (out_hidden_size)
""",
}
"""Kind of a vision tower -> its tensors outside its blocks, under the names that they have in Hugging Face's files.
Names of a tower's tensors lack its prefix."""
DEEPSTACK_MERGER = """
deepstack_merger_list.{index}.norm.weight (merged_size)
deepstack_merger_list.{index}.norm.bias (merged_size)
deepstack_merger_list.{index}.linear_fc1.weight (merged_size merged_size)
deepstack_merger_list.{index}.linear_fc1.bias (merged_size)
deepstack_merger_list.{index}.linear_fc2.weight (out_hidden_size merged_size)
deepstack_merger_list.{index}.linear_fc2.bias (out_hidden_size)
"""
TOWER_ATTENTION = """
blocks.{index}.norm1.weight (hidden_size)
blocks.{index}.norm2.weight (hidden_size)
blocks.{index}.attn.qkv.weight (qkv_size hidden_size)
blocks.{index}.attn.qkv.bias (qkv_size)
blocks.{index}.attn.proj.weight (hidden_size hidden_size)
blocks.{index}.attn.proj.bias (hidden_size)
"""
TOWER_BLOCKS = {
    "qwen2_5_vl": TOWER_ATTENTION
    + """
blocks.{index}.mlp.gate_proj.weight (intermediate_size hidden_size)
blocks.{index}.mlp.gate_proj.bias (intermediate_size)
blocks.{index}.mlp.up_proj.weight (intermediate_size hidden_size)
blocks.{index}.mlp.up_proj.bias (intermediate_size)
blocks.{index}.mlp.down_proj.weight (hidden_size intermediate_size)
blocks.{index}.mlp.down_proj.bias (hidden_size)
""",
    "qwen3_vl": TOWER_ATTENTION
    + """
blocks.{index}.norm1.bias (hidden_size)
blocks.{index}.norm2.bias (hidden_size)
blocks.{index}.mlp.linear_fc1.weight (intermediate_size hidden_size)
blocks.{index}.mlp.linear_fc1.bias (intermediate_size)
blocks.{index}.mlp.linear_fc2.weight (hidden_size intermediate_size)
blocks.{index}.mlp.linear_fc2.bias (hidden_size)
""",
}
"""Kind of a vision tower -> the tensors of a block."""
