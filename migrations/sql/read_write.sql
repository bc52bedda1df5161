-- As isolation.sql, for a transaction that writes.
SET transaction_read_only = off
