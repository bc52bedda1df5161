-- As conn/read_committed.sql: what follows writes. A standby refuses it.
SET transaction_read_only = off
