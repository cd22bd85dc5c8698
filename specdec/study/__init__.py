"""What the notebooks share: what to measure, how records are kept, how figures are made. No torch until a pair is built."""
