"""Adapters for the trainers that people use. They translate events and hold no logic: one guard is behind them all.

from nanproof.integrations.transformers import GuardCallback     Hugging Face Trainer, TRL
from nanproof.integrations.accelerate import guard_accelerator   Accelerate
from nanproof.integrations.lightning import GuardCallback        Lightning

Each module imports its library, so import the one that you use.
"""
