"""Conversion of whole models: plan, convert_, fold_."""

from geoparam.conversion.convert import convert_
from geoparam.conversion.fold import fold_
from geoparam.conversion.plan import plan
from geoparam.conversion.verification import verify

__all__ = ["convert_", "fold_", "plan", "verify"]
