"""Fine-tuning of a pretrained network with BatchNorm: settings and runs, network, images, loop."""
