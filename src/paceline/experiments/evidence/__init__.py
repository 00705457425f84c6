"""Our own runs behind docs/results.md: what each study consists of, its tables and its figures.

.. code-block:: text

    studies: which runs ──▶ the sweep engine ──▶ records, a line a run ──▶ tables, figures ──▶ docs/results.md
"""
