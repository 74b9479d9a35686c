"""Barriers for measurements with more ranks than cores."""

from __future__ import annotations

from time import sleep

from mpi4py import MPI


def sleeping_barrier(comm: MPI.Intracomm) -> None:
    """A barrier whose early ranks do not spin: they would slow what is measured."""
    request = comm.Ibarrier()
    while not request.Test():
        sleep(1e-4)


def meet(comm: MPI.Intracomm) -> None:
    """Wait asleep for the last rank, then leave together."""
    sleeping_barrier(comm)
    comm.Barrier()
