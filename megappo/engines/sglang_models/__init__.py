"""Package for SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang takes a model from here at once, and imports its own hundreds,
which takes a second, only for one that is not here."""
