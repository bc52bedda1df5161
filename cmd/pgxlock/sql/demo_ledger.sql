-- All that was written.
SELECT worker, token FROM demo_ledger ORDER BY id
