"""The paper's experiments by label, at three scales, and their figures. Imports no torch.

.. code-block:: text

    scales.py   what is trained, how long: paper, gpu, cpu      spaces.py   the sweep spaces of its tables
    cells.py    one run, with what a figure says of it          labels.py   label, scale → cells, runs
    lines.py    a finished run as one JSON line                 results.py  those lines, asked by cell
    plots.py    how a figure looks                              figures.py  what is in it
    command.py  `paceline paper`, `paceline figures`
"""
