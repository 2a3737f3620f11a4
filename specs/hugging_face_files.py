"""The files of a Hugging Face model folder: the fields that this program reads from each."""

from typing import Annotated, Any

from pydantic import Field

from specs.capabilities import WIDTHS
from specs.foreign import Foreign

MOST = 2**31
Id = Annotated[int, Field(ge=-1, le=MOST)]
Ids = Id | list[Id] | None
Word = str | int | float | bool
Words = Word | list[Word] | None


class Kind(Foreign):
    """The fields of `config.json` that say what computes a model."""

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: dict[str, Any] | None = None


class GenerationConfig(Foreign):
    """The fields of `generation_config.json` that are read; `config.json` may have them, too."""

    bos_token_id: Id | None = None
    eos_token_id: Ids = None
    pad_token_id: Id | None = None


class Config(GenerationConfig):
    """The fields of `config.json` that are read. `ModelSpec` bounds the dimensions."""

    vocab_size: int
    hidden_size: int = Field(gt=0)
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)
    rope_theta: float | None = None
    rope_parameters: dict[str, str | float | None] | None = None
    rope_scaling: dict[str, str | float | None] | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = Field(65_536, gt=0, le=MOST)
    # fields of the classes that exports ship
    layer_schedule: list[Any] | None = None
    layer_schedule_of: dict[str, dict[str, Any]] = Field(default_factory=dict)
    mamba_layers: list[int] | None = None
    mamba_conv_width: int = 4
    mamba_chunk: int = 64
    mamba_decay: bool = True


class OtherConfig(GenerationConfig):
    """The fields of the `config.json` of another architecture that are read. Each of its lengths is the
    context, under the name that some architecture gives it."""

    max_position_embeddings: int | None = Field(None, gt=0, le=MOST)
    n_positions: int | None = Field(None, gt=0, le=MOST)
    max_sequence_length: int | None = Field(None, gt=0, le=MOST)
    max_seq_len: int | None = Field(None, gt=0, le=MOST)

    @property
    def context(self) -> int:
        """The context in tokens; `MOST` for an architecture without a limit."""
        lengths = (
            self.max_position_embeddings,
            self.n_positions,
            self.max_sequence_length,
            self.max_seq_len,
        )
        return next((length for length in lengths if length is not None), MOST)


class Stored(Foreign):
    """The shapes and the dtype of stored weights, from the `config.json` of any model; transformers has
    renamed `torch_dtype` to `dtype`."""

    dtype: str | None = None
    torch_dtype: str | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str | None = None

    @property
    def width(self) -> int | None:
        """The bytes of a weight; None if its dtype is unknown."""
        return WIDTHS.get(self.dtype or self.torch_dtype or "")


class AddedToken(Foreign):
    id: Id
    content: str


class TokenizerFile(Foreign):
    """The fields of `tokenizer.json` that are checked before the library reads it."""

    added_tokens: list[AddedToken] = Field(default_factory=list)


class SpecialToken(Foreign):
    content: str


class TokenizerConfig(Foreign):
    """The fields of `tokenizer_config.json` and `special_tokens_map.json` that are read."""

    bos_token: str | SpecialToken | None = None
    eos_token: str | SpecialToken | None = None
    pad_token: str | SpecialToken | None = None
    chat_template: str | list[dict[str, str]] | None = None


class DatasetShard(Foreign):
    filename: str


class SavedDataset(Foreign):
    """The fields of `state.json`, which `datasets` writes beside the shards of a data set, that are read."""

    shards: list[DatasetShard] | None = Field(None, alias="_data_files")


class Index(Foreign):
    """`model.safetensors.index.json`: the file of every weight."""

    weight_map: dict[str, str] = Field(min_length=1)


class Card(Foreign):
    """The front matter of a model's `README.md`."""

    license: Words = ""
    language: Words = ""
