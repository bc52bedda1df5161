-- As conn/read_committed.sql: what follows only reads.
SET transaction_read_only = on
