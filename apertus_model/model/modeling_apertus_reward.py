"""A reward model of the Apertus architecture as a sequence classifier, for which transformers has no class.

An export ships this file beside the weights, and `config.json` names it:

    AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)

gives a reward for each row: that of its last token that is not padding. The weights are those of
transformers' own `ApertusForTokenClassification`, which opens the folder without this code. The file needs
nothing but transformers.
"""

from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.apertus.modeling_apertus import ApertusPreTrainedModel


class ApertusForSequenceClassification(GenericForSequenceClassification, ApertusPreTrainedModel):
    """The layers (`model`) and the head (`score`), which is a linear layer without bias."""
