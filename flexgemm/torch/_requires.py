"""Imported first: other imports of an older torch fail by names that do not say that it is too old."""

import torch

if torch.__version__ < "2.7.0a0":  # builds before a release count
    raise ImportError(f"flexgemm.torch needs torch 2.7 or later, got {torch.__version__}")
