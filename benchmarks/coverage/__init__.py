"""Every model of timm, torchvision, transformers and segmentation_models_pytorch, held against hand-written references."""
