"""The insides of perturbation: which steps there are, a layer after them, and their bounds."""
