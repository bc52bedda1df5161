-- As monitor/isolation.sql: what follows writes.
SET transaction_read_only = off
