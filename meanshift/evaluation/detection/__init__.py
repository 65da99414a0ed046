"""Object detection on Pascal VOC with a Faster R-CNN."""
