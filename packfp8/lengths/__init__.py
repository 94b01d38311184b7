"""Lengths: how long each example will be, before any audio is read. Integers only; numpy, and no torch."""

from packfp8.lengths.audio import AudioFrames
from packfp8.lengths.conv import Conv
from packfp8.lengths.encoder_probe import ProbeReport, probe
from packfp8.lengths.histogram import Histogram
from packfp8.lengths.measure import ClipSpan, Encoded, Measure, Measured
from packfp8.lengths.room import LEAST_ROOM_FRAMES, SILENT_FRAMES, check_rooms, rooms
from packfp8.lengths.template import Template
from packfp8.lengths.tokenizer import ByteTokenizer

__all__ = [
    "LEAST_ROOM_FRAMES",
    "SILENT_FRAMES",
    "AudioFrames",
    "ByteTokenizer",
    "ClipSpan",
    "Conv",
    "Encoded",
    "Histogram",
    "Measure",
    "Measured",
    "ProbeReport",
    "Template",
    "check_rooms",
    "probe",
    "rooms",
]
