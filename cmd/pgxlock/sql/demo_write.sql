-- A write that only the holder of the lock may do. $1 worker, $2 token
INSERT INTO demo_ledger (worker, token) VALUES ($1, $2)
