"""Text from models: loading a run for inference, choosing tokens, and the compiled decoder."""

from bessemer.generate.decoder import Decoder, Generation
from bessemer.generate.load import LoadedModel, load_model
from bessemer.generate.sampling import SamplingOptions
from bessemer.generate.text import Completion, complete, sample

__all__ = [
    "Completion",
    "Decoder",
    "Generation",
    "LoadedModel",
    "SamplingOptions",
    "complete",
    "load_model",
    "sample",
]
