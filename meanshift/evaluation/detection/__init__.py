"""Object detection in the layout of Pascal VOC, with a Faster R-CNN."""
