"""One file a protocol: frozen encoder in, named figures and a protocol card out."""
