"""What the three servers share: who may ask, how errors are answered, options, and limits on connections."""
