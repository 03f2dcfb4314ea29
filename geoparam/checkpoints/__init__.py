"""Checkpoints of converted models, folded without the model: state dicts and files."""

from geoparam.checkpoints.checkpoint_files import fold_checkpoint
from geoparam.checkpoints.state_dicts import fold_state_dict

__all__ = ["fold_checkpoint", "fold_state_dict"]
