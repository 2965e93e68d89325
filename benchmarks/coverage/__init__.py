"""Every model of timm, torchvision, transformers and segmentation_models_pytorch, against hand-written references."""
