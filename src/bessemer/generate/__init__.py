"""Inference: loading a run, sampling, batch decoding, and the engine for requests."""

from bessemer.generate.decoder import Decoder
from bessemer.generate.engine import Engine, EngineThread
from bessemer.generate.load import LoadedModel, load_model
from bessemer.generate.request import Event, Handle, QueueFull, Request, Result, Sample
from bessemer.generate.sampling import SamplingOptions
from bessemer.generate.speculate import Speculation
from bessemer.generate.text import Completion, StopDetector, TextStream, sample
