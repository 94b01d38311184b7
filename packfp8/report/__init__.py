"""Report: what the packing achieves, for people; where FP8 pays on a GPU; what stands in the way on a machine."""

from packfp8.report.doctor import Doctor, doctor
from packfp8.report.measure import report
from packfp8.report.payoff import Payoff, payoff
from packfp8.report.ranks import launched
from packfp8.report.result import Report

__all__ = ["Doctor", "Payoff", "Report", "doctor", "launched", "payoff", "report"]
