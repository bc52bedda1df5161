-- Lifts the fencing tokens after a pg_upgrade or a restore; else does nothing.
SELECT repair_lock_tokens()
