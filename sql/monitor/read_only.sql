-- As monitor/isolation.sql: what follows only reads.
SET transaction_read_only = on
