"""The chat format of Apertus: messages in normal form, the template that renders them, tokens and loss
masks."""
