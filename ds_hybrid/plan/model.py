"""The shape of a mixture-of-experts language model, and what follows from it: parameters and work per token. Pure.

Symbols: H hidden size, F width of an expert, E experts, K of them per token, A attention heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class GroupedAttention:
    """Attention whose query heads share key and value heads (Ainslie et al., arXiv:2305.13245).

    Attributes:
        has_head_norms: queries and keys are normalized per head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_head_norms: bool = False

    @property
    def score_dim(self) -> int:
        """Width of a query and a key of one head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value of one head."""
        return self.head_dim

    def num_sharded(self, hidden_size: int) -> int:
        """Parameters that tensor parallelism shards: the projections."""
        return 2 * hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim

    def num_whole_matrices(self, hidden_size: int) -> int:
        """Matrix elements that every rank has whole."""
        return 0

    @property
    def num_norms(self) -> int:
        return 2 * self.head_dim if self.has_head_norms else 0


@dataclass(frozen=True)
class LatentAttention:
    """Attention with keys and values from a small latent vector (MLA; DeepSeek-AI, arXiv:2405.04434).

    Attributes:
        q_rank: width of the queries' latent vector, None without one.
        kv_rank: width of the latent vector of keys and values.
        plain_dim, rotary_dim: the parts of a query and a key without and with positions.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def score_dim(self) -> int:
        """Width of a query and a key of one head."""
        return self.plain_dim + self.rotary_dim

    def num_sharded(self, hidden_size: int) -> int:
        """Parameters that tensor parallelism shards: what makes heads of latent vectors, and what joins the heads."""
        per_head = (self.q_rank or hidden_size) * self.score_dim
        per_head += self.kv_rank * (self.plain_dim + self.value_dim) + self.value_dim * hidden_size
        return self.num_heads * per_head

    def num_whole_matrices(self, hidden_size: int) -> int:
        """Matrix elements that every rank has whole: what makes the latent vectors."""
        return hidden_size * ((self.q_rank or 0) + self.kv_rank + self.rotary_dim)

    @property
    def num_norms(self) -> int:
        return (self.q_rank or 0) + self.kv_rank


@dataclass(frozen=True)
class ModelShape:
    """A decoder of ``num_dense_layers`` plain layers and MoE layers after them; all MLPs are gated (SwiGLU).

    Attributes:
        model_type: Hugging Face's name of the architecture.
        dense_width, expert_width: F of a plain layer's MLP and of an expert.
        shared_width: of the experts that every token takes, together; 0 without.
        is_tied: input and output embeddings are one matrix.
        max_positions: the longest sequence, None when the model does not say.
        routing_groups: (M, G): a token's experts are in M of G groups of consecutive experts; None without a limit.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int
    attention: GroupedAttention | LatentAttention
    dense_width: int
    expert_width: int
    num_experts: int
    top_k: int
    shared_width: int = 0
    is_tied: bool = False
    max_positions: int | None = None
    routing_groups: tuple[int, int] | None = None

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def parameters_of_expert(self) -> int:
        """Of one expert of one layer: 3 H F."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def num_expert_parameters(self) -> int:
        """Of all routed experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.parameters_of_expert

    @cached_property
    def num_sharded_parameters(self) -> int:
        """What tensor parallelism shards."""
        return self.num_layers * self.attention.num_sharded(self.hidden_size)

    @cached_property
    def num_whole_parameters(self) -> int:
        """What every rank has whole: embeddings, norms, routers, plain MLPs, shared experts, latent projections."""
        norms = self.num_layers * (2 * self.hidden_size + self.attention.num_norms) + self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        return embeddings + norms + self._num_whole_matrices

    @property
    def num_dense_parameters(self) -> int:
        """All but the routed experts."""
        return self.num_sharded_parameters + self.num_whole_parameters

    @property
    def num_parameters(self) -> int:
        return self.num_dense_parameters + self.num_expert_parameters

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets: K experts a layer, and all that is dense."""
        return self.num_dense_parameters + self.num_moe_layers * self.top_k * self.parameters_of_expert

    @property
    def whole_flops(self) -> float:
        """Forward FLOPs of a token in what every rank has whole; a matrix element is a multiplication and an addition.

        The output embedding works, the input embedding is looked up.
        """
        return 2.0 * (self._num_whole_matrices + self.vocab_size * self.hidden_size)

    @property
    def projection_flops(self) -> float:
        """Forward FLOPs of a token in the projections that tensor parallelism shards."""
        return 2.0 * self.num_sharded_parameters

    @property
    def expert_flops(self) -> float:
        """Forward FLOPs of a token in its K routed experts of all layers."""
        return 2.0 * self.num_moe_layers * self.top_k * self.parameters_of_expert

    def score_flops(self, seq_len: int, *, causal: bool) -> float:
        """Forward FLOPs of a token in scores and in weighing values, over all layers and heads.

        Args:
            causal: a fused attention, which leaves out what lies in the future; an eager one computes it all.
        """
        width = self.attention.score_dim + self.attention.value_dim
        return 2.0 * self.num_layers * self.attention.num_heads * width * seq_len * (0.5 if causal else 1.0)

    @cached_property
    def _num_whole_matrices(self) -> int:
        plain = self.num_dense_layers * 3 * self.hidden_size * self.dense_width
        moe = self.num_moe_layers * self.hidden_size * (3 * self.shared_width + self.num_experts)
        return plain + moe + self.num_layers * self.attention.num_whole_matrices(self.hidden_size)
