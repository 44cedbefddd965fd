"""The rows of a step, each at the rank that owns it."""

from dataclasses import dataclass

from megappo.batch.exchange import Exchange, RankRows, RowTable
from megappo.batch.rows import Rows
from megappo.batch.rows_file import RowsFile


@dataclass(frozen=True)
class Batch:
    """A step's rows at their owners, and what every rank knows about all of them."""

    rows: Rows
    table: RowTable
    owners: RankRows

    def at_rank_0(self, exchange: Exchange) -> Rows:
        """Gather all rows with all fields on rank 0, none elsewhere; all ranks together."""
        destinations = (tuple(range(len(self.table))), *[()] * (exchange.world_size - 1))
        return exchange.move(self.rows, self.table, self.owners, destinations, list(self.rows.fields))

    @classmethod
    def read(cls, file: RowsFile, exchange: Exchange) -> "Batch":
        """Read a file of `write_rows`; each rank reads the rows it owns."""
        owners = file.table.split(exchange.world_size)
        mine = owners[exchange.rank]
        return cls(file.rows(mine[0], mine[-1] + 1) if mine else file.rows(0, 0), file.table, owners)
