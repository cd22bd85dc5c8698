"""What is drawn beside the data."""

import matplotlib.pyplot as plt
import pytest

from specdec.study import figures


@pytest.mark.parametrize("width", [4.0, 6.4])
@pytest.mark.parametrize("commits", [1, 9])
def test_the_line_of_origin_is_never_cut_off(width, commits):
    figures.style()
    figure, axes = plt.subplots(figsize=(width, 3))
    axes.set_xlabel("n")
    known = ", ".join(f"{i:x}bf1e0a9" for i in range(commits))
    figures.credit(figure, f"AMD EPYC, 2 cores, 24 GiB · 2026-11-29 · standard · commit {known}")
    figure.draw_without_rendering()
    box, below = figure._supxlabel.get_window_extent(), axes.xaxis.label.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= below.y0
    plt.close(figure)
